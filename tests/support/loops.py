"""A training loop of a user's own without torch, which may forget something when it is resumed: what `drill` has to find."""

from __future__ import annotations

# It learns one number by samples in a shuffled order, with momentum. FORGETS: nothing, "order", or "seed" from the start.
LOOP = """
import json, os, pathlib, random, signal, sys, time

forgets = sys.argv[1] if len(sys.argv) > 1 else ""
folder = pathlib.Path(os.environ["SLURMTRAIN_RUN_DIR"])
saved = folder / "state.json"
told = False

def tell(number, frame):
    global told
    told = True

signal.signal(signal.SIGTERM, tell)
order = list(range(200))
random.Random(None if forgets == "seed" else 0).shuffle(order)
state = {"step": 0, "seen": 0, "weight": 0.0, "momentum": 0.0}
if saved.exists():
    state = json.loads(saved.read_text())
    if forgets == "order":
        state["seen"] = 0
while state["step"] < 25 and not told:
    sample = order[state["seen"]] / 200
    loss = (state["weight"] - sample) ** 2
    state["momentum"] = 0.9 * state["momentum"] + 2 * (state["weight"] - sample)
    state["weight"] -= 0.01 * state["momentum"]
    state["step"] += 1
    state["seen"] += 1
    with (folder / "metrics.jsonl").open("a") as log:
        log.write(json.dumps({"step": state["step"], "loss": loss}) + "\\n")
    time.sleep(0.1)
saved.write_text(json.dumps(state))
sys.exit(0 if state["step"] == 25 else 75)
"""
