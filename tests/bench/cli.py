"""How long the command line takes to answer, against the `--help` of a bare Hydra app. Wanted: at most 1.3 times."""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path

from tests.bench.side_by_side import Row, in_turn, options, ratio, run, seconds_of, show

BARE_APP = """
import hydra

@hydra.main(config_path="conf", config_name="config", version_base="1.3")
def main(config):
    print(config)

main()
"""
OURS = [sys.executable, "-m", "slurmtrain"]


def main(words: list[str]) -> None:
    rounds = options(__doc__, words, rounds=11).rounds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "app.py").write_text(BARE_APP)
        (folder / "conf").mkdir()
        (folder / "conf" / "config.yaml").write_text("lr: 0.1\nmodel:\n  width: 64\n")
        commands = {
            "bare Hydra app --help": [sys.executable, "app.py", "--help"],
            "--help": [*OURS, "--help"],
            "submit --dry-run": [*OURS, "+cluster=a100x4", "submit", "--dry-run"],
        }
        variants = {name: partial(seconds_of, partial(run, command, folder)) for name, command in commands.items()}
        found = in_turn(variants, rounds)
    bare = found["bare Hydra app --help"]
    rows = [Row(name, seconds) for name, seconds in found.items()]
    rows += [ratio(f"{name} / bare Hydra app", found[name], bare, "<= 1.3") for name in ("--help", "submit --dry-run")]
    show("from enter to the answer", rows)
