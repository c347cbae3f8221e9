"""Training as it is submitted against a bare PyTorch loop with DDP or FSDP2. Wanted: 0.98 of its speed.

Both run in the same two processes, one step of the one after one step of the other, so that whatever else the machine does
meets both alike: a hook of train.hooks does a step of the bare loop before each step of the training. Model, optimiser, batch
and data are the same. The training has all that it has by default (metrics.jsonl, TensorBoard, progress, times of the parts of
a step, slow ranks, the check for numbers that are not finite, the watchdog), and no checkpoints, which `checkpoint` measures.
Each value is the median over the pairs of steps of a round; processor time is the sum over them, by the thread that trains.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

from slurmtrain.data.sources.text import StdlibText
from slurmtrain.models import Decoder
from slurmtrain.training.hooks import TrainingHook
from slurmtrain.training.hooks.base import TrainingState
from tests.bench.side_by_side import Row, in_turn, options, ratio, run, show

RANKS, BATCH, SEQUENCE, TEXT_BYTES = 2, 16, 256, 4_000_000
WARM_UP_STEPS = 5  # steps of a run that do not count
MODEL: dict[str, Any] = {"vocab_size": 256, "dim": 96, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2}
MODEL["max_seq_len"] = SEQUENCE
LAYOUTS = {"DDP": "parallel=ddp", "FSDP2": "parallel=fsdp"}
WORDS = [
    *f"cluster=local cluster.tasks_per_node={RANKS} cluster.cpus_per_task=1 train.device=cpu model=base".split(),
    *(f"model.{name}={value}" for name, value in MODEL.items()),
    *f"model.tie_embeddings=false data.seq_len={SEQUENCE} data.max_bytes={TEXT_BYTES} optim.warmup_steps=0".split(),
    *f"train.global_batch_size={BATCH} train.eval_every=0 checkpoint.every_steps=0 job.snapshot=none".split(),
]


class Spent(NamedTuple):
    """Seconds by the clock, and of processor time of the thread that trains."""

    wall: float
    cpu: float


def now() -> Spent:
    return Spent(time.perf_counter(), time.thread_time())


def since(before: Spent) -> Spent:
    after = now()
    return Spent(after.wall - before.wall, after.cpu - before.cpu)


def main(words: list[str]) -> None:
    chosen = options(__doc__, words, rounds=4, steps=100, layouts=tuple(LAYOUTS))
    variants = {name: partial(measure, name, chosen.steps) for name in chosen.layouts}
    found = in_turn(variants, chosen.rounds, warm_up=0)
    rows = []
    for name, rounds in found.items():
        pairs = [list(zip(bare, ours, strict=True))[WARM_UP_STEPS:] for bare, ours in rounds]
        medians = [statistics.median(ours.wall for _, ours in each) for each in pairs]
        rows.append(Row(name, [BATCH * SEQUENCE / median for median in medians], "tokens/s"))
        by_clock = [statistics.median(bare.wall / ours.wall for bare, ours in each) for each in pairs]
        rows.append(Row(f"{name}: speed / bare loop", by_clock, "x", ">= 0.98"))
        bare_s, ours_s = ([sum(pair[who].cpu for pair in each) for each in pairs] for who in (0, 1))
        rows.append(ratio(f"{name}: processor time, bare loop / ours", bare_s, ours_s))
    show(f"training on {RANKS} ranks, batch {BATCH} x {SEQUENCE}, {chosen.steps} steps a round", rows)


def measure(layout: str, steps: int) -> tuple[list[Spent], list[Spent]]:
    """Return what each step has taken on rank 0: of the bare loop, and of ours."""
    with tempfile.TemporaryDirectory(prefix="bench-training-") as name:
        out = Path(name, "spent.json")
        hook = f"train.hooks=[{{_target_:tests.bench.training.BareLoop,layout:{layout},steps:{steps},out:'{out}'}}]"
        words = [*WORDS, LAYOUTS[layout], f"train.steps={steps}", hook, "submit"]
        run([sys.executable, "-m", "slurmtrain", *words], Path(name))
        bare, ours = ([Spent(*spent) for spent in each] for each in json.loads(out.read_text()))
        return bare, ours


class BareLoop(TrainingHook):
    """Does a step of a bare loop before each step of the training, and measures both."""

    def __init__(self, layout: str, steps: int, out: str):
        self._layout, self._steps, self._out = layout, steps, Path(out)
        self._bare: list[Spent] = []
        self._ours: list[Spent] = []
        self._began = now()

    def start(self, state: TrainingState) -> None:
        rank = state.ranks.rank
        self._loop = bare_loop(self._layout, self._steps, rank)
        self._writes = rank == 0

    def before_step(self, state: TrainingState) -> None:
        if state.step:
            self._ours.append(since(self._began))
        began = now()
        next(self._loop)
        self._bare.append(since(began))
        self._began = now()

    def close(self, state: TrainingState) -> None:
        if self._writes:  # the last step of ours is left out: evaluation and the last save belong to no step
            self._out.write_text(json.dumps([self._bare[:-1], self._ours]))


def bare_loop(layout: str, steps: int, rank: int) -> Iterator[None]:
    """The loop that everybody writes first, a step at a time."""
    torch.manual_seed(0)
    model = bare_model(layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    text = StdlibText(SEQUENCE, max_bytes=TEXT_BYTES)
    order = torch.randperm(len(text.train), generator=torch.Generator().manual_seed(0)).numpy()
    share = BATCH // RANKS
    first = [(step * RANKS + rank) * share for step in range(steps)]
    batches = [text.train.get_batch(order[at : at + share]) for at in first]  # in memory
    for batch in batches:
        logits = model(batch["inputs"])
        F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield


def bare_model(layout: str) -> nn.Module:
    """As one writes it by hand."""
    model = Decoder(**MODEL, tie_embeddings=False)
    if layout == "DDP":
        return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    for block in model.blocks.values():
        fully_shard(block)
    fully_shard(model)
    return model
