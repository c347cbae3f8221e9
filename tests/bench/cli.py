"""How long the command line takes to answer, against a bare Hydra app's `--help`. Wanted: at most 1.3 times; plan: 1 s."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROUNDS = 11
# 72 billion parameters on 128 GPUs: many layouts fit.
PLAN = [
    *(sys.executable, "-m", "slurmtrain", "+cluster=h100x8", "cluster.nodes=16", "model=qwen2_5_72b"),
    *("parallel=fsdp_tp_pp", "parallel.tp=8", "parallel.pp=2", "parallel.param_dtype=bfloat16"),
    *("train.global_batch_size=512", "train.micro_batch_size=1", "data.seq_len=4096"),
]
BARE_APP = """
import hydra

@hydra.main(config_path="conf", config_name="config", version_base="1.3")
def main(config):
    print(config)

main()
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        app = Path(folder)
        (app / "app.py").write_text(BARE_APP)
        (app / "conf").mkdir()
        (app / "conf" / "config.yaml").write_text("lr: 0.1\nmodel:\n  width: 64\n")
        commands = {
            "bare Hydra app --help": [sys.executable, "app.py", "--help"],
            "slurmtrain --help": [sys.executable, "-m", "slurmtrain", "--help"],
            "slurmtrain submit --dry-run": [
                sys.executable,
                "-m",
                "slurmtrain",
                "+cluster=a100x4",
                "submit",
                "--dry-run",
            ],
            "slurmtrain plan": [*PLAN, "plan"],
            "slurmtrain plan --search": [*PLAN, "plan", "--search"],
            "slurmtrain finish-attempt (import only)": [
                sys.executable,
                "-c",
                "import slurmtrain.cli.batch.finish_attempt",
            ],
        }
        times: dict[str, list[float]] = {name: [] for name in commands}
        for round_number in range(ROUNDS + 1):
            for name, command in commands.items():
                began = time.perf_counter()
                subprocess.run(command, cwd=app, check=True, capture_output=True)
                if round_number:  # the first is a warm-up
                    times[name].append(time.perf_counter() - began)
        bare = times["bare Hydra app --help"]
        for name, seconds in times.items():
            ratios = [ours / theirs for ours, theirs in zip(seconds, bare, strict=True)]
            print(f"{name:34} {statistics.median(seconds):6.3f} s   {statistics.median(ratios):5.2f} x bare --help")


if __name__ == "__main__":
    main()
