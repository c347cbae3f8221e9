"""A sweep on disk: which point is which run, which run is in which array, and who submits it.

    runs/<name>.sweep-<identity>/
      sweep.json       overrides, options, who and when
      points.jsonl     one line a point: number, what varies, identity, run id
      arrays/0000/     plan.json: its runs; claim-0001.json: who submits it; job.sbatch; job.json: SLURM's answer
      code/            the snapshot that all points run from
      <run id>/        a run directory like any other

The identity is that of the points, so the same command means the same sweep, from whichever shell: what is missing is
submitted, and nothing twice. Every step can be cut short at any moment and is taken up by the next command: the folder
appears complete or not at all, an array has one claimant, and what a dead claimant has submitted is found by its token.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slurmtrain import rundir
from slurmtrain.config.compose import freeze, load_frozen, to_values
from slurmtrain.config.schema import Config
from slurmtrain.errors import ClusterError, ConfigError, UsageError
from slurmtrain.launch import making
from slurmtrain.launch.after import waiting_for_runs, with_dependency
from slurmtrain.launch.arrays import Array, plan_arrays, tasks_of
from slurmtrain.launch.claims import Owner, claimed, claims
from slurmtrain.launch.handover import TOKEN_PREFIX, Patience, Refused, SubmitLimit, check, export_option, hand_over
from slurmtrain.launch.sbatch import JobPaths, render_script
from slurmtrain.launch.snapshot import find_source, take_snapshot
from slurmtrain.launch.state import RunState, is_over, states
from slurmtrain.launch.submit import PLACEHOLDER_ID, no_chain, run_info, slurm_conf_of, steps_of, with_absolute_paths
from slurmtrain.rundir import RunDir, read_json, write_json
from slurmtrain.runtime import attempts
from slurmtrain.runtime.slurm import SlurmClient

REMOVED = RunState("removed", "its run directory is gone", False, [], None)
RETRIED = ("failed", "lost", "stopped")
OF_THE_SWEEP = ("token", "parallelism", "pack", "after")  # in sweep.json; the rest says the same of every run


@dataclass(frozen=True)
class Point:
    """One line of points.jsonl.

    Attributes:
        varied: what distinguishes it, by key, as text.
        identity: of its config.
        shape: of what it asks of the cluster; points that differ in it need different arrays.
        run_id: of the run that computes it; points with the same config share one.
    """

    number: int
    varied: dict[str, str]
    identity: str
    shape: str
    run_id: str


@dataclass(frozen=True)
class Sweep:
    """Paths and small files of one sweep. Holds no state of its own."""

    path: Path

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def info_file(self) -> Path:
        return self.path / "sweep.json"

    @property
    def points_file(self) -> Path:
        return self.path / "points.jsonl"

    @property
    def code(self) -> Path:
        return self.path / "code"

    @property
    def arrays(self) -> Path:
        return self.path / "arrays"

    @property
    def cancelled_file(self) -> Path:
        """There from `sweep cancel` to `sweep retry`: what has not been submitted is not."""
        return self.path / "cancelled"

    def array(self, number: int) -> Path:
        return self.arrays / f"{number:04d}"

    def info(self) -> dict[str, Any]:
        """sweep.json.

        Raises:
            UsageError: this is not a sweep.
        """
        info = read_json(self.info_file)
        if info is None:
            raise UsageError(f"{self.path} is not a sweep: it has no readable sweep.json")
        return info

    def points(self) -> list[Point]:
        """All whose line is whole: a search adds to them, and may be cut short."""
        whole, _, _ = self.points_file.read_text().rpartition("\n")
        return [Point(**json.loads(line)) for line in whole.splitlines()]

    def point_count(self) -> int:
        return self.points_file.read_bytes().count(b"\n")

    def run_dir(self, run_id: str) -> RunDir:
        return RunDir(self.path / run_id)

    def run_dirs(self) -> dict[str, RunDir]:
        """The runs of all points, by id; each once."""
        return {point.run_id: self.run_dir(point.run_id) for point in self.points()}

    def array_numbers(self) -> list[int]:
        """From 0 on, without a gap."""
        return sorted(int(path.name) for path in self.arrays.iterdir() if path.name.isdigit())

    @property
    def pack(self) -> int:
        """How many runs share a task of an array."""
        return int(self.info()["pack"])

    def members(self, number: int) -> list[str]:
        """Run ids of an array, in the order of its tasks."""
        return list((read_json(self.array(number) / "plan.json") or {})["members"])

    def elements(self, number: int, job_id: str) -> dict[str, str]:
        """The task of every run of an array, as SLURM names it, when the array is this job."""
        members, pack = self.members(number), self.pack
        if tasks_of(len(members), pack) == 1:
            return dict.fromkeys(members, job_id)
        return {run_id: f"{job_id}_{index // pack}" for index, run_id in enumerate(members)}

    def job_id(self, number: int) -> str | None:
        job = read_json(self.array(number) / "job.json")
        return str(job["job_id"]) if job is not None else None

    def token(self, number: int) -> str:
        """By which the job of an array is found."""
        return f"sweep-{self.info()['token']}:{number:04d}"


def identity_of(config: Config) -> str:
    """16 hex digits over the whole config, whatever the order of keys; where runs and code lie does not count."""
    values = to_values(config)
    for key in ("runs_dir", "snapshot", "snapshot_max_mb"):
        del values["job"][key]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


@dataclass
class Draft:
    """All points of a sweep that is to be made, composed and validated. Keeps text, not configs: there may be thousands.

    Attributes:
        first: the first point's config; name and folder of the runs are the same for all.
        frozen: configs by identity.
        shapes: what they ask of the cluster, by identity.
        steps: that they are to do, by identity.
        identities: of every point, in order.
        asking: a config of every shape.
        search: of a sweep whose points are chosen on the way: what they are chosen by, as text.
    """

    first: Config
    frozen: dict[str, str] = dataclasses.field(default_factory=dict)
    shapes: dict[str, str] = dataclasses.field(default_factory=dict)
    steps: dict[str, int | None] = dataclasses.field(default_factory=dict)
    identities: list[str] = dataclasses.field(default_factory=list)
    asking: dict[str, Config] = dataclasses.field(default_factory=dict)
    search: str | None = None

    @property
    def identity(self) -> str:
        """8 hex digits, the same for the same points in any order, or for the same search."""
        text = "\n".join(sorted(self.identities)) if self.search is None else self.search
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def add(self, config: Config) -> str:
        """Take in one more point. Returns the identity of its config.

        Raises:
            ConfigError: it does not fit to the others.
        """
        first = self.first.job
        if (config.job.name, config.job.runs_dir) != (first.name, first.runs_dir):
            raise ConfigError(
                f"the points of a sweep share job.name and job.runs_dir, and these differ: {first.name!r}, {config.job.name!r}",
                hint="what varies is a column of `sweep collect`; it need not be in the name",
            )
        identity = identity_of(config)
        self.identities.append(identity)
        if identity not in self.frozen:
            check_fits(config, self.first)
            self.frozen[identity] = freeze(config)
            self.shapes[identity] = _shape(config)
            self.asking.setdefault(self.shapes[identity], config)
            self.steps[identity] = steps_of(config)
        return identity

    @property
    def id(self) -> str:
        return f"{self.first.job.name}.sweep-{self.identity}"

    def run_ids(self, stamp: str) -> dict[str, str]:
        """The run of every config, by identity: it has the number of the first point with that config."""
        found: dict[str, str] = {}
        for number, identity in enumerate(self.identities):
            found.setdefault(identity, f"{stamp}-{number:04d}")
        return found

    def arrays(self, max_array_size: int | None, parallelism: int | None) -> list[Array]:
        """Which of the configs, in the order of `run_ids`, are in which array; with cluster=local there are none."""
        if self.first.cluster.backend == "local":
            return []
        shapes = [self.shapes[identity] for identity in self.run_ids("")]
        return plan_arrays(shapes, max_size=max_array_size, parallelism=parallelism, pack=self.first.sweep.pack)


def draft(configs: Iterable[Config], cwd: Path) -> Draft:
    """Take in every point's config; whatever is wrong with one ends it before anything is made.

    Raises:
        ConfigError: a point is wrong, or they do not belong together.
    """
    found: Draft | None = None
    for config in configs:
        config = with_absolute_paths(config, cwd)
        if found is None:
            found = Draft(config)
        found.add(config)
    assert found is not None
    return found


def check_fits(config: Config, first: Config) -> None:
    """
    Raises:
        ConfigError: it cannot be a point of any sweep, or not of one with this first point.
    """
    if _cluster_of(config) != _cluster_of(first):
        raise ConfigError("the points of a sweep are on different clusters", hint="submit a sweep for each")
    if config.sweep.pack != first.sweep.pack:
        raise ConfigError(
            f"the points of a sweep share sweep.pack, and these differ: {first.sweep.pack}, {config.sweep.pack}",
            hint="submit a sweep for each",
        )
    if config.cluster.backend == "local":
        return
    if config.requeue.mode == "chain":
        raise no_chain("in a sweep")
    if config.sweep.pack > 1 and config.requeue.mode == "resubmit":
        raise ConfigError(
            f"sweep.pack={config.sweep.pack} with requeue.mode=resubmit: runs of one job cannot each go on in one of their own",
            hint="requeue=requeue, where the cluster allows it, or requeue=off and `sweep retry`",
        )


def _cluster_of(config: Config) -> tuple[str | None, ...]:
    return (config.cluster.backend, config.cluster.slurm_conf, config.cluster.sandbox)


def _shape(config: Config) -> str:
    """Whatever the script shows of a config."""
    values = to_values(config)
    parts = [values[key] for key in ("cluster", "requeue", "hooks", "secrets", "job")]
    text = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def find_same(draft: Draft) -> Sweep | None:
    """The newest sweep with the same points, if there is one."""
    runs = Path(draft.first.job.runs_dir)
    name = draft.id
    found = [path for path in (runs / name, *runs.glob(f"{name}.[0-9]*")) if rundir.is_sweep(path)]
    return Sweep(max(found, key=lambda path: int(path.name.removeprefix(name).lstrip(".") or 1))) if found else None


def make(
    draft: Draft,
    varied: Callable[[int], dict[str, str]],
    overrides: Sequence[str],
    cwd: Path,
    *,
    max_array_size: int | None = None,
    parallelism: int | None = None,
    after: Sequence[RunDir] = (),
    again: bool = False,
) -> Sweep:
    """Make the sweep's folder, with a run directory for every point. Another shell may make the same: then it is its.

    Args:
        varied: what distinguishes point i.
        max_array_size: most tasks of an array.
        parallelism: how many points may run at the same time.
        after: runs that have to finish first.
        again: beside one with the same points.

    Raises:
        ConfigError: the folder cannot be made, or the snapshot is refused.
    """
    job = draft.first.job
    runs = Path(job.runs_dir)
    source = find_source(job, cwd)
    name = draft.id
    try:
        (runs / rundir.PREPARING).mkdir(parents=True, exist_ok=True)
        making.remove_left_over(runs)
        temporary = Sweep(making.folder(runs, name))
        temporary.path.mkdir(mode=0o700)
    except OSError as error:
        raise ConfigError(
            f"cannot make a folder under {runs}: {error.strerror}",
            hint="set job.runs_dir to a folder that you may write and that the compute nodes see",
        ) from None
    try:
        snapshot = take_snapshot(job, source, temporary.code)
        pack = draft.first.sweep.pack
        info = {**run_info(draft.first, overrides, snapshot, source, cwd), "packed": pack > 1}
        stamp = rundir.new_run_id()
        run_ids = draft.run_ids(stamp)
        with temporary.points_file.open("x") as file:
            for number, identity in enumerate(draft.identities):
                run_id = run_ids[identity]
                point = Point(number, varied(number), identity, draft.shapes[identity], run_id)
                file.write(json.dumps(asdict(point)) + "\n")
                if run_id == f"{stamp}-{number:04d}":  # the first of those with this config
                    _make_run(temporary.run_dir(run_id), point, draft, info)
        ids = list(run_ids.values())
        temporary.arrays.mkdir(mode=0o700)
        for number, array in enumerate(draft.arrays(max_array_size, parallelism)):
            _make_array(temporary, number, [ids[member] for member in array.members], array)
        facts = {"parallelism": parallelism, "pack": pack, "after": [str(run_dir.path) for run_dir in after]}
        write_json(temporary.info_file, {**info, **facts, "token": secrets.token_hex(4)})
        return _publish(temporary, runs / name, again=again)
    finally:
        shutil.rmtree(temporary.path, ignore_errors=True)


def preview(draft: Draft, cwd: Path, parallelism: int | None = None, after: Sequence[RunDir] = ()) -> list[str]:
    """The scripts that would be handed to sbatch, one an array. Nothing is made."""
    job = draft.first.job
    runs = [Path(job.runs_dir) / draft.id / run_id for run_id in draft.run_ids(PLACEHOLDER_ID).values()]
    workdir = find_source(job, cwd).workdir
    shapes = [draft.shapes[identity] for identity in draft.run_ids("")]
    scripts = []
    for array in draft.arrays(None, parallelism):
        config = draft.asking[shapes[array.members[0]]]
        if after:
            config = waiting_for_runs(config, after, slurm_conf_of(config))
        members = [runs[member] for member in array.members]
        paths = JobPaths(members, workdir, sys.executable, parallelism=array.parallelism, pack=draft.first.sweep.pack)
        scripts.append(render_script(config, paths))
    return scripts


def _publish(temporary: Sweep, path: Path, *, again: bool) -> Sweep:
    number = 1
    while True:
        target = path if number == 1 else path.with_name(f"{path.name}.{number}")
        try:
            temporary.path.rename(target)
            return Sweep(target)
        except OSError as error:
            if rundir.is_sweep(target):
                if not again:  # another shell has made it meanwhile, with the same points
                    return Sweep(target)
            elif not target.exists() or os.access(target, os.R_OK | os.X_OK):
                raise ConfigError(f"cannot make {target}: {error.strerror}") from None
        number += 1  # beside that one, which may be somebody else's


def add_run(sweep: Sweep, point: Point, draft: Draft) -> None:
    """Make the run directory of one more point; it appears complete."""
    temporary = RunDir(sweep.path / f".{point.run_id}-{os.getpid()}-{secrets.token_hex(3)}")
    info = sweep.info()
    try:
        _make_run(temporary, point, draft, {key: info[key] for key in info if key not in OF_THE_SWEEP})
        temporary.path.rename(sweep.run_dir(point.run_id).path)
    finally:
        shutil.rmtree(temporary.path, ignore_errors=True)


def _make_run(run_dir: RunDir, point: Point, draft: Draft, info: dict[str, Any]) -> None:
    """Args:
    info: what run.json says of all runs of the sweep.
    """
    run_dir.path.mkdir(mode=0o700)
    for folder in (run_dir.attempts, run_dir.checkpoints):
        folder.mkdir(mode=0o700)
    if not info["workdir"].startswith("/"):
        run_dir.code.symlink_to(Path("..") / "code")
    run_dir.config_file.write_text(draft.frozen[point.identity])
    run_dir.config_file.chmod(0o600)
    varied = [f"{key}={value}" for key, value in point.varied.items()]
    its = {"varied": varied, "steps": draft.steps[point.identity]}
    write_json(run_dir.info_file, {"id": point.run_id, **info, **its}, durable=False)


def _make_array(sweep: Sweep, number: int, run_ids: Sequence[str], array: Array) -> None:
    path = sweep.array(number)
    path.mkdir(parents=True, mode=0o700)
    plan = {"members": list(run_ids), "parallelism": array.parallelism, "after": array.after}
    write_json(path / "plan.json", plan, durable=False)


@dataclass(frozen=True)
class Submission:
    """Attributes:
    submitted: job ids of arrays that were submitted now.
    found: job ids of those that were there.
    waiting: runs that could not be submitted, because of `limit`.
    """

    submitted: list[str]
    found: list[str]
    waiting: int = 0
    limit: SubmitLimit | None = None


def check_arrays(sweep: Sweep, client: SlurmClient) -> None:
    """Ask SLURM whether it would take every array that has not been submitted.

    Raises:
        Refused: it would not. A sweep that nobody has begun to submit is gone again.
    """
    numbers = sweep.array_numbers()
    for number in [each for each in numbers if sweep.job_id(each) is None]:
        path = sweep.array(number) / f".test-{os.getpid()}.sbatch"
        try:
            path.write_text(_script(sweep, number))
            check(path, client)
        except Refused:
            if not any(claims(sweep.array(each)) or sweep.job_id(each) for each in numbers):
                remove(sweep)
            raise
        finally:
            path.unlink(missing_ok=True)


def remove(sweep: Sweep) -> None:
    """Out of sight first, so that nobody finds half of it."""
    gone = making.folder(sweep.path.parent, sweep.id)
    sweep.path.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def submit_arrays(
    sweep: Sweep,
    client: SlurmClient,
    *,
    patience: Patience = Patience(),  # noqa: B008 (it is frozen)
    say: Callable[[str], None] = lambda text: None,
) -> Submission:
    """Submit every array that has not been. Several shells may do it at the same time.

    SLURM is asked first whether it would take all of them, so that no half of a sweep waits for a cure of the other.

    Raises:
        ClusterError: the sweep was cancelled; or sbatch refused, or it is not known whether a job is there, and what was
            submitted stays.
    """
    check_not_cancelled(sweep)
    check_arrays(sweep, client)
    submitted: list[str] = []
    found: list[str] = []
    numbers = sweep.array_numbers()
    for position, number in enumerate(numbers):
        try:
            job_id, new = _submit_array(sweep, number, client, patience, say)
        except SubmitLimit as limit:
            waiting = sum(len(sweep.members(each)) for each in numbers[position:])
            return Submission(submitted, found, waiting, limit)
        (submitted if new else found).append(job_id)
    return Submission(submitted, found)


def _submit_array(
    sweep: Sweep, number: int, client: SlurmClient, patience: Patience, say: Callable[[str], None]
) -> tuple[str, bool]:
    """Its job id, and whether it was submitted here and now."""
    job_id = sweep.job_id(number)
    if job_id is None:

        def busy(owner: Owner) -> None:
            say(f"process {owner['pid']} on {owner['host']} is submitting this array; waiting for it")

        with claimed(sweep.array(number), busy) as somebody_before:
            job_id = sweep.job_id(number)  # the one who had the claim may have finished
            if job_id is None and somebody_before:
                job_id = _job_of_attempts(sweep, number)
                if job_id is not None:
                    _write_job(sweep, number, job_id)
            if job_id is None:
                check_not_cancelled(sweep)
                job_id = _hand_over(sweep, number, client, somebody_before, patience, say)
                note_jobs(sweep, number)
                if sweep.cancelled_file.exists():  # while sbatch was at work: whoever cancelled did not find it
                    cancel(sweep, client)
                    check_not_cancelled(sweep)
                return job_id, True
    note_jobs(sweep, number)
    return job_id, False


def _hand_over(
    sweep: Sweep,
    number: int,
    client: SlurmClient,
    somebody_before: bool,
    patience: Patience,
    say: Callable[[str], None],
) -> str:
    path = sweep.array(number)
    script = _script(sweep, number)
    rundir.write_text(path / "job.sbatch", script)
    for run_id in sweep.members(number):
        _link_script(path / "job.sbatch", sweep.run_dir(run_id))
    job_id = hand_over(
        script,
        path / "submitit",
        sweep.token(number),
        client,
        options=export_option(load_frozen(sweep.run_dir(sweep.members(number)[0]).config_file, with_secrets=False)),
        looked_for_before=somebody_before,
        patience=patience,
        say=say,
    )
    _write_job(sweep, number, job_id)
    return job_id


def _write_job(sweep: Sweep, number: int, job_id: str) -> None:
    write_json(sweep.array(number) / "job.json", {"job_id": job_id, "time": time.time()})


def _link_script(script: Path, run_dir: RunDir) -> None:
    """The run's script is that of its array; a link, since thousands may share a long one."""
    if not run_dir.path.exists():  # removed by `runs prune`
        return
    link = run_dir.path / f".{run_dir.script.name}.{os.getpid()}.{secrets.token_hex(3)}"
    try:
        os.link(script, link)
    except OSError:  # not every file system can
        link.write_text(script.read_text())
    link.replace(run_dir.script)
    link.unlink(missing_ok=True)  # a rename to another link of the same file does nothing (rename(2))


def _job_of_attempts(sweep: Sweep, number: int) -> str | None:
    """The job of an array whose submitter was killed, by what its tasks have left: SLURM soon forgets what has ended."""
    known = {sweep.job_id(each) for each in sweep.array_numbers()}
    elements = sweep.elements(number, "")
    for run_id, suffix in elements.items():
        run_dir = sweep.run_dir(run_id)
        if not suffix:  # one task is no array
            folder = run_dir.path if len(elements) == 1 else sweep.path
            logs = [path.stem.removeprefix("slurm-") for path in folder.glob("slurm-*.log")] if run_dir.exists() else []
            jobs = [job_id for job_id in logs if job_id.isdigit() and job_id not in run_dir.info()["job_ids"]]
        else:
            ran = (attempt.job_id or "" for attempt in attempts.all_attempts(run_dir))
            jobs = [job_id.removesuffix(suffix) for job_id in ran if job_id.endswith(suffix)]
        for job_id in jobs:
            if job_id not in known:
                return job_id
    return None


def _script(sweep: Sweep, number: int) -> str:
    """What is handed to sbatch for an array; it waits for what has been submitted and not finished by now."""
    plan = read_json(sweep.array(number) / "plan.json") or {}
    run_dirs = [sweep.run_dir(run_id) for run_id in plan["members"]]
    config = load_frozen(run_dirs[0].config_file, with_secrets=False)
    before = sweep.job_id(plan["after"]) if plan["after"] is not None else None
    info = sweep.info()
    runs = [RunDir(Path(path)) for path in info["after"]]
    config = waiting_for_runs(config, [run for run in runs if run.info_file.exists()], info["slurm_conf"])
    if before is not None and not _is_over(sweep, plan["after"]):
        config = with_dependency(config, [f"afterany:{before}"])
    paths = JobPaths(
        [run_dir.path for run_dir in run_dirs],
        info["workdir"],
        sys.executable,
        parallelism=plan["parallelism"],
        pack=info["pack"],
    )
    return render_script(config, paths)


def _is_over(sweep: Sweep, number: int) -> bool:
    """All runs of an array have ended. SLURM may have forgotten it, and then refuse to wait for it."""
    run_dirs = [sweep.run_dir(run_id) for run_id in sweep.members(number)]
    return all(is_over(run_dir) for run_dir in run_dirs if run_dir.info_file.exists())


def note_jobs(sweep: Sweep, number: int) -> None:
    """Tell every run of an array its job, if that has not been done to the end."""
    path = sweep.array(number) / "job.json"
    job = read_json(path)
    if job is None or job.get("noted"):
        return
    conf = sweep.info()["slurm_conf"]
    for run_id, element in sweep.elements(number, str(job["job_id"])).items():
        run_dir = sweep.run_dir(run_id)
        info = read_json(run_dir.info_file)
        if info is None or element in info["job_ids"]:  # None: removed by `runs prune`
            continue
        # When this is made up for long afterwards, the run may have had other jobs since; SLURM counts them up.
        job_ids = sorted([*info["job_ids"], element], key=lambda each: int(each.partition("_")[0]))
        run_dir.event("submitted", job_id=element)
        write_json(run_dir.info_file, {**info, "job_ids": job_ids, "slurm_conf": conf}, durable=False)
    write_json(path, {**job, "noted": True})


# Looking at sweeps.


def all_sweeps(runs: Path) -> list[Sweep]:
    """Every sweep under `runs`, oldest first."""
    found = [Sweep(file.parent.resolve()) for file in runs.glob("*/sweep.json") if os.access(file, os.R_OK)]
    return sorted(found, key=lambda sweep: float(sweep.info()["created"]))


def find(reference: str, runs: Path) -> Sweep:
    """The sweep that a person means: its name, a part of it that no other has, a path, or "last".

    Raises:
        UsageError: none or several match.
    """
    path = Path(reference)
    if rundir.is_sweep(path):
        return Sweep(path.resolve())
    sweeps = all_sweeps(runs)
    if not sweeps:
        rundir.refuse_unreadable(reference, runs)
        raise rundir.nothing_under(runs, "sweeps")
    if reference == "last":
        return sweeps[-1]
    matching = [sweep for sweep in sweeps if sweep.id == reference] or [
        sweep for sweep in sweeps if reference in sweep.id
    ]
    if len(matching) == 1:
        return matching[0]
    names = ", ".join(sweep.id for sweep in (matching or sweeps)[-5:])
    if not matching:
        rundir.refuse_unreadable(reference, runs)
        raise UsageError(f"no sweep is called {reference!r}", hint=f"the latest are: {names}")
    raise UsageError(
        f"{len(matching)} sweeps are called something like {reference!r}", hint=f"write more of it: {names}"
    )


def states_of(sweep: Sweep) -> dict[str, RunState]:
    """State of every run of the sweep, by run id; one squeue call."""
    ((_, now),) = states_of_all([sweep])
    return now


def states_of_all(found: Sequence[Sweep]) -> list[tuple[Sweep, dict[str, RunState]]]:
    """State of every run of each sweep; one squeue call for all."""
    for sweep in found:
        with contextlib.suppress(PermissionError):  # somebody else's
            for number in sweep.array_numbers():
                note_jobs(sweep, number)
    runs = [(sweep, sweep.run_dirs()) for sweep in found]
    there = [run_dir for _, members in runs for run_dir in members.values() if run_dir.info_file.exists()]
    now = states(there)
    return [(sweep, {run_id: now.get(run_id, REMOVED) for run_id in members}) for sweep, members in runs]


def add_retry(sweep: Sweep) -> list[str]:
    """Plan an array of the runs that have ended without a result. Returns their ids; it is submitted by `submit_arrays`.

    A sweep that was cancelled goes on. Two who retry at the same moment get different runs: the second finds them planned.
    """
    shapes = {point.run_id: point.shape for point in sweep.points()}
    sweep.cancelled_file.unlink(missing_ok=True)
    while True:
        numbers = sweep.array_numbers()
        planned = {run_id for number in numbers if sweep.job_id(number) is None for run_id in sweep.members(number)}
        now = states_of(sweep)
        chosen = [run_id for run_id, state in now.items() if state.word in RETRIED and run_id not in planned]
        if not chosen:
            return []
        for run_id in chosen:
            sweep.run_dir(run_id).request_file.unlink(missing_ok=True)
        arrays = plan_arrays(
            [shapes[run_id] for run_id in chosen], parallelism=sweep.info()["parallelism"], pack=sweep.pack
        )
        if sweep.pack > 1:  # again, where they have had a job of their own since
            for run_id in chosen:
                sweep.run_dir(run_id).update_info(packed=True)
        if append_arrays(sweep, len(numbers), chosen, arrays):
            return chosen


def append_arrays(sweep: Sweep, first: int, run_ids: Sequence[str], arrays: Sequence[Array]) -> bool:
    """Plan further arrays of these runs. False: somebody else has made arrays from number `first` on, these are not there."""
    temporary = Sweep(sweep.path / f".more-{os.getpid()}-{secrets.token_hex(3)}")
    try:
        for number, array in enumerate(arrays, first):
            after = first + array.after if array.after is not None else None
            members = [run_ids[member] for member in array.members]
            _make_array(temporary, number, members, dataclasses.replace(array, after=after))
        for number in temporary.array_numbers():
            temporary.array(number).rename(sweep.array(number))
        return True
    except OSError:
        if not sweep.array(first).exists():
            raise
        return False
    finally:
        shutil.rmtree(temporary.path, ignore_errors=True)


def cancel(sweep: Sweep, client: SlurmClient) -> int:
    """End all runs of the sweep that have not ended, with one scancel. Returns how many there were.

    What has not been submitted will not be, neither by a shell that is at it nor by the same command, until `retry`.
    """
    sweep.cancelled_file.touch()
    for number in sweep.array_numbers():
        if sweep.job_id(number) is None and claims(sweep.array(number)):  # its submitter may have been killed
            found = client.find_by_comment(TOKEN_PREFIX + sweep.token(number))
            if found:
                _write_job(sweep, number, found[0])
    now = states_of(sweep)
    # What somebody runs by hand in an allocation of his is not ours to cancel.
    alive = {run_id: state.job_id for run_id, state in now.items() if state.alive and state.own_job and state.job_id}
    for run_id in alive:
        attempts.write_request(sweep.run_dir(run_id), "cancel")
        sweep.run_dir(run_id).event("cancel asked")
    if alive:  # whole arrays: thousands of ids make a line too long
        client.cancel(*sorted({job_id.partition("_")[0] for job_id in alive.values()}))
    return len(alive)


def check_not_cancelled(sweep: Sweep) -> None:
    """Raises: ClusterError: the sweep was cancelled, and nobody has asked for it to go on."""
    if sweep.cancelled_file.exists():
        raise ClusterError(
            f"sweep {sweep.id} was cancelled, so nothing of it is submitted",
            hint=f"sweep retry {sweep.id} goes on with all that has not finished; --again makes another of the same points",
        )


def check_not_planned(run_dir: RunDir) -> None:
    """Raises: ClusterError: this run is in an array that is still to be submitted; alone it would be there twice."""
    sweep = Sweep(run_dir.path.parent)
    for number in sweep.array_numbers():
        if sweep.job_id(number) is None and run_dir.id in sweep.members(number):
            raise ClusterError(
                f"run {run_dir.id} is to be submitted with others of its sweep", hint=f"sweep retry {sweep.id} does it"
            )


def client_of(sweep: Sweep) -> SlurmClient:
    return SlurmClient(sweep.info()["slurm_conf"])


def check_submitted(submission: Submission) -> None:
    """Raises: ClusterError: a limit kept runs out of the queue."""
    if submission.limit is not None:
        raise ClusterError(
            f"{submission.waiting} runs could not be submitted: {submission.limit.message}", hint=submission.limit.hint
        )
