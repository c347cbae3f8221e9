"""`resume RUN KEY=VALUE` and `resume RUN --code`: continue a run with another config, or with today's code.

And `submit --from RUN KEY=VALUE`: another run with the config of this one.

A change is made when no rank is at work. All that it replaces is first written into a folder of the run directory; the
description of the change, which is written last, decides that it is made. Whoever finds such a folder later completes the
change (`finish_change`). The former files stay beside the new ones: config.0001.yaml, job.0001.sbatch, code.0001.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from slurmtrain.checkpoint.format.directory import newest_committed_step
from slurmtrain.choices import Allow, JobKind
from slurmtrain.config.frozen import freeze, load_frozen, to_config, to_values
from slurmtrain.config.known_models import is_our_decoder
from slurmtrain.config.overrides import fields_instead, unknown_field
from slurmtrain.config.parallel_dims import ParallelDims
from slurmtrain.config.rules import validate
from slurmtrain.config.schema import Config, JobConfig
from slurmtrain.data.sources.config_check import check_prepared
from slurmtrain.errors import ConfigError, UsageError
from slurmtrain.launch import submit_once
from slurmtrain.launch.code_source import CodeSource, find_source
from slurmtrain.launch.named_paths import check_in_snapshot, check_named_paths, with_absolute_paths
from slurmtrain.launch.script import render_script, without_past
from slurmtrain.launch.snapshot import take_snapshot
from slurmtrain.launch.submit import facts_of_config, job_paths
from slurmtrain.planner.fit import check_fits
from slurmtrain.planner.schedule import learning_rate
from slurmtrain.report.compare import MISSING, config_differences
from slurmtrain.runs import lookup
from slurmtrain.runs.reasons import Event
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runs.software import CodeRecord, read_code_record, record_of
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.system import files, records
from slurmtrain.system.files import folder_mode

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override


log = logging.getLogger(__name__)

# The place of a run and who runs it are decided when it is submitted.
FIXED = ("job.name", "job.runs_dir", "job.kind", "cluster.backend", "cluster.slurm_conf", "cluster.sandbox")
# For a run of a sweep, also all groups that its array's script is made of, and the varied keys.
OF_THE_SWEEP = ("cluster", "requeue", "hooks", "secrets", "job", "sweep")
STAGED, DECISION = ".change", "decision.json"
MAP_TASK = "slurmtrain.rank.jobs.map_task"  # in job.command


def change(
    run_dir: RunDir, overrides: Sequence[str], cwd: Path, *, code: bool = False, client: SlurmClient | None = None
) -> list[str]:
    """Change a run none of whose ranks is at work, before it starts again. Nothing is changed if anything is wrong.

    The same overrides once more change nothing until an attempt has begun with them: whoever was interrupted before the run
    was submitted types the same command again.

    Args:
        overrides: fields of the config, `key=value` in Hydra's grammar; train.steps=+N are N more.
        cwd: the folder of the command, to which paths in them are relative.
        code: take a new snapshot, from the folder where the run was submitted.
        client: asked whether SLURM accepts the script; None: SLURM is not asked.

    Returns:
        Sentences that say what is different now.

    Raises:
        UsageError: an override cannot be read, or names what cannot be changed.
        ConfigError: the changed config cannot work, or the folder of the code no longer exists.
        ClusterError: SLURM would refuse the job.
    """
    finish_change(run_dir)
    before, info = load_frozen(run_dir.config_file, with_secrets=False), run_dir.info()
    changes, last_attempt = info.get("changes", []), max(run_dir.attempt_numbers(), default=0)
    latest = changes[-1] if changes and not code else {}
    if overrides and (latest.get("typed"), latest.get("attempts")) == (list(overrides), last_attempt):
        return [f"changed already: {word}" for word in latest["set"]]
    config, words = plan(run_dir, before, overrides, cwd) if overrides else (before, [])
    facts: dict[str, Any] = {"time": time.time(), "set": words, "typed": list(overrides), "attempts": last_attempt}
    new: dict[str, Any] = {"own_checkpoints": None} if "own_checkpoints" in info else {}
    new |= facts_of_config(config)
    staged = run_dir.path / STAGED
    staged.mkdir(mode=folder_mode(run_dir.path))
    try:
        if code:
            record, source = _snapshot(config, info, staged / run_dir.code.name)
            facts["code"] = {**info["code"], **record.git}
            new |= {"code": facts["code"], "workdir": source.workdir, "import_roots": list(source.roots)}
            _take_along(run_dir, staged / run_dir.code.name)
        script = render_script(config, job_paths([run_dir.path], {**info, **new}))
        if client is not None:
            proposed = staged / f"proposed-{run_dir.script.name}"
            files.write_text(proposed, without_past(script))
            submit_once.check(proposed, client)
        files.write_text(staged / run_dir.config_file.name, freeze(config))
        files.write_text(staged / run_dir.script.name, script)
        new |= {"overrides": [*info["overrides"], *words], "changes": [*changes, facts], "packed": False}
        files.write_json(staged / DECISION, {"number": len(changes) + 1, "info": new})
    finally:
        finish_change(run_dir)
    changed_fields = {key: list(values) for key, values in differences(before, config).items()}
    run_dir.event(Event.CHANGED, set=words, changed=changed_fields, code=facts.get("code"))
    return describe(before, config, newest_committed_step(run_dir.checkpoints))


def finish_change(run_dir: RunDir) -> None:
    """Complete a change that was decided and cut short; remove what is left of one that was not.

    Called only by the process that has claimed the run. It may be cut short itself.
    """
    staged = run_dir.path / STAGED
    decision = records.read_json(staged / DECISION)
    if decision is not None:
        for path in (run_dir.config_file, run_dir.script, record_of(run_dir.code), run_dir.code):
            fresh = staged / path.name
            kept = path.with_name(f"{path.stem}.{decision['number']:04d}{path.suffix}")  # config.0001.yaml, code.0001
            if not os.path.lexists(fresh):
                continue
            if os.path.lexists(path) and not os.path.lexists(kept):
                path.rename(kept) if path == run_dir.code else files.link_or_copy(path, kept)
            fresh.replace(path)
        run_dir.update_info(**decision["info"])
    shutil.rmtree(staged, ignore_errors=True)


def plan(run_dir: RunDir, before: Config, overrides: Sequence[str], cwd: Path) -> tuple[Config, list[str]]:
    """Return the config of a run with these fields changed, and the overrides without relative values, after all checks.

    Raises as `change`. Nothing is written.
    """
    words = with_steps(overrides, before)
    if lookup.is_sweep(run_dir.path.parent):
        check_of_one_run(words, run_dir.info().get("varied") or ())
    config, dims = changed(before, words, cwd)
    step = newest_committed_step(run_dir.checkpoints)
    check_meaning(before, config, step)
    check_fits(config, dims)
    check_prepared(config)
    for warning in check_named_paths(config, cwd, begun=step is not None):
        log.warning(warning)
    return config, words


def _take_along(run_dir: RunDir, fresh: Path) -> None:
    """Link into a new snapshot the files that the program has written beside its code, such as its checkpoints.

    They are links, or copies, so that the former snapshot stays whole.
    """
    record = read_code_record(run_dir.code_record_file) or CodeRecord()
    for folder, _, names in os.walk(run_dir.code):
        for path in (Path(folder) / name for name in names if Path(folder).name != "__pycache__"):
            inside = path.relative_to(run_dir.code)
            if str(inside) not in {**record.files, **record.links} and not os.path.lexists(fresh / inside):
                (fresh / inside).parent.mkdir(parents=True, exist_ok=True)
                files.link_or_copy(path, fresh / inside)


def _snapshot(config: Config, info: Mapping[str, Any], target: Path) -> tuple[CodeRecord, CodeSource]:
    """Copy the code as it is now, from the folder where the run was submitted."""
    cwd = Path(info["submit_dir"])
    if info["workdir"].startswith("/"):
        raise UsageError(
            f"--code: this run has no snapshot; it runs in place, in {info['workdir']}",
            hint="it already runs the current code; resume it without --code",
        )
    if not cwd.is_dir():
        raise ConfigError(f"--code: {cwd}, from which the run was submitted, no longer exists")
    source = find_source(config.job, cwd, config.cluster)
    if source.root is None:
        raise ConfigError(f"--code: {cwd} is no longer in a git work tree", hint="job.snapshot=cwd copies a folder")
    record = take_snapshot(config.job, source, target)
    # `target` becomes RUN/code, with the files that the run itself has written beside its code.
    check_in_snapshot(config, target / Path(source.workdir).relative_to("code"), source, cwd)
    return record, source


def changed(
    config: Config, overrides: Sequence[str], cwd: Path, *, fixed: Sequence[str] = FIXED
) -> tuple[Config, ParallelDims]:
    """Return the config with these fields changed, validated, and its parallel dims.

    Args:
        fixed: fields that cannot be changed; none of a run that is only going to be submitted.

    Raises:
        UsageError: an override cannot be read, or names what cannot be changed.
        ConfigError: an unknown field, or a value that cannot work.
    """
    from slurmtrain.config.compose import set_field

    values = to_values(config)
    for word in overrides:
        override = parse_override(word)
        key = override.key_or_group
        if key in fixed or key.startswith("hydra."):
            raise UsageError(f"{word}: {key} was decided when the run was submitted", hint="submit it anew")
        set_field(values, override)
    found = to_config(values)
    dims = validate(found)
    return with_absolute_paths(found, cwd), dims


def config_from(
    run_dir: RunDir, overrides: Sequence[str], cwd: Path, *, config_dir: str | None = None
) -> tuple[Config, ParallelDims]:
    """Return the config of a run with overrides, for another run, after all checks of its fields.

    With `+cluster=NAME` all of the group `cluster` is that of the other cluster. The folder of runs is this shell's.

    Raises:
        UsageError: an override that cannot be read, or chooses another group; or the run is a call of `slurmtrain.map`.
        ConfigError: a value that cannot work.
    """
    config = load_frozen(run_dir.config_file, with_secrets=False)
    if MAP_TASK in str(config.job.command):
        raise UsageError(
            f"run {run_dir.id} calls a function of slurmtrain.map, which lies in its sweep", hint="call map again"
        )
    config = replace(config, job=replace(config.job, runs_dir=JobConfig().runs_dir))
    chosen = [word for word in overrides if re.match(r"\+{0,2}cluster=", word)]
    others = [word for word in overrides if word not in chosen]
    if chosen:
        from slurmtrain.config.compose import compose

        of_cluster = [word for word in others if re.match(r"[+~]{0,2}cluster\.", word)]
        others = [word for word in others if word not in of_cluster]
        config = replace(config, cluster=compose([*chosen, *of_cluster], config_dir=config_dir).cluster)
    return changed(config, others, cwd, fixed=())


def parse_override(word: str) -> Override:
    """Return an override that sets one field.

    Raises:
        UsageError: it cannot be read, names no field, or sets something else than one field.
    """
    from slurmtrain.config.compose import parse

    parsed = parse(word)
    field, hint = parsed.key_or_group, None
    plain = not parsed.is_delete() and not parsed.is_sweep_override()
    if plain and not parsed.is_hydra_override() and (unknown := unknown_field(field, f" (in {word!r})")) is not None:
        raise unknown
    if plain and not isinstance(parsed.value(), dict):
        hint = fields_instead(field, str(parsed.value()))
    if "." not in field or hint is not None or not plain:
        raise UsageError(f"{word}: only single fields can be set", hint=hint or "such as optim.lr=1e-4")
    return parsed


def check_of_one_run(overrides: Sequence[str], varied: Iterable[str]) -> None:
    """Check that overrides of a run of a sweep change nothing that the sweep has decided.

    Args:
        varied: what distinguishes the run within its sweep, as "key=value".

    Raises:
        UsageError: one does. `sweep retry` and the tables of the sweep would still use the former value.
    """
    keys = [each.partition("=")[0].partition("@")[0].replace("/", ".") for each in varied]
    for word in overrides:
        field = parse_override(word).key_or_group
        if field.partition(".")[0] in OF_THE_SWEEP:
            why = f"{field} is the same for all runs that share a job"
        elif any(f"{field}.".startswith(f"{key}.") or key.startswith(f"{field}.") for key in keys):
            why = f"its sweep varies {field}"
        else:
            continue
        raise UsageError(f"{word}: this is a run of a sweep, and {why}", hint="submit it as a separate run")


# The fields that a run may change while it keeps its checkpoints, and what a change means. Pure decisions.
#
# What a checkpoint holds was computed with a model, on samples in an order, in steps of a global batch. Another value of such a
# field would leave the numbers as they are and change what they stand for, so it is refused, with the reason. All else may
# change: resources, the length of training, learning rates, what is saved, logged and evaluated.

Values = tuple[Any, Any]  # a field's value before and after

# Of our own decoder and of adapters, fields that change what is computed from now on, not what the weights stand for.
DROPOUT = ("model.dropout", "lora.dropout")
# Fields, and groups of them, that a checkpoint's numbers are numbers of -> why they cannot change.
_ORDER = "its place among the samples is a number in the order that `data`, train.seed and train.shuffle give"
_WEIGHTS = "its weights and the state of its optimiser are those of the model as it was"
_BASE = "its adapters were trained beside the weights of that folder, which every start reads from there"
_STEPS = "its steps, its schedule and its place among the samples are counted in global batches"
_OWN = "it goes on from its own checkpoints, so this would have no effect"
MEANING = {
    "model": _WEIGHTS,
    "lora": _WEIGHTS,
    "data": _ORDER,
    "train.seed": _ORDER,
    "train.shuffle": _ORDER,
    "train.global_batch_size": _STEPS,
    "checkpoint.restore_from": _OWN,
    "checkpoint.restore_only": _OWN,
}
RELATIVE = re.compile(r"\A(\+{0,2}train\.steps)=\+(\d+)\Z")
OF_SCHEDULE = ("train.steps", "optim.lr", "optim.warmup_steps", "optim.min_lr_ratio")
ABSENT = "(not there)"


def differences(before: Config, after: Config) -> dict[str, Values]:
    """Return the fields with other values, by dotted key; a field that only one config has is ABSENT in the other."""
    found = config_differences(to_values(before), to_values(after))
    return {key: (ABSENT if old is MISSING else old, ABSENT if new is MISSING else new) for key, old, new in found}


def check_meaning(before: Config, after: Config, step: int | None) -> None:
    """Check that a change leaves what the run's checkpoints hold as it is.

    Args:
        step: the step of the newest checkpoint; None: there is none, and all may change.

    Raises:
        UsageError: it does not; the message gives the field, its values and the reason.
    """
    if step is None or after.job.kind != JobKind.TRAIN:
        return
    changes = differences(before, after)
    for key, values in changes.items():
        reason = _reason(key, before)
        if reason is None or (Allow.CONFIG in after.checkpoint.allow and reason != _OWN):
            continue
        hint = "submit it as a separate run"
        if reason != _OWN:
            hint += (
                ", with these weights if you like (checkpoint.restore_from=CHECKPOINT checkpoint.restore_only=model); "
                "checkpoint.allow=[config,data] in the same command goes on at this step all the same"
            )
        raise UsageError(f"{key}: {told(values)} cannot change after step {step} of the run: {reason}", hint=hint)
    if after.train.steps < step:
        raise UsageError(
            f"train.steps={after.train.steps} is less than {step}, the steps that the run has done",
            hint=f"train.steps={step} ends it here, train.steps=+100 goes on",
        )


def _reason(key: str, before: Config) -> str | None:
    """Return why a field cannot change; None if it can."""
    group = key.partition(".")[0]
    if key in DROPOUT:
        return None
    if key == "model.path" and before.lora.r:
        return _BASE
    if group == "model" and not is_our_decoder(before.model) and key != "model._target_":
        return None  # we cannot know what it means; names and shapes of the tensors are compared at the restore
    return MEANING.get(key) or MEANING.get(group)


def with_steps(overrides: Sequence[str], config: Config) -> list[str]:
    """Return the overrides with train.steps=+N replaced by that many steps more than the config has."""
    return [RELATIVE.sub(lambda match: f"{match[1]}={config.train.steps + int(match[2])}", word) for word in overrides]


def describe(before: Config, after: Config, step: int | None) -> list[str]:
    """Return a line for each changed field, and what becomes of the learning rate.

    Args:
        step: steps that the run has done; None: none yet.
    """
    changes = differences(before, after)
    lines = [f"{key}: {told(values)}" for key, values in changes.items()]
    if step and after.job.kind == JobKind.TRAIN and any(key in changes for key in OF_SCHEDULE):
        rates = [learning_rate(step, total_steps=config.train.steps, config=config.optim) for config in (before, after)]
        lines.append(
            f"learning rate of step {step + 1}: {rates[0]:.3g} -> {rates[1]:.3g}, on the schedule of "
            f"train.steps={after.train.steps} and optim.lr={after.optim.lr:g} from here on"
        )
    return lines


def told(values: Values) -> str:
    """Return a change as a person reads it: "200 -> 300"."""
    return " -> ".join("null" if value is None else str(value) for value in values)
