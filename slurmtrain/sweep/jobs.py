"""From the runs of a sweep to array jobs, each submitted once, despite kills, refusals and late answers; retry and cancel.

With cluster=local, they are processes of this machine, several at a time, in the foreground (`LocalRuns`).

    arrays/0000/     plan.json: its runs; job.sbatch; job.json: SLURM's answer

One process at a time submits: it holds the claim of `arrays/`. A run that is in no array is still to be submitted. An array
gets its folder just before sbatch is called, and loses it again if the job is certainly not in the queue. So only the last
array can be without an answer: its submitter was cut short, and its job is looked for by its token.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from slurmtrain.choices import Backend
from slurmtrain.config.frozen import load_frozen
from slurmtrain.errors import ClusterError, UnreadableRecordError, UsageError
from slurmtrain.launch import evaluations, node_exclusion
from slurmtrain.launch.changes import finish_change
from slurmtrain.launch.claims import claimed
from slurmtrain.launch.dependencies import waiting_for_runs, with_dependency
from slurmtrain.launch.job import in_queue
from slurmtrain.launch.script import render_script
from slurmtrain.launch.submit import job_paths
from slurmtrain.launch.submit_once import NotSubmittedError, SubmitLimitError, export_option, submit_exactly_once
from slurmtrain.report.status.state import RunState, RunStatus, is_over, states
from slurmtrain.runs import attempts, requests
from slurmtrain.runs.attempts import failed_quickly
from slurmtrain.runs.jobs import TOKEN_PREFIX
from slurmtrain.runs.reasons import Event, Reason
from slurmtrain.runs.run_dir import RunDir, copied_from
from slurmtrain.runs.sweep_dir import Sweep, tasks_of
from slurmtrain.slurm import command_environment
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.sweep.plan import plan_arrays, tasks_at_once
from slurmtrain.system import files
from slurmtrain.system.files import folder_mode, is_mine, user_in_words, write_json
from slurmtrain.system.process import ProcessMark, end_with_parent
from slurmtrain.system.records import read_json

log = logging.getLogger(__name__)

RETRIED = (RunStatus.FAILED, RunStatus.LOST, RunStatus.STOPPED)
REMOVED = RunState(RunStatus.REMOVED, "its run directory is gone", [], None)


@dataclass(frozen=True)
class Submission:
    """The result of submitting runs of a sweep.

    Attributes:
        submitted: ids of the jobs that were submitted now.
        runs: ids of the runs in them.
        waiting: number of runs that could not be submitted, because of `limit`.
    """

    submitted: list[str]
    runs: list[str]
    waiting: int = 0
    limit: SubmitLimitError | None = None

    def check(self) -> None:
        """Raise ClusterError if a limit kept runs out of the queue."""
        if self.limit is not None:
            raise ClusterError(
                f"{self.waiting} runs could not be submitted: {self.limit.message}", hint=self.limit.hint
            )


def submit_arrays(sweep: Sweep, client: SlurmClient) -> Submission:
    """Submit every run that has not been submitted. Several shells may do it at the same time.

    Raises:
        ClusterError: the sweep was cancelled; or sbatch refused, or it is not known whether a job exists. Arrays that
            were submitted stay.
    """
    return _submit(sweep, client, lambda: _in_no_array(sweep), behind=True)


def submit_runs(sweep: Sweep, client: SlurmClient, run_dirs: Sequence[RunDir]) -> Submission:
    """Submit those of these runs that have no job. Raises as `submit_arrays`."""
    return _submit(sweep, client, lambda: [each.id for each in run_dirs if not each.info()["job_ids"]])


def submit_again(sweep: Sweep, client: SlurmClient) -> Submission:
    """Submit the runs that have ended without a result, and those that have not been submitted.

    A sweep that was cancelled goes on. Raises as `submit_arrays`.
    """

    def chosen() -> list[str]:
        ended = [run_id for run_id, now in states_of(sweep).items() if now.status in RETRIED]
        for run_dir in map(sweep.run_dir, ended):
            finish_change(run_dir)
            run_dir.request_file.unlink(missing_ok=True)
            if sweep.pack > 1:  # again, where it has had a job of its own since
                run_dir.update_info(packed=True)
        return list(dict.fromkeys([*ended, *_in_no_array(sweep)]))

    sweep.cancelled_file.unlink(missing_ok=True)
    return _submit(sweep, client, chosen)


def _in_no_array(sweep: Sweep) -> list[str]:
    planned = {run_id for number in sweep.array_numbers() for run_id in sweep.members(number)}
    return [run_id for run_id in sweep.run_dirs() if run_id not in planned]


def _submit(sweep: Sweep, client: SlurmClient, choose: Callable[[], list[str]], *, behind: bool = False) -> Submission:
    """Submit an array that was cut short, and then the chosen runs in further ones.

    An array above a limit on jobs is halved until a part fits; the next command goes on from there.

    Args:
        behind: with a limit on the runs at the same time, they wait until the arrays of earlier calls have ended, too.
    """
    submitted: list[str] = []
    runs: list[str] = []

    def hand_over(number: int, *, looked_for: bool = False) -> None:
        check_not_cancelled(sweep)
        submitted.append(_hand_over(sweep, number, client, looked_for_before=looked_for))
        runs.extend(sweep.members(number))
        note_jobs(sweep, number)
        if sweep.cancelled_file.exists():  # while sbatch was at work: whoever cancelled did not find it
            cancel(sweep, client)
            check_not_cancelled(sweep)

    def busy(owner: ProcessMark) -> None:
        log.info("process %s on %s is submitting this sweep; waiting for it", owner.pid, owner.host)

    with claimed(sweep.arrays, busy):
        check_not_cancelled(sweep)
        before = sweep.array_numbers()
        if before and sweep.job_id(before[-1]) is None:
            with contextlib.suppress(SubmitLimitError):  # its runs are in no array now
                hand_over(before[-1], looked_for=True)
        run_ids = choose()
        shapes = {point.run_id: point.shape for point in sweep.points()} if run_ids else {}
        limit, pack = sweep.info()["parallelism"], sweep.pack
        size = client.max_array_size() if run_ids else None
        arrays = plan_arrays([shapes[each] for each in run_ids], max_size=size, pack=pack)
        left = [[run_ids[member] for member in members] for members in arrays]
        first = number = len(sweep.array_numbers())
        while left:
            members = left.pop(0)
            waits = limit is not None and (number > first or (behind and bool(before)))
            _make_array(sweep.array(number), {"members": members, "waits": waits})
            try:
                hand_over(number)
                number += 1
            except SubmitLimitError as error:
                tasks = tasks_of(len(members), pack)
                if tasks < 2:
                    return Submission(submitted, runs, len(members) + sum(map(len, left)), error)
                middle = (tasks + 1) // 2 * pack
                log.info("%s; trying with %d of its runs", error.message, middle)
                left[:0] = [members[:middle], members[middle:]]
    return Submission(submitted, runs)


def _make_array(path: Path, plan: dict[str, object]) -> None:
    """Make the folder of an array; it appears complete."""
    temporary = path.with_name(f".{path.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(mode=folder_mode(path.parent))
    write_json(temporary / "plan.json", plan, durable=False)
    temporary.rename(path)


def _hand_over(sweep: Sweep, number: int, client: SlurmClient, *, looked_for_before: bool) -> str:
    """Hand an array to sbatch and return its job id; remove it if it is certainly not in the queue."""
    path = sweep.array(number)
    script = _script(sweep, number)
    files.write_text(path / "job.sbatch", script)
    members = [sweep.run_dir(run_id) for run_id in sweep.members(number)]
    for run_dir in members:
        if run_dir.path.exists():  # not removed by `runs prune`
            run_dir.script.unlink(missing_ok=True)
            files.link_or_copy(path / "job.sbatch", run_dir.script)
    config = load_frozen(members[0].config_file, with_secrets=False)
    exclusion = node_exclusion.for_new_job(members, path / "job.sbatch", client, config)
    exclusion.tell()
    try:
        job_id = submit_exactly_once(
            script,
            path / "submitit",
            sweep.token(number),
            client,
            options=[*export_option(config), *exclusion.options],
            looked_for_before=looked_for_before,
        )
    except NotSubmittedError:
        shutil.rmtree(path)
        raise
    _write_job(sweep, number, job_id)
    for run_id, element in sweep.elements(number, job_id).items() if exclusion.blamed else ():
        if sweep.run_dir(run_id).path.exists():
            exclusion.record(sweep.run_dir(run_id), element)
    return job_id


def _write_job(sweep: Sweep, number: int, job_id: str) -> None:
    write_json(sweep.array(number) / "job.json", {"job_id": job_id, "time": time.time()})


def _script(sweep: Sweep, number: int) -> str:
    """Return the script of an array, which may wait for arrays before it that have not ended."""
    plan, info = read_json(sweep.array(number) / "plan.json") or {}, sweep.info()
    run_dirs = [sweep.run_dir(run_id) for run_id in plan["members"]]
    config = load_frozen(run_dirs[0].config_file, with_secrets=False)
    awaited = [RunDir(Path(path)) for path in info["after"]]
    config = waiting_for_runs(config, [run for run in awaited if run.info_file.exists()], info["slurm_conf"])
    if plan["waits"]:
        # SLURM may have forgotten a job that has ended, and then refuse to wait for it.
        others = [each for each in sweep.array_numbers() if each < number and not _is_over(sweep, each)]
        if others:
            config = with_dependency(config, [f"afterany:{':'.join(str(sweep.job_id(each)) for each in others)}"])
    paths, at_once = job_paths([each.path for each in run_dirs], info), tasks_at_once(info["parallelism"], info["pack"])
    return render_script(config, replace(paths, parallelism=at_once, pack=info["pack"]))


def _is_over(sweep: Sweep, number: int) -> bool:
    run_dirs = [sweep.run_dir(run_id) for run_id in sweep.members(number)]
    return all(is_over(run_dir) for run_dir in run_dirs if run_dir.info_file.exists())


def note_jobs(sweep: Sweep, number: int) -> None:
    """Record the job of an array in each of its runs, if that has not been completed."""
    path = sweep.array(number) / "job.json"
    job = read_json(path)
    if job is None or job.get("noted") or not is_mine(sweep.path):
        return
    conf, submitted = sweep.info()["slurm_conf"], float(job.get("time", time.time()))
    for run_id, element in sweep.elements(number, str(job["job_id"])).items():
        run_dir = sweep.run_dir(run_id)
        if not run_dir.info_file.exists():  # removed by `runs prune`
            continue
        if run_dir.make_up_job(element, submitted, slurm_conf=conf):
            run_dir.event(Event.SUBMITTED, job_id=element, submitted=submitted)
    write_json(path, {**job, "noted": True})


def states_of(sweep: Sweep) -> dict[str, RunState]:
    """Return the state of every run of the sweep, by run id; one squeue call."""
    with contextlib.suppress(PermissionError, UnreadableRecordError):  # it belongs to somebody else
        for number in sweep.array_numbers():
            note_jobs(sweep, number)
    members = sweep.run_dirs()
    now = states([run_dir for run_dir in members.values() if run_dir.info_file.exists()])
    return {run_id: now.get(run_dir, REMOVED) for run_id, run_dir in members.items()}


def will_fail_again(sweep: Sweep, run_ids: Collection[str]) -> dict[str, list[int]]:
    """Return the points of these runs that will fail for the same reason again, by that reason in words.

    Their config was refused, or their program has ended twice within seconds with the same words.
    """
    found: dict[str, list[int]] = {}
    for point in sweep.points():
        ended = attempts.all_attempts(sweep.run_dir(point.run_id)) if point.run_id in run_ids else []
        if not ended or ended[-1].reason is None:
            continue
        last = ended[-1]
        alike = len(ended) > 1 and all(failed_quickly(each, last.failed_with) for each in ended[-2:])
        if last.reason == Reason.CONFIG or alike:
            found.setdefault(str(last.why or last.reason), []).append(point.number)
    return found


def cancel(sweep: Sweep, client: SlurmClient) -> int:
    """End all runs of the sweep that have not ended, with one scancel, and return how many there were.

    Runs that are not submitted will not be, neither by a shell that is submitting nor by the same command, until `retry`.
    """
    try:
        sweep.cancelled_file.touch()
    except OSError as error:
        # What waits for the limit on jobs is still submitted then, and what SLURM has is cancelled.
        log.warning("%s cannot be made: %s", sweep.cancelled_file, error.strerror or error)
    numbers = sweep.array_numbers()
    if numbers and sweep.job_id(numbers[-1]) is None:  # its submitter may have been killed
        for job_id in client.find_by_comment(TOKEN_PREFIX + sweep.token(numbers[-1]))[:1]:
            _write_job(sweep, numbers[-1], job_id)
    now = states_of(sweep)
    # A run that somebody started by hand in an allocation is not ours to cancel.
    alive = {run_id: state.job_id for run_id, state in now.items() if state.alive and state.own_job and state.job_id}
    for run_id in alive:
        requests.ask_to_cancel(sweep.run_dir(run_id))
        with contextlib.suppress(OSError):
            sweep.run_dir(run_id).event(Event.CANCEL_ASKED)
    known = [run_dir for run_dir in map(sweep.run_dir, now) if run_dir.info_file.exists()]
    left = {job_id for jobs in in_queue(known, client).values() for job_id in jobs}
    jobs = sorted({job_id.partition("_")[0] for job_id in left.union(filter(None, alive.values()))})
    if jobs:  # whole arrays: thousands of ids make a line too long
        client.cancel(*jobs)
    evaluations.cancel_all([run_dir for run_dir in map(sweep.run_dir, now) if run_dir.evaluations.exists()], client)
    return len(alive)


def check_not_cancelled(sweep: Sweep) -> None:
    """Raise ClusterError if the sweep was cancelled, and nobody has asked for it to go on."""
    if sweep.cancelled_file.exists():
        raise ClusterError(
            f"sweep {sweep.id} was cancelled, so nothing of it is submitted",
            hint=f"sweep retry {sweep.id} continues all unfinished points; --again submits another sweep of the same points",
        )


def check_not_planned(run_dir: RunDir) -> None:
    """Raise ClusterError if this run is still to be submitted with its sweep: submitted alone it would exist twice."""
    sweep = Sweep(run_dir.path.parent)
    if sweep.info()["backend"] == Backend.LOCAL:
        return
    numbers = [number for number in sweep.array_numbers() if run_dir.id in sweep.members(number)]
    if not run_dir.info()["job_ids"] or (numbers and sweep.job_id(numbers[-1]) is None):
        raise ClusterError(
            f"run {run_dir.id} has to be submitted together with its sweep", hint=f"sweep retry {sweep.id} does it"
        )


def require_own(sweep: Sweep) -> None:
    """Check that a sweep belongs to this user, before its points are submitted or cancelled: their scripts would be run.

    Raises:
        UsageError: it belongs to somebody else, or is a copy, whose original has the jobs.
    """
    original = copied_from(sweep.path, sweep.info())
    if original is not None:
        raise UsageError(
            f"sweep {sweep.path} is a copy of {original}, and has no jobs of its own",
            hint=f"name {original}; `resume RUN` continues a single run of the copy",
        )
    for path in (sweep.path, sweep.info_file, sweep.points_file, sweep.arrays):
        if os.path.lexists(path) and not is_mine(path):
            whose = user_in_words(os.lstat(path).st_uid)
            raise UsageError(
                f"{path} belongs to {whose}: only the user who submitted a sweep may change or continue it",
                hint="`sweep status` and `sweep collect` show it",
            )


def trusted_client(sweep: Sweep) -> SlurmClient:
    """Return a client of the cluster that a sweep is on."""
    return SlurmClient(command_environment.trusted_slurm_conf(sweep.info()["slurm_conf"], named_by=sweep.info_file))


# Points on this machine. Each is a `resume` in a process of its own, which starts or continues the run. The sweep on disk
# is the same as on a cluster, without arrays.

POLL_S = 0.05


@contextlib.contextmanager
def alone(sweep: Sweep) -> Iterator[None]:
    """Claim the right to wait for the points of a sweep: two processes would start the same run twice.

    Raises:
        ClusterError: another process has claimed it.
    """

    def refuse(owner: ProcessMark) -> None:
        raise ClusterError(
            f"process {owner.pid} on {owner.host} is already running sweep {sweep.id}",
            hint=f"sweep status {sweep.id} shows its state; when that process has ended, start again",
        )

    with claimed(sweep.path, refuse):
        yield


class LocalRuns:
    """Runs of a sweep as processes of this machine, within `with` and `alone`.

    Args:
        show: print the output of the ranks to the terminal.
        at_once: number of runs at the same time.
    """

    def __init__(self, sweep: Sweep, *, show: bool, at_once: int):
        self._sweep, self._show, self._at_once = sweep, show, at_once
        self._waiting: list[RunDir] = []
        self._running: dict[RunDir, subprocess.Popen[bytes]] = {}
        self._signals: list[int] = []  # that this process has got and not passed on yet

    def __enter__(self) -> LocalRuns:
        self._handlers = {
            number: signal.signal(number, lambda number, frame: self._signals.append(number))
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def __exit__(self, *_: object) -> None:
        """Stop what still runs, and wait for it: the process would be stopped with this one anyway."""
        try:
            self._stop(signal.SIGTERM)
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)

    def start(self, run_dir: RunDir) -> None:
        """Start or continue a run, as soon as there is room for it."""
        self._waiting.append(run_dir)
        self._fill()

    def ended(self, timeout_s: float = math.inf) -> RunDir | None:
        """Wait until a process has left and return its run; None if there is none within so many seconds.

        Raises:
            KeyboardInterrupt: a person has stopped this process, and all runs have been stopped, too.
        """
        until = time.monotonic() + timeout_s
        while True:
            if self._signals:
                self._stop(self._signals.pop(0))
                raise KeyboardInterrupt
            if (left := self._take()) is not None:
                self._fill()
                return left
            if time.monotonic() >= until:
                return None
            time.sleep(POLL_S)

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._at_once:
            run_dir = self._waiting.pop(0)
            log.info("%s begins", _name(run_dir))
            self._running[run_dir] = subprocess.Popen(
                [sys.executable, "-m", "slurmtrain", "resume", str(run_dir.path)],
                stdin=subprocess.DEVNULL,
                stdout=None if self._show else subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C reaches this process only, which passes it on
                preexec_fn=lambda: end_with_parent(signal.SIGTERM),
            )

    def _stop(self, number: int) -> None:
        """Send a signal to all processes, and wait until they have left."""
        self._signals.append(number)
        while self._running:
            while self._signals:
                number = self._signals.pop(0)
                for process in self._running.values():
                    process.send_signal(number)
            if self._take() is None:
                time.sleep(POLL_S)

    def _take(self) -> RunDir | None:
        """Return a run whose process has left, if there is one, and say how it has ended."""
        left = next((run_dir for run_dir, process in self._running.items() if process.poll() is not None), None)
        if left is not None:
            del self._running[left]
            if left.info_file.exists():
                log.info("%s: %s", _name(left), states([left])[left].explanation)
        return left


def _name(run_dir: RunDir) -> str:
    return f"run {run_dir.id} ({' '.join(run_dir.info().get('varied', ()))})"
