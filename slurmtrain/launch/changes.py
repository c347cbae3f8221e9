"""`resume RUN key=value` and `--code`: continue with another config, or with the code as it is now.

The former files stay beside the new ones: config.0001.yaml, job.0001.sbatch, code.0001; and run.json lists each change.
A change can be cut short at any moment: run.json names its number from before the first step to the last, which is one
write of run.json, and `undo_unfinished` undoes one that was cut short.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slurmtrain.config.frozen import config_hash, first_line, freeze, load_frozen, to_config, to_values
from slurmtrain.config.keys import fields_instead, unknown_field
from slurmtrain.config.parallel_dims import ParallelDims
from slurmtrain.config.schema import Config
from slurmtrain.config.validate import validate
from slurmtrain.data.sources.config_check import check_prepared
from slurmtrain.errors import ConfigError, UsageError
from slurmtrain.launch import submit_once
from slurmtrain.launch.change_rules import check_meaning, describe, differences, with_steps
from slurmtrain.launch.directives import without_past
from slurmtrain.launch.import_paths import interpreter_of
from slurmtrain.launch.named_paths import check_named_paths, with_absolute_paths
from slurmtrain.launch.program_check import check_in_snapshot
from slurmtrain.launch.script import render_script
from slurmtrain.launch.snapshot import Snapshot, find_source, take_snapshot
from slurmtrain.launch.submit import code_facts, job_paths, own_checkpoints_of, steps_of
from slurmtrain.planner.fit import check_fits
from slurmtrain.runs import lookup, reached_step
from slurmtrain.runs.code_record import record_of
from slurmtrain.runs.events import Event
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.system import files

log = logging.getLogger(__name__)

# The place of a run and who runs it are decided when it is submitted.
FIXED = ("job.name", "job.runs_dir", "job.kind", "cluster.backend", "cluster.slurm_conf", "cluster.sandbox")
# For a run of a sweep, also all groups that its array's script is made of, and the varied keys.
OF_THE_SWEEP = ("cluster", "requeue", "hooks", "secrets", "job", "sweep")
_FRESH = ".code-"  # followed by a process id: code that is being copied, or removed


def change(
    run_dir: RunDir,
    overrides: Sequence[str],
    cwd: Path,
    *,
    code: bool = False,
    client: SlurmClient | None = None,
) -> list[str]:
    """Change a run none of whose ranks is at work, before it starts again. Nothing is changed if anything is wrong.

    The same overrides once more change nothing until an attempt has begun with them: whoever was interrupted before the run
    was submitted types the same command again.

    Args:
        overrides: fields of the config, `key=value` in Hydra's grammar; train.steps=+N are N more.
        cwd: the folder of the command, to which paths in them are relative.
        code: take a new snapshot, from the folder where the run was submitted.
        client: asked whether SLURM accepts the script, if it asks for other resources; None: SLURM is not asked.

    Returns:
        Sentences that say what is different now.

    Raises:
        UsageError: an override cannot be read, or names what cannot be changed.
        ConfigError: the changed config cannot work, or the folder of the code no longer exists.
        ClusterError: SLURM would refuse the job.
    """
    before = load_frozen(run_dir.config_file, with_secrets=False)
    known = _unused(run_dir, overrides) if overrides and not code else None
    if known is not None:
        return [f"changed already: {word}" for word in known]
    config, words = plan(run_dir, before, overrides, cwd) if overrides else (before, [])
    info = run_dir.info()
    number = _free_number(run_dir, len(info.get("changes", ())) + 1)
    fresh, snapshot = run_dir.path / f"{_FRESH}{os.getpid()}", None
    try:
        if code:
            snapshot = _snapshot(config, info, fresh)
        facts: dict[str, Any] = {"time": time.time(), "set": words, "typed": list(overrides)}
        facts["attempts"] = _last_attempt(run_dir)
        new: dict[str, Any] = {"config_hash": config_hash(config), "steps": steps_of(config)}
        new |= {"own_checkpoints": None} if "own_checkpoints" in info else {}
        new |= own_checkpoints_of(config)
        if snapshot is not None:
            facts["code"] = {**info["code"], **code_facts(snapshot)}
            new |= {"code": facts["code"], "workdir": snapshot.workdir, "import_roots": list(snapshot.roots)}
            _take_along(run_dir, fresh, since=_code_taken(info))
        script = render_script(config, job_paths([run_dir.path], {**info, **new}))
        if client is not None:
            check_accepted(run_dir, script, client)
        run_dir.update_info(changing=number)
        _keep(run_dir.config_file, number)
        _keep(run_dir.script, number)
        if snapshot is not None:
            run_dir.code.rename(_kept(run_dir.code, number))
            fresh.rename(run_dir.code)
            _keep(record_of(run_dir.code), number)
            _replace_record(run_dir, fresh)
        files.write_text(run_dir.config_file, freeze(config))
        files.write_text(run_dir.script, script)
        run_dir.update_info(
            **new,
            overrides=[*info["overrides"], *words],
            changes=[*info.get("changes", ()), facts],
            packed=False,
            changing=None,
        )
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        record_of(fresh).unlink(missing_ok=True)
    changes = {key: list(values) for key, values in differences(before, config).items()}
    run_dir.event(Event.CHANGED, set=words, changed=changes, code=facts.get("code"))
    return describe(before, config, reached_step.newest_checkpoint_step(run_dir))


def plan(run_dir: RunDir, before: Config, overrides: Sequence[str], cwd: Path) -> tuple[Config, list[str]]:
    """Return the config of a run with these fields changed, and the overrides without relative values, after all checks.

    Raises as `change`. Nothing is written.
    """
    words = with_steps(overrides, before)
    if lookup.is_sweep(run_dir.path.parent):
        check_of_one_run(words, run_dir.info().get("varied") or ())
    config, dims = changed(before, words, cwd)
    check_meaning(before, config, reached_step.newest_checkpoint_step(run_dir))
    check_fits(config, dims)
    check_prepared(config)
    begun = reached_step.newest_checkpoint_step(run_dir) is not None
    for warning in check_named_paths(config, cwd, begun=begun):
        log.warning(warning)
    return config, words


def check_accepted(run_dir: RunDir, script: str, client: SlurmClient) -> None:
    """Ask SLURM whether it would accept a script that asks for other resources than the run's present one.

    Raises:
        RefusedError: it would not.
    """
    present = run_dir.script.read_text() if run_dir.script.is_file() else ""
    if _resources(script) == _resources(present):
        return
    proposed = run_dir.path / f"{_FRESH}{os.getpid()}.sbatch"
    proposed.write_text(without_past(script))
    try:
        submit_once.check(proposed, client)
    finally:
        proposed.unlink(missing_ok=True)


def _resources(script: str) -> list[str]:
    """Return the options of sbatch in a script, in order."""
    return [line for line in script.splitlines() if line.startswith("#SBATCH ")]


def _last_attempt(run_dir: RunDir) -> int:
    return max(run_dir.attempt_numbers(), default=0)


def _unused(run_dir: RunDir, overrides: Sequence[str]) -> list[str] | None:
    """Return what these overrides have set, if they are the latest change and no attempt has begun since; else None."""
    latest = next(iter(reversed(run_dir.info().get("changes") or ())), None)
    if not isinstance(latest, dict) or latest.get("typed") != list(overrides) or "code" in latest:
        return None
    return list(latest["set"]) if latest.get("attempts") == _last_attempt(run_dir) else None


def _code_taken(info: Mapping[str, Any]) -> float:
    """Return when the run's present snapshot was complete, in unix seconds."""
    taken: list[float] = [info["created"], *(each["time"] for each in info.get("changes", ()) if "code" in each)]
    return max(taken)


def _take_along(run_dir: RunDir, fresh: Path, *, since: float) -> None:
    """Link into a new snapshot the files that the program has written into the one before.

    Checkpoints that the program names relatively are such files.

    They are links, or copies, so that the former snapshot stays whole. Making one changes a file's ctime, by which it is
    recognised at the next change; a file of the snapshot itself has had its own since before `since`.
    """
    for folder, _, names in os.walk(run_dir.code):
        if Path(folder).name == "__pycache__":
            continue
        for name in names:
            source = Path(folder) / name
            target = fresh / source.relative_to(run_dir.code)
            if source.lstat().st_ctime > since and not os.path.lexists(target):
                target.parent.mkdir(parents=True, exist_ok=True)
                files.link_or_copy(source, target)


def undo_unfinished(run_dir: RunDir) -> None:
    """Restore the state of a run before a change that was cut short.

    Called only by the process that has claimed the run.
    """
    _remove_leftovers(run_dir)
    number = run_dir.info().get("changing")
    if number is None:
        kept = _kept_code(run_dir)
    else:
        for path in (run_dir.config_file, run_dir.script, record_of(run_dir.code)):
            if _kept(path, number).is_file():
                _kept(path, number).replace(path)
        kept = _kept(run_dir.code, number)
    if kept is not None and os.path.lexists(kept):
        if os.path.lexists(run_dir.code):
            run_dir.code.rename(run_dir.path / f"{_FRESH}{os.getpid()}")
        kept.rename(run_dir.code)
    if number is not None:
        run_dir.update_info(changing=None)
    _remove_leftovers(run_dir)


def _replace_record(run_dir: RunDir, fresh: Path) -> None:
    """Make what is known of the new code that of the run's; code in place has none."""
    if record_of(fresh).is_file():
        record_of(fresh).replace(record_of(run_dir.code))
    else:
        record_of(run_dir.code).unlink(missing_ok=True)


def _remove_leftovers(run_dir: RunDir) -> None:
    for left in run_dir.path.glob(f"{_FRESH}*"):
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


def _kept_code(run_dir: RunDir) -> Path | None:
    """Return the code that was kept last, if the run has none although it runs from a snapshot."""
    if os.path.lexists(run_dir.code) or run_dir.info().get("workdir", "/").startswith("/"):
        return None
    return max(
        (path for path in run_dir.path.glob("code.*") if re.fullmatch(r"code\.[0-9]{4,}", path.name)), default=None
    )


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
    from omegaconf.errors import OmegaConfBaseException

    values = to_values(config)
    for word in overrides:
        path, value, added = _parsed(word, fixed)
        inside: Any = values
        for number, part in enumerate(path):
            if not isinstance(inside, dict) or (part not in inside and not added):
                hint = f"config.yaml has all fields; `+{word}` adds one to an open group (model, data, cluster.env)"
                key = ".".join(path[: number + 1])
                raise UsageError(f"{word}: the config of this run has no {key}", hint=hint)
            if number < len(path) - 1:
                inside = inside.setdefault(part, {})
        inside[path[-1]] = value
    try:
        found = to_config(values)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{' '.join(overrides)}: {first_line(error)}", hint="config.yaml shows all fields") from None
    dims = validate(found)
    return with_absolute_paths(found, cwd), dims


def check_of_one_run(overrides: Sequence[str], varied: Iterable[str]) -> None:
    """Check that overrides of a run of a sweep change nothing that the sweep has decided.

    Args:
        varied: what distinguishes the run within its sweep, as "key=value".

    Raises:
        UsageError: one does. `sweep retry` and the tables of the sweep would still use the former value.
    """
    keys = [each.partition("=")[0].partition("@")[0].replace("/", ".") for each in varied]
    for word in overrides:
        field = ".".join(_parsed(word)[0])
        if field.partition(".")[0] in OF_THE_SWEEP:
            why = f"{field} is the same for all runs that share a job"
        elif any(f"{field}.".startswith(f"{key}.") or key.startswith(f"{field}.") for key in keys):
            why = f"its sweep varies {field}"
        else:
            continue
        raise UsageError(f"{word}: this is a run of a sweep, and {why}", hint="submit it as a separate run")


def _parsed(word: str, fixed: Sequence[str] = FIXED) -> tuple[list[str], Any, bool]:
    from hydra.errors import HydraException

    from slurmtrain.config.override_parser import TypedOverridesParser

    try:
        (parsed,) = TypedOverridesParser.create().parse_overrides([word])
    except HydraException:
        raise UsageError(f"{word}: cannot read it", hint="key=value, such as optim.lr=1e-4") from None
    field = parsed.key_or_group
    if field in fixed or field.partition(".")[0] == "hydra":
        raise UsageError(f"{word}: {field} was decided when the run was submitted", hint="submit it anew")
    plain = not parsed.is_delete() and not parsed.is_sweep_override()
    unknown = unknown_field(field, f" (in {word!r})") if plain and "." not in field else None
    if unknown is not None:
        raise unknown
    hint = fields_instead(field, str(parsed.value())) if plain and not isinstance(parsed.value(), dict) else None
    if "." not in field or hint is not None or not plain:
        raise UsageError(f"{word}: only single fields can be set", hint=hint or "such as optim.lr=1e-4")
    return field.split("."), parsed.value(), parsed.is_add() or parsed.is_force_add()


def _snapshot(config: Config, info: Mapping[str, Any], target: Path) -> Snapshot:
    """Copy the code as it is now, from the folder where the run was submitted."""
    cwd = Path(info["submit_dir"])
    if info["workdir"].startswith("/"):
        raise UsageError(
            f"--code: this run has no snapshot; it runs in place, in {info['workdir']}",
            hint="it already runs the current code; resume it without --code",
        )
    if not cwd.is_dir():
        raise ConfigError(f"--code: {cwd}, from which the run was submitted, no longer exists")
    source = find_source(config.job, cwd, interpreter_of(config.cluster))
    if source.root is None:
        raise ConfigError(f"--code: {cwd} is no longer in a git work tree", hint="job.snapshot=cwd copies a folder")
    snapshot = take_snapshot(config.job, source, target)
    # `target` becomes RUN/code, with the files that the run itself has written beside its code.
    check_in_snapshot(config, target / Path(snapshot.workdir).relative_to("code"), source, cwd)
    return snapshot


def _kept(path: Path, number: int) -> Path:
    """Return the name that the file at `path` gets when change `number` replaces it: config.0001.yaml, code.0001."""
    return path.with_name(f"{path.stem}.{number:04d}{path.suffix}")


def _free_number(run_dir: RunDir, number: int) -> int:
    """Return the first number, from `number` on, under which nothing is kept."""
    while any(os.path.lexists(_kept(path, number)) for path in (run_dir.config_file, run_dir.script, run_dir.code)):
        number += 1
    return number


def _keep(path: Path, number: int) -> None:
    """Keep a file under another name beside itself, whole or not at all."""
    if path.is_file():
        kept = _kept(path, number)
        shutil.copy2(path, kept.with_name(f".{kept.name}"))
        kept.with_name(f".{kept.name}").rename(kept)
