"""Loading prepared tokens against slicing a memmap by hand; first batch far into 10^11 tokens. Wanted: half of its speed.

Wanted: with one worker at least half as fast as slicing by hand, for the same windows and the same int64 tensors, by processor
time, of which a node has little to spare (less where rows are masked or packed, which by hand they are not); the first batch
after a resume at 10^11 tokens within 50 ms.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from slurmtrain.data import BatchLoader, Mixture, PreparedText
from slurmtrain.data.format.manifest import KINDS, Manifest, Shard, Split, TokenizerFacts, shard_file
from slurmtrain.data.format.reading import _opened
from tests.bench.side_by_side import Row, in_turn, options, ratio, show
from tests.support.prepared import write_shard

BATCH, SEQUENCE, VOCABULARY = 8, 2048, 50_257
WANTED = {"concat": ">= 0.5", "concat, masked": ">= 0.3", "best fit": ">= 0.2", "mixture of two": ">= 0.2"}
TOKENIZER = TokenizerFacts(kind="bytes", file=None, sha256=None, vocab_size=VOCABULARY, bos=None, eos=None)


def main(words: list[str]) -> None:
    only = ("batches", "seek")
    chosen = options(__doc__, words, rounds=7, batches=1000, tokens=1 << 26, only=only)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        tokens, sparse = Path(name, "tokens"), Path(name, "sparse")
        if "batches" in chosen.only:
            write_tokens(tokens, chosen.tokens)
            show(f"batches of {BATCH} x {SEQUENCE}", batch_rows(tokens, chosen.rounds, chosen.batches))
        if "seek" in chosen.only:
            took = seek(sparse, chosen.rounds)
            show("10^11 tokens", [Row("opened, and the first batch after a resume", took, "ms", "<= 50")])


def document_lengths(random: np.random.Generator, count: int) -> NDArray[np.int64]:
    """As long as web text's."""
    return random.lognormal(6.2, 1.1, count).astype(np.int64) + 2


def write_tokens(folder: Path, count: int) -> None:
    (folder / "train").mkdir(parents=True)
    random = np.random.default_rng(0)
    tokens = random.integers(0, VOCABULARY, count, dtype=np.uint16)
    ends = np.unique(np.append(np.minimum(np.cumsum(document_lengths(random, count // 500)), count), count))
    shard = write_shard(folder, "train", "00000", tokens, np.diff(ends, prepend=0))
    Manifest("uint16", TOKENIZER, {"train": Split((shard,))}, ()).write(folder)


class ByHand:
    """Windows of a memmap, sliced right into the batch: the fastest by hand."""

    def __init__(self, folder: Path):
        self._tokens = np.memmap(shard_file(folder, "train", "00000", "tokens"), dtype="<u2", mode="r")

    def get_batch(self, indices: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        inputs = np.empty((len(indices), SEQUENCE), dtype=np.int64)
        targets = np.empty_like(inputs)
        for row, index in enumerate(indices.tolist()):
            inputs[row] = self._tokens[index * SEQUENCE : (index + 1) * SEQUENCE]
            targets[row] = self._tokens[index * SEQUENCE + 1 : (index + 1) * SEQUENCE + 1]
        return {"inputs": torch.from_numpy(inputs), "targets": torch.from_numpy(targets)}

    def batches(self) -> Iterator[Any]:
        """In an order that is drawn and kept beforehand, as one does for few samples."""
        order = np.random.default_rng(0).permutation((len(self._tokens) - 1) // SEQUENCE)
        for first in range(0, len(order) // BATCH * BATCH, BATCH):
            yield self.get_batch(order[first : first + BATCH])


def sources_of(folder: Path) -> dict[str, Any]:
    parts = {name: PreparedText(str(folder), SEQUENCE) for name in "ab"}
    return {
        "concat": PreparedText(str(folder), SEQUENCE).train,
        "concat, masked": PreparedText(str(folder), SEQUENCE, document_mask=True).train,
        "best fit": PreparedText(str(folder), SEQUENCE, packing="best_fit").train,
        "mixture of two": Mixture(parts, {"a": 0.7, "b": 0.3}).train,
    }


def loaded(source: Any, workers: int, count: int) -> Iterator[Any]:
    steps = BatchLoader(source, seed=0, global_batch_size=BATCH, micro_batch_size=BATCH, num_workers=workers)
    try:
        for step in islice(steps, count):
            yield step.micro_batches[0]
    finally:
        steps.close()


def speed(made: Callable[[], Iterator[Any]], count: int) -> tuple[float, float]:
    """Return million numbers a second, by the clock and of processor time. In the first batch workers start: it is left out."""
    several = made()
    next(several)
    numbers, wall, cpu = 0, time.perf_counter(), cpu_seconds()
    for batch in islice(several, count - 1):
        numbers += batch["inputs"].numel()
    found = numbers / (time.perf_counter() - wall) / 1e6, numbers / (cpu_seconds() - cpu) / 1e6
    several.close()  # type: ignore[attr-defined]
    return found


def cpu_seconds() -> float:
    """Processor time of this process and its workers, which tells more than the clock where others work, too."""
    stats = [Path(f"/proc/{worker.pid}/stat").read_text() for worker in multiprocessing.active_children()]
    ticks = sum(int(field) for stat in stats for field in stat.rpartition(")")[2].split()[11:13])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def batch_rows(folder: Path, rounds: int, count: int) -> list[Row]:
    """The same windows and the same tensors."""
    by_hand, sources = ByHand(folder), sources_of(folder)
    indices = np.array([3, 5, 0])
    for name, rows in sources["concat"].get_batch(indices).items():
        assert torch.equal(rows, by_hand.get_batch(indices)[name])
    made: dict[str, Callable[[], Iterator[Any]]] = {
        f"{name}, one worker": partial(loaded, source, 1, count) for name, source in sources.items()
    }
    made |= {"by hand": by_hand.batches, "concat, in process": partial(loaded, sources["concat"], 0, count)}
    found = in_turn({name: partial(speed, each, count) for name, each in made.items()}, rounds)
    wall, cpu = ({name: [both[i] for both in of_name] for name, of_name in found.items()} for i in (0, 1))
    table = [Row(name, values, "M tokens/s") for name, values in wall.items()]
    for name in sorted(made.keys() - {"by hand"}):
        wanted = WANTED.get(name.removesuffix(", one worker"), "") if name.endswith("worker") else ""
        table.append(ratio(f"{name} / by hand, processor time", cpu[name], cpu["by hand"], wanted))
    return table


def seek(folder: Path, rounds: int) -> list[float]:
    """Open 10^11 tokens in 100 shards and have the first batch of a run that goes on somewhere in its first epoch."""
    (folder / "train").mkdir(parents=True)
    shards = [Shard(f"{n:05d}", 1, 10**9, 10**9, dict.fromkeys(KINDS, "")) for n in range(100)]
    for shard in shards:
        for kind, size in shard.file_sizes("uint16").items():
            shard_file(folder, "train", shard.name, kind).touch()
            os.truncate(shard_file(folder, "train", shard.name, kind), size)
    Manifest("uint16", TOKENIZER, {"train": Split(tuple(shards))}, ()).write(folder)

    def first_batch() -> float:
        _opened.cache_clear()
        began = time.perf_counter()
        source = PreparedText(str(folder), SEQUENCE).train
        done = BATCH * 5_600_007
        next(BatchLoader(source, seed=0, global_batch_size=BATCH, micro_batch_size=BATCH, samples_consumed=done))
        return 1000 * (time.perf_counter() - began)

    # As timeit does: a full collection passes over all objects that torch has made, and belongs to whoever is next.
    gc.disable()
    try:
        return in_turn({"": first_batch}, rounds)[""]
    finally:
        gc.enable()
