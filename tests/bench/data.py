"""Does training at the pace of a GPU wait for data?

Wanted: 8 ranks that take a micro batch of 8 x 4096 tokens every 0.1 s, each with two workers, wait for hardly any of that
time, masked and packed.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slurmtrain.data.format.manifest import Manifest, Split, TokenizerFacts
from slurmtrain.data.loading.loader import BatchLoader
from slurmtrain.data.sources.mixture import Mixture
from slurmtrain.data.sources.prepared import PreparedText
from tests.bench.side_by_side import Row, in_turn, options, show
from tests.support.prepared import write_shard

BATCH, SEQUENCE, VOCABULARY = 8, 4096, 50_257
TOKENIZER = TokenizerFacts(kind="bytes", file=None, sha256=None, vocab_size=VOCABULARY, bos=None, eos=None)


def main(words: list[str]) -> None:
    chosen = options(__doc__, words, rounds=5, steps=100, ranks=8, step_s=0.1, tokens=1 << 26)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        tokens = Path(name, "tokens")
        write_tokens(tokens, chosen.tokens)
        rows = pace(tokens, chosen.rounds, ranks=chosen.ranks, steps=chosen.steps, step_s=chosen.step_s)
        show(f"{chosen.ranks} ranks, {BATCH} x {SEQUENCE} tokens every {chosen.step_s} s", rows)


def write_tokens(folder: Path, count: int) -> None:
    random = np.random.default_rng(0)
    tokens = random.integers(0, VOCABULARY, count, dtype=np.uint16)
    lengths = random.lognormal(6.2, 1.1, count // 500).astype(np.int64) + 2  # documents as long as web text's
    ends = np.unique(np.append(np.minimum(np.cumsum(lengths), count), count))
    shard = write_shard(folder, "train", "00000", tokens, np.diff(ends, prepend=0))
    Manifest(TOKENIZER, {"train": Split((shard,))}).write(folder)


def sources_of(folder: Path) -> dict[str, Any]:
    parts = {name: PreparedText(str(folder), SEQUENCE) for name in "ab"}
    return {
        "concat": PreparedText(str(folder), SEQUENCE).train,
        "best fit, masked": PreparedText(str(folder), SEQUENCE, packing="best_fit").train,
        "mixture of two": Mixture(parts, {"a": 0.7, "b": 0.3}).train,
    }


def pace(folder: Path, rounds: int, *, ranks: int, steps: int, step_s: float) -> list[Row]:
    """The share of the time for which all ranks together wait for data, after the workers have started."""
    made = {name: partial(waited, source, ranks, steps, step_s) for name, source in sources_of(folder).items()}
    found = in_turn(made, rounds, warm_up=0)
    return [Row(f"{name}: waiting for data", values, "%", "<= 1") for name, values in found.items()]


def waited(source: Any, ranks: int, steps: int, step_s: float) -> float:
    """Return the mean share of their time that ranks wait, in percent."""
    context = multiprocessing.get_context("fork")
    results, together = context.SimpleQueue(), context.Barrier(ranks)

    def rank(number: int) -> None:
        arguments: dict[str, Any] = {
            "global_batch_size": BATCH * ranks,
            "micro_batch_size": BATCH,
            "dp_size": ranks,
            "num_workers": 2,
        }
        loader = BatchLoader(source, seed=0, dp_rank=number, **arguments)
        next(loader)
        together.wait()
        waits, due = 0.0, time.perf_counter()
        for _ in range(steps):
            began = time.perf_counter()
            next(loader)
            waits += time.perf_counter() - began
            due += step_s
            time.sleep(max(due - time.perf_counter(), 0))
        results.put(100 * waits / (steps * step_s))
        loader.close()

    processes = [context.Process(target=rank, args=(number,)) for number in range(ranks)]
    for process in processes:
        process.start()
    found = [results.get() for _ in processes]
    for process in processes:
        process.join()
    return float(statistics.mean(found))
