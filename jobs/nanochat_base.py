"""Starts nanochat's scripts.base_train where it has stopped: at the newest step whose files are all whole.

From nanochat's folder, with this file in it and its tokenizer and data in $NANOCHAT_BASE_DIR:

python -m slurmtrain +cluster=h100x8 submit -- python nanochat_base.py --depth=24 --save-every=250

nanochat itself saves, and resumes by --resume-from-step; it does not find the step. No line of it is changed.
"""

import argparse
import os
import re
import sys
import zipfile
from pathlib import Path


def newest_step(folder: Path, ranks: int) -> int:
    """Return the newest step of which model, metadata and each rank's part of the optimiser are whole; -1: none."""
    steps = {int(match[1]) for path in folder.glob("model_*.pt") if (match := re.fullmatch(r"model_(\d+)", path.stem))}
    for step in sorted(steps, reverse=True):
        files = [folder / f"model_{step:06d}.pt"]
        files += [folder / f"optim_{step:06d}_rank{rank}.pt" for rank in range(ranks)]
        # torch.save writes a zip archive, whose table comes last.
        if (folder / f"meta_{step:06d}.json").exists() and all(zipfile.is_zipfile(file) for file in files):
            return step
    return -1


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--depth", default="20")
    parser.add_argument("--model-tag")
    options, _ = parser.parse_known_args()
    base = Path(os.environ.get("NANOCHAT_BASE_DIR", Path.home() / ".cache" / "nanochat"))
    folder = base / "base_checkpoints" / (options.model_tag or f"d{options.depth}")
    step = newest_step(folder, int(os.environ.get("WORLD_SIZE", "1")))
    words = ["-m", "scripts.base_train", *sys.argv[1:], f"--resume-from-step={step}"]
    os.execv(sys.executable, [sys.executable, *words])
