"""The verbs that look at a run or steer it: status, logs, cancel, preempt, requeue, resume."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from slurmtrain import rundir
from slurmtrain.cli.arguments import Parser
from slurmtrain.cli.verbs import VERBS
from slurmtrain.errors import ClusterError, UsageError
from slurmtrain.launch.state import RunState, state, states
from slurmtrain.rundir import RunDir
from slurmtrain.runtime.attempts import Attempt, write_request
from slurmtrain.runtime.slurm import SlurmClient

FOLLOW_POLL_S = 0.2  # of a log on a shared file system: there is no event to await


def main(verb: str, words: list[str]) -> int:
    parser = Parser(prog=f"python -m slurmtrain {verb}", description=VERBS[verb].help)
    if verb == "status":
        parser.add_argument("run", nargs="?", metavar="RUN")
    else:
        parser.add_argument("run", metavar="RUN", help="a run id, a unique beginning of one, a path, or last")
    if verb == "logs":
        parser.add_argument("-f", "--follow", action="store_true", help="go on until the run has ended")
        parser.add_argument("--rank", type=int, default=0)
        parser.add_argument("--attempt", type=int, help="default: the latest")
    options = parser.parse_args(words)
    root = rundir.runs_root()
    if verb == "status" and options.run is None:
        return _all(root)
    run_dir = rundir.find(options.run, root)
    if verb == "logs":
        return _logs(run_dir, options.rank, options.attempt, options.follow)
    verbs: dict[str, Callable[[RunDir], int]] = {
        "status": _status,
        "cancel": _cancel,
        "preempt": lambda run: _stop_and_start_again(run, "preempt", "TERM"),
        "requeue": lambda run: _stop_and_start_again(run, "requeue", "USR2"),
        "resume": _resume,
    }
    return verbs[verb](run_dir)


def _all(root: Path) -> int:
    runs = rundir.all_runs(root)
    if not runs:
        raise UsageError(
            f"there are no runs under {root.resolve()}",
            hint="go to the folder where submit was typed, or set SLURMTRAIN_RUNS to its runs folder",
        )
    found = states(runs)
    rows = [
        [
            run.id,
            run.path.parent.name,
            found[run.id].word,
            _number(found[run.id].step),
            str(len(found[run.id].attempts)),
            found[run.id].sentence,
        ]
        for run in runs
    ]
    _table(["run", "name", "state", "step", "attempts", ""], rows)
    return 0


def _status(run_dir: RunDir) -> int:
    info, now = run_dir.info(), state(run_dir)
    jobs = f" as job {', '.join(info['job_ids'])}" if info["job_ids"] else ""
    print(f"run {run_dir.id} ({info['name']}): {now.word}")
    print(f"  {now.sentence}")
    print(f"  submitted {_time(info['created'])} by {info['user']} on {info['host']}{jobs}")
    print(f"  overrides: {' '.join(info['overrides']) or 'none'}")
    print(f"  {run_dir.path}")
    if now.attempts:
        print()
        _table(
            ["attempt", "job", "started", "took", "nodes", "steps", "reason", "then"],
            [_attempt_row(attempt, now) for attempt in now.attempts],
        )
    return 0


def _attempt_row(attempt: Attempt, now: RunState) -> list[str]:
    current = attempt is now.attempts[-1] and now.alive and attempt.ended is None
    last = now.step if current else attempt.last_step
    end = attempt.ended or (time.time() if current else None)
    nodes = ",".join(attempt.nodes[:4]) + (f" +{len(attempt.nodes) - 4}" if len(attempt.nodes) > 4 else "")
    return [
        str(attempt.number),
        attempt.job_id or "-",
        _time(attempt.started) if attempt.started else "-",
        f"{end - attempt.started:.0f} s" if end and attempt.started else "-",
        nodes or "-",
        f"{_number(attempt.first_step)}-{_number(last)}",
        attempt.reason or ("running" if current else "?"),
        attempt.sentence or "",
    ]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns on a terminal, aligned; the last one takes what is left and is never cut in a file or pipe."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(*header, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in table.columns[:-1]:
        column.no_wrap = True
    for row in rows:
        table.add_row(*[cell.replace("[", "\\[") for cell in row])
    width = None if sys.stdout.isatty() else 400
    Console(width=width, highlight=False).print(table)


def _logs(run_dir: RunDir, rank: int, attempt: int | None, follow: bool) -> int:
    numbers = run_dir.attempt_numbers()
    if attempt is not None and attempt not in numbers:
        raise UsageError(
            f"run {run_dir.id} has no attempt {attempt}", hint=f"it has: {', '.join(map(str, numbers)) or 'none yet'}"
        )
    if follow:
        return _follow(run_dir, rank, attempt)
    if not numbers:
        raise UsageError(
            f"run {run_dir.id} has not started yet, so there is no log",
            hint=f"status {run_dir.id}; logs -f waits for it",
        )
    log = _log_file(run_dir, rank, attempt or numbers[-1])
    sys.stdout.write(log.read_text(errors="replace"))
    return 0


def _log_file(run_dir: RunDir, rank: int, number: int) -> Path:
    directory = run_dir.attempt(number)
    log = directory / f"rank-{rank}.log"
    if log.exists():
        return log
    ranks = sorted(int(path.stem[5:]) for path in directory.glob("rank-*.log"))
    for other in (directory / "setup-failed", directory / "srun.log"):
        if not ranks and other.exists():
            return other
    raise UsageError(
        f"attempt {number} of run {run_dir.id} has no log of rank {rank}",
        hint=f"it has ranks 0 to {ranks[-1]}" if ranks else f"no rank has started; see {run_dir.path}/slurm-*.log",
    )


def _follow(run_dir: RunDir, rank: int, attempt: int | None) -> int:
    """Print a rank's output as it comes, from attempt to attempt, until the run has ended."""
    for text in _lines_as_they_come(run_dir, rank, attempt):
        sys.stdout.write(text)
        sys.stdout.flush()
    return 0


def _lines_as_they_come(run_dir: RunDir, rank: int, attempt: int | None) -> Iterator[str]:
    number, position = attempt or (run_dir.attempt_numbers() or [1])[-1], 0
    asked = 0.0
    ended = False
    while True:
        log = run_dir.attempt(number) / f"rank-{rank}.log"
        text = ""
        if log.exists():
            with log.open(errors="replace") as file:
                file.seek(position)
                text = file.read()
                position = file.tell()
        if text:
            yield text
            continue
        if attempt is None and number + 1 in run_dir.attempt_numbers():
            number, position = number + 1, 0
            continue
        if ended:
            return
        # The queue is asked seldom; what the run itself wrote says sooner that it is over.
        if time.monotonic() - asked > 5.0 or _settled(run_dir, number):
            asked = time.monotonic()
            ended = not state(run_dir).alive
        else:
            time.sleep(FOLLOW_POLL_S)


def _settled(run_dir: RunDir, number: int) -> bool:
    record = rundir.read_json(run_dir.attempt(number) / "attempt.json") or {}
    return record.get("verdict") in ("done", "end")


def follow_to_the_end(run_dir: RunDir) -> int:
    """For `submit --follow`: 0 when the run has finished, 1 when it has ended otherwise. Ctrl-C leaves the job alone."""
    try:
        _follow(run_dir, 0, None)
    except KeyboardInterrupt:
        print(f"\nthe job goes on; come back with: logs {run_dir.id} -f")
        return 130
    now = state(run_dir)
    print(f"run {run_dir.id}: {now.word}: {now.sentence}")
    return 0 if now.word == "finished" else 1


def _cancel(run_dir: RunDir) -> int:
    now = state(run_dir)
    if not now.alive:
        print(f"run {run_dir.id} is not running: {now.sentence}")
        return 0
    write_request(run_dir, "cancel")
    if run_dir.info()["backend"] == "local":
        _signal_here(now, signal.SIGTERM)
    else:
        assert now.job_id is not None
        _client(run_dir).cancel(now.job_id)
    run_dir.event("cancel asked")
    print(f"run {run_dir.id} is told to end; it saves if time allows and does not come back")
    return 0


def _stop_and_start_again(run_dir: RunDir, action: str, name: str) -> int:
    """preempt and requeue of a running job: the same stop, with the signal of a preemption or the early warning."""
    now = state(run_dir)
    if not now.alive:
        raise ClusterError(f"run {run_dir.id} is not running: {now.sentence}", hint=f"resume {run_dir.id}")
    if run_dir.info()["backend"] == "local":
        write_request(run_dir, action)
        _signal_here(now, signal.SIGTERM if name == "TERM" else signal.SIGUSR2)
    elif now.word in ("waiting", "requeued", "held"):
        if action == "preempt":
            raise ClusterError(
                f"run {run_dir.id} is not running but {now.word}", hint=f"requeue {run_dir.id} starts it now"
            )
        assert now.job_id is not None
        if now.word == "held":
            _client(run_dir).release(now.job_id)
        _client(run_dir).start_now(now.job_id)
        print(f"run {run_dir.id} is asked to start now")
        return 0
    else:
        assert now.job_id is not None
        write_request(run_dir, action)
        _client(run_dir).signal(now.job_id, name)
    run_dir.event(f"{action} asked")
    print(f"run {run_dir.id} is told to save and leave; it is requeued and resumes by itself (logs {run_dir.id} -f)")
    return 0


def _signal_here(now: RunState, number: int) -> None:
    """Signal rank 0 of a local run; it tells the others."""
    pid = now.attempts[-1].pid
    assert pid is not None
    os.kill(pid, number)


def _resume(run_dir: RunDir) -> int:
    now = state(run_dir)
    if now.alive:
        raise ClusterError(
            f"run {run_dir.id} has not ended: {now.word}, {now.sentence}", hint=f"requeue {run_dir.id} restarts it"
        )
    if now.word == "finished":
        print(f"run {run_dir.id} is finished: there is nothing to resume")
        return 0
    run_dir.request_file.unlink(missing_ok=True)
    run_dir.event("resume asked")
    if run_dir.info()["backend"] == "local":
        from slurmtrain.launch.local import run_local

        return run_local(run_dir, lambda text: print(f"slurmtrain: {text}", flush=True))
    from slurmtrain.launch.submit import resubmit

    print(f"run {run_dir.id} is submitted again as job {resubmit(run_dir)}")
    return 0


def _client(run_dir: RunDir) -> SlurmClient:
    return SlurmClient(run_dir.info()["slurm_conf"])


def _number(value: int | None) -> str:
    return "?" if value is None else str(value)


def _time(seconds: float) -> str:
    return time.strftime("%m-%d %H:%M:%S", time.localtime(seconds))
