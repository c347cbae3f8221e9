"""A process ends in one of many ways while a save is pending: what was committed stays, what was not is not half there."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.faults.kills import NEWEST, OLDER, RANKS, check
from tests.faults.layer import FileLayer
from tests.faults.processes import Lane
from tests.faults.rows import Outcome, Trial, row
from tests.faults.training import Training, checkpointer

# How a script ends, and the exit code of its process.
ENDINGS = {
    "the script ends": ("pass", 0),
    "sys.exit": ("sys.exit(3)", 3),
    "an error of the script": ("raise ValueError('the seventh seal')", 1),
    "destroy_process_group": ("dist.destroy_process_group()", 0),
    "TERM": ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)", -signal.SIGTERM),
    "os._exit": ("os._exit(4)", 4),
}


def script(kind: str, rank: int, directory: Path, store: Path, delay_s: float) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", store=dist.FileStore(str(store), RANKS), rank=rank, world_size=RANKS)
    training = Training(rank=rank)
    writer = checkpointer(directory, dist.new_group(backend="gloo"))
    training.steps(OLDER)
    writer.save(OLDER, per_rank=training.per_rank, **training.objects).result()
    training.steps(NEWEST - OLDER)

    def before(number: int, name: str, path: str) -> None:
        if name == "open" and path.endswith(".safetensors"):
            time.sleep(delay_s)

    FileLayer(directory, before).install()
    writer.save(NEWEST, per_rank=training.per_rank, **training.objects)
    exec(ENDINGS[kind][0])


def be_script(kind: str, *arguments: Any) -> None:
    """Be an interpreter that runs the script, and ends as one does."""
    code: object = 0
    try:
        script(kind, *arguments)
    except SystemExit as ending:
        code = ending.code
    except ValueError as error:
        print(f"the script's own error: {error}", file=sys.stderr)
        code = 1
    ctypes.pythonapi.Py_Exit(code)


def end(lane: Lane, kind: str) -> Trial:
    directory, store = lane.directory / "checkpoints", lane.directory / "store"
    delay_s = lane.random.uniform(0.1, 0.5)
    ranks = [lane.fork(be_script, kind, rank, directory, store, delay_s, name=f"rank{rank}") for rank in range(RANKS)]
    ends = [child.wait() for child in ranks]
    if ends != [ENDINGS[kind][1]] * RANKS:
        return Trial(Outcome.UNEXPLAINED, f"ended with {ends}\n" + "\n".join(child.output() for child in ranks))
    trial = check(lane, directory, f"{ranks[0].output()[-500:]}", ranks=RANKS)
    return Trial(Outcome.LOST, trial.detail) if trial.outcome == Outcome.ERROR else trial


for _kind in ENDINGS:
    enter = row(f"{_kind}, with a save pending", Outcome.NEWEST, Outcome.OLDER, full=5, short=1, lanes=2)
    enter(partial(end, kind=_kind))
