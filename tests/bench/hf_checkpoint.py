"""Trainer with our Checkpointer against Trainer's own saving, side by side on two ranks of this machine: 1 GB of state.

The stall of a save (how long the step loop stands still), and the time from a TERM until both ranks are out. Both
variants stop by the same callback, so that the difference is the saving alone.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.support.gloo import rank_variables

KINDS = ("Trainer's own", "CheckpointedTrainer")
RANKS = 2
SAVE_EVERY, SAVES = 5, 3  # steps between saves; saves before the TERM


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--layers", type=int, default=5, help="of 12.8 million parameters each, beside 17 million others"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--worker", choices=KINDS)
    options = parser.parse_args(sys.argv[2:])
    if options.worker:
        work(options.worker, options.layers)
        return
    found: dict[str, list[tuple[list[float], float]]] = {kind: [] for kind in KINDS}
    for number in range(options.rounds):
        for kind in KINDS if number % 2 == 0 else KINDS[::-1]:
            with tempfile.TemporaryDirectory() as folder:
                stalls, out = measure(kind, Path(folder), options.layers)
            found[kind].append((stalls, out))
            shown = ", ".join(f"{stall:.2f}" for stall in stalls)
            print(f"{kind:20} saves stall {shown} s; TERM to all ranks out {out:.2f} s", flush=True)
    stall = {kind: statistics.median(each for stalls, _ in found[kind] for each in stalls) for kind in KINDS}
    out_s = {kind: statistics.median(out for _, out in found[kind]) for kind in KINDS}
    theirs, ours = KINDS
    print(
        f"stall of a save, median: {stall[theirs]:.2f} s and {stall[ours]:.2f} s: {stall[theirs] / stall[ours]:.1f} times"
    )
    print(
        f"TERM to all ranks out:   {out_s[theirs]:.2f} s and {out_s[ours]:.2f} s: {out_s[theirs] / out_s[ours]:.1f} times"
    )


def measure(kind: str, folder: Path, layers: int) -> tuple[list[float], float]:
    """The longest stall of any rank for each save, and the time from the TERM until the last rank is out; seconds."""
    words = [sys.executable, "-m", "tests.bench", "hf_checkpoint", "--worker", kind, "--layers", str(layers)]
    ranks = []
    for number in range(RANKS):
        own = {"PYTHONPATH": os.getcwd(), "BENCH_FOLDER": str(folder)}
        variables = {**os.environ, **rank_variables(number, RANKS), **own}
        with (folder / f"log-{number}.txt").open("w") as log:
            ranks.append(subprocess.Popen(words, env=variables, stdout=log, stderr=subprocess.STDOUT))
    try:
        while not (folder / "go").exists():
            if any(rank.poll() is not None for rank in ranks):
                raise SystemExit((folder / "log-0.txt").read_text())
            time.sleep(0.01)
        sent = time.monotonic()
        for rank in ranks:
            rank.send_signal(signal.SIGTERM)
        codes = [rank.wait() for rank in ranks]
        out = time.monotonic() - sent
        assert codes == [75] * RANKS, (folder / "log-0.txt").read_text()
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    every = [json.loads((folder / f"stalls-{number}.json").read_text()) for number in range(RANKS)]
    return [max(each) for each in zip(*every, strict=True)][:SAVES], out


def work(kind: str, layers: int) -> None:
    """Be one rank: train until a TERM comes, and write how long each save has held up the loop."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

    import slurmtrain
    from slurmtrain.integrations.transformers import CheckpointedTrainer, SlurmtrainCallback

    folder = Path(os.environ["BENCH_FOLDER"])
    os.chdir(folder)
    run = slurmtrain.init(device="cpu")
    set_seed(0)
    stalls: list[float] = []

    class Begin(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if run.rank == 0 and state.global_step == SAVE_EVERY * SAVES + 2:
                (folder / "go").touch()

    ours = kind == "CheckpointedTrainer"
    base: Any = CheckpointedTrainer if ours else Trainer

    class Timed(base):  # type: ignore[misc]
        def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            began = time.monotonic()
            super()._save_checkpoint(*args, **kwargs)
            stalls.append(time.monotonic() - began)
            (folder / f"stalls-{run.rank}.json").write_text(json.dumps(stalls))

    class Texts(torch.utils.data.Dataset[dict[str, Any]]):
        def __len__(self) -> int:
            return 100_000

        def __getitem__(self, index: int) -> dict[str, Any]:
            tokens = [(index + place) % 8192 for place in range(8)]
            return {"input_ids": tokens, "labels": tokens}

    shape = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": layers, "num_attention_heads": 8}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8192, **shape))
    if run.rank == 0:
        print(f"{sum(each.numel() for each in model.parameters()) * 12 / 1e9:.2f} GB of state", flush=True)
    arguments = TrainingArguments(
        output_dir=str(folder / "out"),
        max_steps=10_000,
        per_device_train_batch_size=1,
        save_steps=SAVE_EVERY,
        save_total_limit=2,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    callbacks = [Begin(), *([] if ours else [SlurmtrainCallback()])]
    Timed(model=model, args=arguments, train_dataset=Texts(), callbacks=callbacks).train()


if __name__ == "__main__":
    main()
