"""A program that knows nothing of slurmtrain and keeps a checkpoint file of its own: job=command runs it all the same.

    python -m slurmtrain +cluster=a100x4 submit -- python jobs/own_command.py --file sum.json

It adds up 1 + 2 + ... + N. When it is told to stop (TERM) it writes down how far it has come, and says with exit code
75 (EX_TEMPFAIL) that it wants to be started again. A program that just dies of the signal is started again as well.
"""

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--file", type=Path, required=True)
parser.add_argument("--count", type=int, default=100)
parser.add_argument("--pause", type=float, default=0.01, help="seconds")
options = parser.parse_args()
rank = int(os.environ.get("RANK", "0"))
file = options.file.with_name(f"{options.file.stem}-{rank}{options.file.suffix}")

told_to_stop = False


def remember(number: int, frame: object) -> None:
    global told_to_stop
    told_to_stop = True


signal.signal(signal.SIGTERM, remember)

state = json.loads(file.read_text()) if file.exists() else {"done": 0, "sum": 0, "starts": 0}
state["starts"] += 1
while state["done"] < options.count and not told_to_stop:
    state["done"] += 1
    state["sum"] += state["done"]
    time.sleep(options.pause)
    if state["done"] % 10 == 0:
        print(f"rank {rank}: {state['done']}/{options.count}", flush=True)

temporary = file.with_name(f".{file.name}")
temporary.write_text(json.dumps(state))
temporary.replace(file)
sys.exit(0 if state["done"] == options.count else os.EX_TEMPFAIL)
