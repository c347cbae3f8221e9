"""Runs rows in forks of itself. Started by `matrix`: requests come on standard input, trials go to standard output."""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

import slurmtrain.rank.jobs.train  # noqa: F401  what ranks import, once
from tests.faults.processes import Lane, UnexplainedError
from tests.faults.rows import ROWS, Outcome, SkippedError, Trial, allowed, load
from tests.faults.training import Training


def main() -> None:
    torch.set_num_threads(1)
    load()
    Training().steps(1)  # the first step of an optimiser imports half of torch: here once, not in every rank
    assert len(os.listdir("/proc/self/task")) == 1, "a fork of a process with threads may inherit a held lock"
    for line in sys.stdin:
        request = json.loads(line)
        lanes = request["lanes"]
        shares = [len(range(number, request["trials"], lanes)) for number in range(lanes)]
        pids = []
        for number, share in enumerate(shares):
            if share and not (pid := os.fork()):
                _be_lane(number, share, request)
            elif share:
                pids.append(pid)
        for pid in pids:
            if status := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
                _say(outcome=Outcome.UNEXPLAINED.name, detail=f"a lane ended with {status}")
        _say(done=request["row"])


def _be_lane(number: int, share: int, request: dict[str, Any]) -> None:
    row = ROWS[request["row"]]
    lane = Lane(Path(request["directory"]) / f"lane-{number}", request["seed"] + number)
    lane.memory.update(request["memory"])
    left = share
    try:
        while left > 0:
            try:
                for trial in row.work(lane, left):
                    left -= 1
                    _tell(allowed(row, trial))
                left = 0
            except UnexplainedError as error:
                left -= 1
                _tell(Trial(Outcome.UNEXPLAINED, str(error)))
    except SkippedError as reason:
        _say(skipped=str(reason))
    except BaseException:
        _tell(Trial(Outcome.UNEXPLAINED, f"the harness: {traceback.format_exc()}"))
    finally:
        os._exit(0)


def _tell(trial: Trial) -> None:
    # One write of less than PIPE_BUF: lines of several lanes do not mix.
    _say(outcome=trial.outcome.name, detail=trial.detail[:1500])


def _say(**message: Any) -> None:
    os.write(1, (json.dumps(message) + "\n").encode())


if __name__ == "__main__":
    main()
