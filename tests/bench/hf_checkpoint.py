"""Transformers' Trainer with our Checkpointer against its own saving: the stall of a save, and from a TERM until all are out.

Side by side on two ranks of this machine, with 1 GB of state. Both variants stop by the same callback, so that the difference
is the saving alone.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from tests.bench.side_by_side import REPOSITORY, Row, in_turn, options, ratio, show, wait_until
from tests.support.gloo import rank_variables

OURS, THEIRS = "CheckpointedTrainer", "Trainer's own"
RANKS = 2
SAVE_EVERY, SAVES = 5, 3  # steps between saves; saves before the TERM


def main(words: list[str]) -> None:
    chosen = options(__doc__, words, rounds=2, layers=5, worker="")
    if chosen.worker:
        work(chosen.worker, chosen.layers)
        return
    found = in_turn({kind: partial(measure, kind, chosen.layers) for kind in (THEIRS, OURS)}, chosen.rounds, warm_up=0)
    stalls, outs = ({kind: [both[i] for both in found[kind]] for kind in found} for i in (0, 1))
    rows = [Row(f"{kind}: stall of a save", stalls[kind]) for kind in found]
    rows += [Row(f"{kind}: TERM to all ranks out", outs[kind]) for kind in found]
    rows.append(ratio("stall of a save, ours / theirs", stalls[OURS], stalls[THEIRS]))
    rows.append(ratio("TERM to all ranks out, ours / theirs", outs[OURS], outs[THEIRS]))
    show(f"{RANKS} ranks, {chosen.layers} layers of 12.8 million parameters beside 17 million others", rows)


def measure(kind: str, layers: int) -> tuple[float, float]:
    """Return the median over the saves of the longest stall of a rank, and the seconds from the TERM until all are out."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = [sys.executable, "-m", "tests.bench", "hf_checkpoint", "--worker", kind, "--layers", str(layers)]
        ranks = []
        for number in range(RANKS):
            own = {"PYTHONPATH": str(REPOSITORY), "BENCH_FOLDER": name}
            with (folder / f"log-{number}.txt").open("w") as log:
                variables = {**os.environ, **rank_variables(number, RANKS), **own}
                ranks.append(subprocess.Popen(words, env=variables, stdout=log, stderr=log))
        try:
            wait_until(lambda: (folder / "go").exists() or any(rank.poll() is not None for rank in ranks))
            sent = time.monotonic()
            for rank in ranks:
                rank.send_signal(signal.SIGTERM)
            codes = [rank.wait() for rank in ranks]
            out_s = time.monotonic() - sent
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        assert codes == [75] * RANKS, (folder / "log-0.txt").read_text()
        each = [json.loads((folder / f"stalls-{number}.json").read_text()) for number in range(RANKS)]
        return statistics.median([max(save) for save in zip(*each, strict=True)][:SAVES]), out_s


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
    base: Any = CheckpointedTrainer if kind == OURS else Trainer

    class Begin(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if run.rank == 0 and state.global_step == SAVE_EVERY * SAVES + 2:
                (folder / "go").touch()

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
    saving = {"save_steps": SAVE_EVERY, "save_total_limit": 2, "output_dir": str(folder / "out")}
    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True}
    arguments = TrainingArguments(max_steps=10_000, per_device_train_batch_size=1, **saving, **quiet)
    callbacks = [Begin(), *([] if kind == OURS else [SlurmtrainCallback()])]
    Timed(model=model, args=arguments, train_dataset=Texts(), callbacks=callbacks).train()
