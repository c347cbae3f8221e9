"""How long the dry run of a layout takes: 512 ranks of a 70B model on this machine. Wanted: at most 10 s."""

from __future__ import annotations

import subprocess
import sys
import time

MODEL = ["+cluster=a100x8", "cluster.nodes=64", "model=llama3_70b", "train.global_batch_size=512"]
LAYOUTS = {
    "TP 8 x FSDP 64": ["parallel=fsdp_tp", "parallel.tp=8", "parallel.activation_checkpointing=full"],
    "TP 8 x PP 8 x DP 8": ["parallel.tp=8", "parallel.pp=8"],
}


def main() -> None:
    for name, words in LAYOUTS.items():
        began = time.perf_counter()
        command = [sys.executable, "-m", "slurmtrain", *MODEL, *words, "layout", "--memory"]
        subprocess.run(command, check=True, capture_output=True)
        print(f"{name:20} {time.perf_counter() - began:6.2f} s")


if __name__ == "__main__":
    main()
