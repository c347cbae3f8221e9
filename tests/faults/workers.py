"""Signals reach data workers, as SLURM sends them to every process of a step: training goes on, or stops with a save."""

from __future__ import annotations

import atexit
import contextlib
import os
import runpy
import shutil
import signal
import sys
import time
from functools import partial
from pathlib import Path

from slurmtrain.checkpoint.format.directory import committed, step_of
from tests.faults.processes import Child, Lane, UnexplainedError
from tests.faults.rows import Outcome, Trial, row
from tests.support.children import descendants

STEPS = 240  # many more than it takes to interrupt it
PAUSE_S = 0.03
SCRIPT = Path(__file__).parent / "loop.py"


def start(lane: Lane, *words: str) -> Child:
    def be_script() -> None:
        """Run the script as a process of its own would, which has imported torch already."""
        os.chdir(lane.directory)
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        sys.argv = [str(SCRIPT), "--steps", str(STEPS), *words]
        code: object = 0
        try:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        except SystemExit as ending:
            code = ending.code
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(code if isinstance(code, int) else 1)

    return lane.fork(be_script, name="script")


def losses(*children: Child) -> dict[int, str]:
    """What was printed, by step; the same step twice has to be the same loss."""
    found: dict[int, str] = {}
    for child in children:
        for line in child.log.read_text().splitlines():
            words = line.split()
            if words[:1] == ["step"] and found.setdefault(int(words[1]), words[2]) != words[2]:
                raise UnexplainedError(f"step {words[1]} has two losses")
    return found


def wait_for_step(child: Child, step: int) -> None:
    deadline = time.monotonic() + 60
    while max(losses(child), default=0) < step:
        if child.ended() or time.monotonic() > deadline:
            raise UnexplainedError(f"not at step {step}\n{child.output()}")
        time.sleep(0.01)


def send(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def undisturbed(lane: Lane) -> dict[int, str]:
    """The losses of a run that nothing disturbs, the same for all rows."""

    def make() -> dict[int, str]:
        child = start(lane)
        if child.wait() != 0:
            raise UnexplainedError(child.output())
        shutil.rmtree(lane.directory / "checkpoints")
        return losses(child)

    found: dict[int, str] = lane.remember("undisturbed", make)
    return found


def signalled(lane: Lane, workers: int, context: str, number: int) -> Trial:
    """First only the workers are told, then everybody; then the script is started again."""
    expected = undisturbed(lane)
    words = ["--workers", str(workers), "--context", context]
    child = start(lane, *words, "--pause", str(PAUSE_S))
    wait_for_step(child, 5)
    if workers:
        send(descendants(child.pid), number)
        wait_for_step(child, max(losses(child)) + 20)  # more than what the workers had read ahead
    send([child.pid, *descendants(child.pid)], number)
    code = child.wait()
    there = [step_of(path) for path in committed(lane.directory / "checkpoints")]
    if code != 75 or not there or there[-1] != max(losses(child)):
        return Trial(Outcome.UNEXPLAINED, f"ended with {code}, checkpoints {there}\n{child.output()}")
    again = start(lane)  # workers of its own would only take the time of their imports
    if again.wait() != 0 or losses(child, again) != expected:
        return Trial(Outcome.WRONG, f"after a stop at step {there[-1]}\n{again.output()}")
    return Trial(Outcome.NEWEST)


for _number, _workers, _context in (
    (signal.SIGUSR2, 0, ""),
    (signal.SIGTERM, 2, "fork"),
    (signal.SIGUSR2, 2, "spawn"),
    (signal.SIGTERM, 2, "forkserver"),
):
    _name = f"{_workers} {_context} workers" if _workers else "no workers"
    enter = row(f"{_name}, {_number.name}", Outcome.NEWEST, full=3, short=1, lanes=1)
    enter(partial(signalled, workers=_workers, context=_context, number=_number))
