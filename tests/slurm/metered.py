"""Runs somebody's script as it stands: python metered.py SCRIPT ... Its optimiser steps are counted, and take their time.

Each step adds the last digit of the attempt's number to `steps-RANK` in the run directory, and lasts a fraction of a second
more, to have time to interrupt, until there is a file `quick`. The first step of each attempt writes the process and the
number of ranks that train together to `rank-RANK`. Imports nothing of slurmtrain.
"""

import os
import runpy
import sys
import time
from pathlib import Path

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

FOLDER = Path(os.environ.get("SLURMTRAIN_RUN_DIR", "."))
ATTEMPT = os.environ.get("SLURMTRAIN_ATTEMPT", "1")[-1]
told = False


def count(*_: object) -> None:
    global told
    rank = os.environ.get("RANK", "0")
    if not told:
        told = True
        together = dist.get_world_size() if dist.is_initialized() else 1
        (FOLDER / f"rank-{rank}").write_text(f"{os.getpid()} {together}")
    with (FOLDER / f"steps-{rank}").open("a") as steps:
        steps.write(ATTEMPT)
    if not (FOLDER / "quick").exists():
        time.sleep(0.25)


register_optimizer_step_post_hook(count)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
