"""The folder of a sweep, with a run directory for each point: find it, create it, and add points to it.

    runs/<name>.sweep-<identity>/
      sweep.json       overrides, options, who and when
      points.jsonl     one line a point: number, what varies, identity, run id
      arrays/          which run is in which array job: see `jobs`
      code/            the snapshot that all points run from
      <run id>/        a run directory like any other

The identity is that of the points, so the same command means the same sweep, from whichever shell. The folder appears
complete or not at all, also if others create the same.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurmtrain.config.schema import Config
from slurmtrain.errors import ConfigError
from slurmtrain.launch.code_source import find_source
from slurmtrain.launch.named_paths import check_in_snapshot
from slurmtrain.launch.snapshot import take_snapshot
from slurmtrain.launch.submit import run_info
from slurmtrain.runs import create, lookup
from slurmtrain.runs.create import make_folder, new_run_id
from slurmtrain.runs.run_dir import RunDir, made_at
from slurmtrain.runs.sweep_dir import Point, Sweep
from slurmtrain.sweep.plan import SweepPlan, identity_of
from slurmtrain.system.files import file_mode, folder_mode, is_mine, write_json

if TYPE_CHECKING:
    from slurmtrain.config.compose import Composer

log = logging.getLogger(__name__)

MOST_FILES = 1000  # in the folders of the configs
# In sweep.json alone; the rest of it is in every run.json, too.
OF_THE_SWEEP = ("token", "parallelism", "pack", "after", "command", "made_at")


def find_same(sweep_plan: SweepPlan) -> Sweep | None:
    """Return the newest sweep with the same points, if there is one."""
    first = sweep_plan.first
    return _newest(first, lambda sweep: sweep.id == sweep_plan.id or sweep.id.startswith(f"{sweep_plan.id}."))


def find_by_command(first: Config, command: str | None) -> Sweep | None:
    """Return the newest sweep that was created by this command line."""
    return _newest(first, lambda sweep: command is not None and sweep.info().get("command") == command)


def _newest(first: Config, wanted: Callable[[Sweep], bool]) -> Sweep | None:
    named = Path(first.job.runs_dir).glob(f"{first.job.name}.sweep-*")
    mine = (Sweep(path) for path in named if is_mine(path) and lookup.is_sweep(path))
    return max(filter(wanted, mine), key=lambda sweep: float(sweep.info()["created"]), default=None)


def command_of(overrides: Sequence[str], composer: Composer, first: Config) -> str | None:
    """Return the identity of a command line with choices, by which its sweep is found without composing all points.

    It covers the words, the config files, and the first point, on which the environment and all else leaves its mark.

    Returns:
        None: there are so many config files that reading them takes longer.
    """
    files = [path for folder in composer.folders for path in itertools.islice(Path(folder).rglob("*.y*ml"), MOST_FILES)]
    if len(files) >= MOST_FILES:
        return None
    digest = hashlib.sha256(json.dumps([identity_of(first), composer.config_name, *overrides]).encode())
    for path in sorted(files):
        digest.update(os.fsencode(path) + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def create_sweep(
    sweep_plan: SweepPlan,
    varied: Callable[[int], dict[str, str]],
    overrides: Sequence[str],
    cwd: Path,
    *,
    parallelism: int | None = None,
    after: Sequence[RunDir] = (),
    again: bool = False,
    command: str | None = None,
) -> Sweep:
    """Create the sweep's folder, with a run directory for every point.

    If another shell creates the same first, return that one.

    Args:
        varied: returns what distinguishes point i.
        parallelism: number of points that may run at the same time.
        after: runs that have to finish first.
        again: create it beside one with the same points.
        command: what `find_by_command` finds it by.

    Raises:
        ConfigError: the folder cannot be made, or the snapshot is refused.
    """
    job = sweep_plan.first.job
    runs = Path(job.runs_dir)
    source = find_source(job, cwd, sweep_plan.first.cluster)
    name = sweep_plan.id
    try:
        make_folder(runs, create.PREPARING)
        temporary = Sweep(create.folder_of(runs, create.PREPARING) / f"{name}.{secrets.token_hex(6)}")
        temporary.path.mkdir(mode=folder_mode(temporary.path.parent))
    except OSError as error:
        raise ConfigError(
            f"cannot make a folder under {runs}: {error.strerror}",
            hint="set job.runs_dir to a folder that you can write to and that the compute nodes can see",
        ) from None
    try:
        record = take_snapshot(job, source, temporary.code)
        for warning in check_in_snapshot(sweep_plan.first, temporary.path / source.workdir, source, cwd):
            log.warning(warning)
        pack = sweep_plan.first.sweep.pack
        info = {**run_info(sweep_plan.first, overrides, record, source, cwd), "packed": pack > 1}
        stamp = new_run_id()
        run_ids = sweep_plan.run_ids(stamp)
        temporary.points_file.touch(mode=file_mode(temporary.path), exist_ok=False)
        with temporary.points_file.open("a") as file:
            for number, identity in enumerate(sweep_plan.identities):
                run_id = run_ids[identity]
                point = Point(number, varied(number), identity, sweep_plan.shapes[identity], run_id)
                file.write(json.dumps(asdict(point)) + "\n")
                if run_id == f"{stamp}-{number:04d}":  # the first of those with this config
                    _make_run(temporary.run_dir(run_id), runs / name / run_id, point, sweep_plan, info)
        temporary.arrays.mkdir(mode=folder_mode(temporary.path))
        facts = {
            "command": command,
            "parallelism": parallelism,
            "pack": pack,
            "after": [str(run_dir.path) for run_dir in after],
            "made_at": made_at(temporary.path, runs / name),
        }
        write_json(temporary.info_file, {**info, **facts, "token": secrets.token_hex(4)})
        return _publish(temporary, runs / name, again=again)
    finally:
        shutil.rmtree(temporary.path, ignore_errors=True)


def _publish(temporary: Sweep, path: Path, *, again: bool) -> Sweep:
    number = 1
    while True:
        target = path if number == 1 else path.with_name(f"{path.name}.{number}")
        try:
            temporary.path.rename(target)
            return Sweep(target)
        except OSError as error:
            if lookup.is_sweep(target):
                if not again and is_mine(target):  # another shell has made it meanwhile, with the same points
                    return Sweep(target)
            elif not target.exists() or os.access(target, os.R_OK | os.X_OK):
                raise ConfigError(f"cannot make {target}: {error.strerror}") from None
        number += 1  # beside that one, which may be somebody else's


def add_run(sweep: Sweep, point: Point, sweep_plan: SweepPlan) -> None:
    """Make the run directory of one more point; it appears complete."""
    temporary = RunDir(sweep.path / f".{point.run_id}-{os.getpid()}-{secrets.token_hex(3)}")
    info = sweep.info()
    try:
        of_all = {key: info[key] for key in info if key not in OF_THE_SWEEP}
        _make_run(temporary, sweep.run_dir(point.run_id).path, point, sweep_plan, of_all)
        temporary.path.rename(sweep.run_dir(point.run_id).path)
    finally:
        shutil.rmtree(temporary.path, ignore_errors=True)


def _make_run(run_dir: RunDir, path: Path, point: Point, sweep_plan: SweepPlan, info: dict[str, Any]) -> None:
    """Make the run directory of a point.

    Args:
        path: the path that it will be renamed to.
        info: the contents of run.json that are the same for all runs of the sweep.
    """
    run_dir.path.mkdir(mode=folder_mode(run_dir.path.parent))
    for folder in (run_dir.attempts, run_dir.checkpoints):
        folder.mkdir(mode=folder_mode(run_dir.path))
    if not info["workdir"].startswith("/"):
        run_dir.code.symlink_to(Path("..") / "code")
    run_dir.config_file.touch(mode=file_mode(run_dir.path))
    run_dir.config_file.write_text(sweep_plan.frozen[point.identity])
    varied = [f"{key}={value}" for key, value in point.varied.items()]
    its = {
        "varied": varied,
        "steps": sweep_plan.steps[point.identity],
        "made_at": made_at(run_dir.path, path),
    }
    write_json(run_dir.info_file, {"id": point.run_id, **info, **its}, durable=False)
