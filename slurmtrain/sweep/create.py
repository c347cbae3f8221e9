"""Create the folder of a sweep, and add to it: it appears complete or not at all, also if others create the same."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slurmtrain.errors import ConfigError
from slurmtrain.launch.arrays import Array
from slurmtrain.launch.import_paths import interpreter_of
from slurmtrain.launch.program_check import check_in_snapshot
from slurmtrain.launch.snapshot import find_source, take_snapshot
from slurmtrain.launch.submit import run_info
from slurmtrain.runs import lookup, staging_dir
from slurmtrain.runs.create import make_folder, new_run_id
from slurmtrain.runs.run_dir import PREPARING, RunDir
from slurmtrain.runs.sweep_dir import Point, Sweep, tasks_of
from slurmtrain.sweep.plan import SweepPlan
from slurmtrain.system.files import read_json, write_json
from slurmtrain.system.modes import file_mode, folder_mode
from slurmtrain.system.trust import is_mine

log = logging.getLogger(__name__)

OF_THE_SWEEP = ("token", "parallelism", "pack", "after")  # in sweep.json; the rest says the same of every run


def find_same(sweep_plan: SweepPlan) -> Sweep | None:
    """Return the newest sweep with the same points, if there is one."""
    runs = Path(sweep_plan.first.job.runs_dir)
    name = sweep_plan.id
    named = (runs / name, *runs.glob(f"{name}.[0-9]*"))
    found = [path for path in named if is_mine(path) and lookup.is_sweep(path)]  # those of other users do not count
    return Sweep(max(found, key=lambda path: int(path.name.removeprefix(name).lstrip(".") or 1))) if found else None


def create_sweep(
    sweep_plan: SweepPlan,
    varied: Callable[[int], dict[str, str]],
    overrides: Sequence[str],
    cwd: Path,
    *,
    max_array_size: int | None = None,
    parallelism: int | None = None,
    after: Sequence[RunDir] = (),
    again: bool = False,
) -> Sweep:
    """Create the sweep's folder, with a run directory for every point.

    If another shell creates the same first, return that one.

    Args:
        varied: returns what distinguishes point i.
        max_array_size: greatest number of tasks of an array.
        parallelism: number of points that may run at the same time.
        after: runs that have to finish first.
        again: create it beside one with the same points.

    Raises:
        ConfigError: the folder cannot be made, or the snapshot is refused.
    """
    job = sweep_plan.first.job
    runs = Path(job.runs_dir)
    source = find_source(job, cwd, interpreter_of(sweep_plan.first.cluster))
    name = sweep_plan.id
    try:
        make_folder(runs, PREPARING)
        staging_dir.remove_left_over(runs)
        temporary = Sweep(staging_dir.folder(runs, name))
        temporary.path.mkdir(mode=folder_mode(temporary.path.parent))
    except OSError as error:
        raise ConfigError(
            f"cannot make a folder under {runs}: {error.strerror}",
            hint="set job.runs_dir to a folder that you can write to and that the compute nodes can see",
        ) from None
    try:
        snapshot = take_snapshot(job, source, temporary.code)
        # For a search only the first is known here.
        programs = sweep_plan.programs.values() or [sweep_plan.first]
        missed = [check_in_snapshot(each, temporary.path / snapshot.workdir, source, cwd) for each in programs]
        for warning in dict.fromkeys(sentence for sentences in missed for sentence in sentences):
            log.warning(warning)
        pack = sweep_plan.first.sweep.pack
        info = {**run_info(sweep_plan.first, overrides, snapshot, source, cwd), "packed": pack > 1}
        stamp = new_run_id()
        run_ids = sweep_plan.run_ids(stamp)
        temporary.points_file.touch(mode=file_mode(temporary.path), exist_ok=False)
        with temporary.points_file.open("a") as file:
            for number, identity in enumerate(sweep_plan.identities):
                run_id = run_ids[identity]
                point = Point(number, varied(number), identity, sweep_plan.shapes[identity], run_id)
                file.write(json.dumps(asdict(point)) + "\n")
                if run_id == f"{stamp}-{number:04d}":  # the first of those with this config
                    _make_run(temporary.run_dir(run_id), point, sweep_plan, info)
        ids = list(run_ids.values())
        temporary.arrays.mkdir(mode=folder_mode(temporary.path))
        for number, array in enumerate(sweep_plan.arrays(max_array_size, parallelism)):
            _make_array(temporary, number, [ids[member] for member in array.members], array)
        facts = {"parallelism": parallelism, "pack": pack, "after": [str(run_dir.path) for run_dir in after]}
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
        _make_run(temporary, point, sweep_plan, {key: info[key] for key in info if key not in OF_THE_SWEEP})
        temporary.path.rename(sweep.run_dir(point.run_id).path)
    finally:
        shutil.rmtree(temporary.path, ignore_errors=True)


def _make_run(run_dir: RunDir, point: Point, sweep_plan: SweepPlan, info: dict[str, Any]) -> None:
    """Make the run directory of a point.

    Args:
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
    its = {"varied": varied, "steps": sweep_plan.steps[point.identity]}
    write_json(run_dir.info_file, {"id": point.run_id, **info, **its}, durable=False)


def append_arrays(
    sweep: Sweep, first: int, run_ids: Sequence[str], arrays: Sequence[Array], part_of: int | None = None
) -> bool:
    """Add further arrays of these runs; return False if another process has added arrays from number `first` on.

    Args:
        part_of: the array that these runs have been in.
    """
    temporary = Sweep(sweep.path / f".more-{os.getpid()}-{secrets.token_hex(3)}")
    try:
        for number, array in enumerate(arrays, first):
            after = first + array.after if array.after is not None else None
            members = [run_ids[member] for member in array.members]
            _make_array(temporary, number, members, dataclasses.replace(array, after=after), part_of)
        for number in temporary.array_numbers():
            temporary.array(number).rename(sweep.array(number))
        return True
    except OSError:
        if not sweep.array(first).exists():
            raise
        return False
    finally:
        shutil.rmtree(temporary.path, ignore_errors=True)


def _make_array(sweep: Sweep, number: int, run_ids: Sequence[str], array: Array, part_of: int | None = None) -> None:
    path = sweep.array(number)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=folder_mode(path.parent))
    plan = {"members": list(run_ids), "parallelism": array.parallelism, "after": array.after, "part_of": part_of}
    write_json(path / "plan.json", plan, durable=False)


def halve_array(sweep: Sweep, number: int) -> bool:
    """Make two arrays of one that is not submitted; return False for one that has a single task.

    Called within its claim.

    A process that is cut short in between leaves the second half in the plan, as "rest"; `finish_halving` goes on from
    there.
    """
    path = sweep.array(number) / "plan.json"
    plan = read_json(path) or {}
    members, limit = plan["members"], plan["parallelism"]
    tasks = tasks_of(len(members), sweep.pack)
    if tasks < 2:
        return False
    middle = (tasks + 1) // 2 * sweep.pack
    shares = (None, None) if limit is None else ((limit + 1) // 2, limit // 2)
    halves = {
        "members": members[:middle],
        "rest": members[middle:],
        "parallelism": shares[0],
        "rest_parallelism": shares[1],
    }
    write_json(path, {**plan, **halves})
    finish_halving(sweep, number)
    return True


def finish_halving(sweep: Sweep, number: int) -> None:
    """Make an array of the second half of one that was halved, if that has not been done. Called within its claim."""
    path = sweep.array(number) / "plan.json"
    plan = read_json(path) or {}
    rest, share = plan.pop("rest", None), plan.pop("rest_parallelism", None)
    if rest is None:
        return
    numbers = sweep.array_numbers()
    while not any(sweep.part_of(each) == number and sweep.members(each) == rest for each in numbers):
        first = len(numbers)
        # An array without a share of the limit comes after the first half. `after` counts from the first that is added.
        after = number if share == 0 else plan["after"]
        array = Array(tuple(range(len(rest))), share or plan["parallelism"], None if after is None else after - first)
        append_arrays(sweep, first, rest, [array], part_of=number)
        numbers = sweep.array_numbers()
    write_json(path, plan)
