"""`resume RUN --set key=value` and `--code`: go on with another config, or with the code as it is now.

What a run was before stays beside it: config.0001.yaml, job.0001.sbatch, code.0001; and run.json tells of each change.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slurmtrain import rundir
from slurmtrain.config.compose import config_hash, freeze, load_frozen, to_config, to_values
from slurmtrain.config.schema import Config
from slurmtrain.config.validate import validate
from slurmtrain.data.prepared_config import check_prepared
from slurmtrain.errors import ConfigError, UsageError
from slurmtrain.launch.import_paths import interpreter_of
from slurmtrain.launch.named_paths import check_named_paths, with_absolute_paths
from slurmtrain.launch.sbatch import render_script
from slurmtrain.launch.snapshot import Snapshot, find_source, take_snapshot
from slurmtrain.launch.submit import job_paths, steps_of
from slurmtrain.planner.fit import check_fits
from slurmtrain.rundir import RunDir

# Where a run lies and who runs it: decided when it was submitted.
FIXED = ("job.name", "job.runs_dir", "job.kind", "cluster.backend", "cluster.slurm_conf", "cluster.sandbox")


def change(run_dir: RunDir, overrides: Sequence[str], cwd: Path, *, code: bool = False) -> None:
    """Change a run that has ended, before it is resumed. Nothing is changed when anything is wrong.

    Args:
        overrides: fields of the config, `key=value` in Hydra's grammar.
        cwd: the folder of the command, to which paths in them are relative.
        code: take a new snapshot, from where the run was submitted.

    Raises:
        UsageError: an override cannot be read, or names what cannot be changed.
        ConfigError: the config as changed cannot work, or there is no code where it was.
    """
    config = load_frozen(run_dir.config_file, with_secrets=False)
    if overrides:
        config = changed(config, overrides, cwd)
        check_fits(config)
        check_prepared(config)
        check_named_paths(config, cwd)
    info = run_dir.info()
    number = len(info.get("changes", ())) + 1
    fresh, snapshot = run_dir.path / f".code-{os.getpid()}", None
    try:
        if code:
            snapshot = _snapshot(config, info, fresh)
        facts: dict[str, Any] = {"time": time.time(), "set": list(overrides)}
        new: dict[str, Any] = {"config_hash": config_hash(config), "steps": steps_of(config)}
        if snapshot is not None:
            facts["code"] = {**info["code"], "revision": snapshot.revision, "dirty": snapshot.dirty}
            new |= {"code": facts["code"], "workdir": snapshot.workdir, "import_roots": list(snapshot.roots)}
        script = render_script(config, job_paths([run_dir.path], {**info, **new}))
        _keep(run_dir.config_file, number)
        _keep(run_dir.script, number)
        if snapshot is not None:
            run_dir.code.rename(run_dir.code.with_name(f"code.{number:04d}"))
            fresh.rename(run_dir.code)
        rundir.write_text(run_dir.config_file, freeze(config))
        rundir.write_text(run_dir.script, script)
        run_dir.update_info(
            **new,
            overrides=[*info["overrides"], *overrides],
            changes=[*info.get("changes", ()), facts],
            packed=False,
        )
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    run_dir.event("changed", set=list(overrides), code=facts.get("code"))


def changed(config: Config, overrides: Sequence[str], cwd: Path) -> Config:
    """Return the config with these fields changed, validated.

    Raises:
        UsageError: an override cannot be read, or names what cannot be changed.
        ConfigError: an unknown field, or a value that cannot work.
    """
    from omegaconf.errors import OmegaConfBaseException

    values = to_values(config)
    for word in overrides:
        path, value, added = _parsed(word)
        inside: Any = values
        for number, part in enumerate(path):
            if not isinstance(inside, dict) or (part not in inside and not added):
                raise UsageError(
                    f"--set {word}: the config of this run has no {'.'.join(path[: number + 1])}",
                    hint=f"config.yaml has all fields; `--set +{word}` adds one to an open group (model, data, cluster.env)",
                )
            if number < len(path) - 1:
                inside = inside.setdefault(part, {})
        inside[path[-1]] = value
    try:
        found = to_config(values)
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"--set {' '.join(overrides)}: {str(error).strip().splitlines()[0]}", hint="config.yaml shows all fields"
        ) from None
    validate(found)
    return with_absolute_paths(found, cwd)


def _parsed(word: str) -> tuple[list[str], Any, bool]:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        (parsed,) = OverridesParser.create().parse_overrides([word])
    except HydraException:
        raise UsageError(f"--set {word}: cannot read it", hint="--set key=value, such as --set optim.lr=1e-4") from None
    field = parsed.key_or_group
    if field in FIXED or field.partition(".")[0] == "hydra":
        raise UsageError(f"--set {word}: {field} was decided when the run was submitted", hint="submit it anew")
    if "." not in field or parsed.is_delete() or parsed.is_sweep_override():
        raise UsageError(f"--set {word}: single fields can be set", hint="such as --set optim.lr=1e-4")
    return field.split("."), parsed.value(), parsed.is_add() or parsed.is_force_add()


def _snapshot(config: Config, info: Mapping[str, Any], target: Path) -> Snapshot:
    """Copy the code as it is now, from the folder where the run was submitted."""
    cwd = Path(info["submit_dir"])
    if info["workdir"].startswith("/"):
        raise UsageError(
            f"--code: this run has no snapshot, but runs in place, in {info['workdir']}",
            hint="it runs the code that is there; resume it without --code",
        )
    if not cwd.is_dir():
        raise ConfigError(f"--code: {cwd}, from where the run was submitted, is not there any more")
    source = find_source(config.job, cwd, interpreter_of(config.cluster))
    if source.root is None:
        raise ConfigError(f"--code: {cwd} is in no git work tree any more", hint="job.snapshot=cwd copies a folder")
    return take_snapshot(config.job, source, target)


def _keep(path: Path, number: int) -> None:
    """Keep a file under another name beside itself; a linked one loses nothing, since it is replaced and not written to."""
    if path.is_file():
        kept = path.with_name(f"{path.stem}.{number:04d}{path.suffix}")
        kept.unlink(missing_ok=True)
        shutil.copy2(path, kept)
