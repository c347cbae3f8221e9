"""A process ends in one of many ways while a save is pending: what was committed stays, what was not is not half there.

As a program, this is the script that ends: python -m tests.faults.endings KIND DIRECTORY STORE DELAY_S
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

RANKS = 2


def end_of_script() -> None:
    pass


def exit_by_sys() -> None:
    sys.exit(3)


def error_of_script() -> None:
    sys.excepthook = lambda kind, error, trace: print(f"the script's own error: {error}", file=sys.stderr)
    raise ValueError("the seventh seal")


def destroy_process_group() -> None:
    import torch.distributed as dist

    dist.destroy_process_group()


def terminated() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)


def exit_at_once() -> None:
    os._exit(4)


ENDINGS: dict[str, tuple[Callable[[], None], int]] = {
    "the script ends": (end_of_script, 0),
    "sys.exit": (exit_by_sys, 3),
    "an error of the script": (error_of_script, 1),
    "destroy_process_group": (destroy_process_group, 0),
    "TERM": (terminated, -signal.SIGTERM),
    "os._exit": (exit_at_once, 4),
}


def script(kind: str, directory: Path, store: str, delay_s: float) -> None:
    import torch
    import torch.distributed as dist

    from tests.faults.kills import NEWEST, OLDER
    from tests.faults.layer import FileLayer
    from tests.faults.training import Training, checkpointer

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
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
    ENDINGS[kind][0]()


def enter(kind: str) -> None:
    from tests.faults.kills import check
    from tests.faults.outcome import Outcome, Trial
    from tests.faults.processes import Lane
    from tests.faults.rows import row

    def start(rank: int, directory: Path, store: Path, delay_s: float) -> None:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), GLOO_SOCKET_IFNAME="lo")
        words = ["-m", "tests.faults.endings", kind, str(directory), str(store), str(delay_s)]
        os.execv(sys.executable, [sys.executable, *words])

    @row(f"{kind}, with a save pending", Outcome.NEWEST, Outcome.OLDER, full=5, short=1, lanes=2)
    def work(lane: Lane, count: int) -> Iterator[Trial]:
        for _ in range(count):
            with lane.trial():
                directory = lane.directory / "checkpoints"
                delay_s = lane.random.uniform(0.1, 0.5)
                ranks = [
                    lane.fork(start, rank, directory, lane.directory / "store", delay_s, name=f"rank{rank}")
                    for rank in range(RANKS)
                ]
                ends = [child.wait() for child in ranks]
                if ends != [ENDINGS[kind][1]] * RANKS:
                    yield Trial(Outcome.UNEXPLAINED, f"ended with {ends}\n" + "\n".join(c.output() for c in ranks))
                    continue
                trial = check(lane, directory, f"{ranks[0].output()[-500:]}", ranks=RANKS)
                yield Trial(Outcome.LOST, trial.detail) if trial.outcome == Outcome.ERROR else trial


if __name__ == "__main__":
    script(sys.argv[1], Path(sys.argv[2]), sys.argv[3], float(sys.argv[4]))
else:
    for _kind in ENDINGS:
        enter(_kind)
