"""Loading prepared tokens: against slicing a memmap by hand, against torchdata and mosaicml-streaming; far into 10^11 tokens.

python -m tests.bench data [--rounds 7] [--only batches|mechanisms|loaders|seek|packing|wait]

Wanted: with one worker at least half as fast as slicing by hand by the clock, for the same windows and the same int64 tensors,
and by processor time, of which a node has little to spare, the shares in WANTED; each row says where it falls short (by hand,
nothing is masked nor packed). And ahead of torchdata's StatefulDataLoader and of mosaicml-streaming over the same tokens (pip
install torchdata mosaicml-streaming; each is left out when it is not there); the first batch after a resume at 10^11 tokens
within 50 ms; best-fit packing that leaves less than 1 % free; and less than 1 % of a step of the quick start spent waiting for
data. And each mechanism of the way from a worker to its rank (shared memory, messages of several batches, compact rows) has to
make some kind of data at least 10 % faster by processor time, or it has to go. All in turn, medians over rounds, since machines
are noisy.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib.util
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from slurmtrain.data import BatchLoader, Mixture, PreparedText
from slurmtrain.data.format.manifest import KINDS, Manifest, Shard, Split, TokenizerFacts, shard_file
from slurmtrain.data.format.packing import best_fit_rows
from slurmtrain.data.format.reading import _opened
from slurmtrain.data.loading import batches, loader, workers
from slurmtrain.data.loading.batches import WholeBatch
from slurmtrain.data.loading.samples import fetch_batches
from slurmtrain.data.loading.shared_memory import Message
from tests.support.prepared import write_shard

TOKENS, BATCH, SEQUENCE, BATCHES = 1 << 26, 8, 2048, 1000
VOCABULARY = 50_257
# Ratio to slicing by hand, by processor time of the rank and its worker together.
WANTED = {
    "concat, one worker": 0.5,
    "concat, masked, one worker": 0.3,
    "best fit, one worker": 0.2,
    "mixture of two, one worker": 0.2,
}
TOKENIZER = TokenizerFacts(kind="bytes", file=None, sha256=None, vocab_size=VOCABULARY, bos=None, eos=None)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench data")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", choices=("batches", "mechanisms", "loaders", "seek", "packing", "wait"))
    options = parser.parse_args([word for word in sys.argv[1:] if word != "data"])
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        parts: dict[str, Callable[[], None]] = {
            "batches": lambda: compare_batches(Path(folder, "tokens"), options.rounds),
            "mechanisms": lambda: compare_mechanisms(Path(folder, "tokens"), options.rounds),
            "loaders": lambda: compare_loaders(Path(folder, "tokens"), options.rounds),
            "seek": lambda: measure_seek(Path(folder, "sparse"), options.rounds),
            "packing": measure_packing,
            "wait": lambda: measure_wait(Path(folder)),
        }
        if options.only in (None, "batches", "mechanisms", "loaders"):
            write_tokens(Path(folder, "tokens"))
        for name, part in parts.items():
            if options.only in (None, name):
                part()


def write_tokens(folder: Path) -> None:
    """One shard of documents as long as web text's."""
    (folder / "train").mkdir(parents=True)
    random = np.random.default_rng(0)
    tokens = random.integers(0, VOCABULARY, TOKENS, dtype=np.uint16)
    ends = np.unique(np.append(np.minimum(np.cumsum(document_lengths(random, TOKENS // 500)), TOKENS), TOKENS))
    shard = write_shard(folder, "train", "00000", tokens, np.diff(ends, prepend=0))
    Manifest("uint16", TOKENIZER, {"train": Split((shard,))}, ()).write(folder)


def document_lengths(random: np.random.Generator, count: int) -> NDArray[np.int64]:
    return random.lognormal(6.2, 1.1, count).astype(np.int64) + 2


class Rate(NamedTuple):
    """Million tokens a second: by the clock, and of processor time."""

    wall: float
    cpu: float


class ByHand(Dataset[dict[str, torch.Tensor]]):
    """Windows of a memmap, as one writes it."""

    def __init__(self, folder: Path):
        self._tokens = np.memmap(shard_file(folder, "train", "00000", "tokens"), dtype="<u2", mode="r")

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // SEQUENCE

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = torch.from_numpy(self._tokens[index * SEQUENCE : (index + 1) * SEQUENCE + 1].astype(np.int64))
        return {"inputs": window[:-1], "targets": window[1:]}

    def get_batch(self, indices: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """The fastest by hand: slices right into the batch."""
        inputs = np.empty((len(indices), SEQUENCE), dtype=np.int64)
        targets = np.empty_like(inputs)
        for row, index in enumerate(indices.tolist()):
            inputs[row] = self._tokens[index * SEQUENCE : (index + 1) * SEQUENCE]
            targets[row] = self._tokens[index * SEQUENCE + 1 : (index + 1) * SEQUENCE + 1]
        return {"inputs": torch.from_numpy(inputs), "targets": torch.from_numpy(targets)}


def batches_by_hand(by_hand: ByHand, turn: int) -> Iterator[Any]:
    """In an order that is drawn and kept beforehand, as one does for few samples."""
    order = np.random.default_rng(turn).permutation(len(by_hand))
    for first in range(0, len(order) // BATCH * BATCH, BATCH):
        yield by_hand.get_batch(order[first : first + BATCH])


def sources_of(folder: Path) -> dict[str, Any]:
    return {
        "concat": PreparedText(str(folder), SEQUENCE).train,
        "concat, masked": PreparedText(str(folder), SEQUENCE, document_mask=True).train,
        "best fit": PreparedText(str(folder), SEQUENCE, packing="best_fit").train,
        "mixture of two": Mixture(
            {name: PreparedText(str(folder), SEQUENCE) for name in "ab"}, {"a": 0.7, "b": 0.3}
        ).train,
    }


def compare_batches(folder: Path, rounds: int) -> None:
    """The same windows and the same tensors."""
    by_hand, sources = ByHand(folder), sources_of(folder)
    last = by_hand.get_batch(np.array([3, 5, 0]))
    for name, rows in sources["concat"].get_batch(np.array([3, 5, 0])).items():
        assert torch.equal(rows, last[name])

    def by_workers(source: Any, workers: int) -> Callable[[int], Iterator[Any]]:
        return lambda turn: loader_batches(source, turn, workers=workers)

    runs: dict[str, Callable[[int], Iterator[Any]]] = {"by hand": lambda turn: batches_by_hand(by_hand, turn)}
    for count, where in ((0, "in process"), (1, "one worker")):
        runs |= {f"{name}, {where}": by_workers(source, count) for name, source in sources.items()}
    print(f"batches of {BATCH} x {SEQUENCE} by our loader, against the memmap sliced by hand in one process")
    report(in_turn(runs, rounds), "by hand")


class Images:
    """Images as float arrays, some of them again and again, by a user's own `get_batch`."""

    def __init__(self, side: int):
        self._pixels = np.random.default_rng(0).random((64, 3, side, side), dtype=np.float32)

    def __len__(self) -> int:
        return 1 << 20

    def get_batch(self, indices: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        return {"inputs": torch.from_numpy(self._pixels[indices % 64]), "targets": torch.from_numpy(indices)}


def expanded_by_the_worker(*arguments: Any, **options: Any) -> Iterator[WholeBatch]:
    for group in fetch_batches(*arguments, **options):
        yield from (WholeBatch(rows.batch(), rows.num_targets) for rows in group.split())


# What to replace for a loader that lacks it. Without room in shared memory, torch sends tensors its own way.
MECHANISMS: dict[str, list[tuple[Any, str, Any]]] = {
    "shared memory": [(Message, "_reserved", lambda *arguments: None), (batches, "SLOT_BYTES", -1)],
    "messages of several batches": [(workers, "MESSAGE_S", 0.0)],
    "compact rows": [(loader, "fetch_batches", expanded_by_the_worker)],
}


def batches_without(mechanism: str, source: Any, turn: int) -> Iterator[Any]:
    with contextlib.ExitStack() as replaced:
        for place, name, instead in MECHANISMS.get(mechanism, []):
            replaced.enter_context(mock.patch.object(place, name, instead))
        yield from loader_batches(source, turn, workers=1)


def compare_mechanisms(folder: Path, rounds: int) -> None:
    """One worker with and without each mechanism."""
    sources = {**sources_of(folder), **{f"images of {side} x {side}": Images(side) for side in (32, 224)}}
    gains: dict[str, list[float]] = {mechanism: [] for mechanism in MECHANISMS}
    for name, source in sources.items():
        runs = {"as it is": functools.partial(batches_without, "", source)}
        runs |= {f"no {one}": functools.partial(batches_without, one, source) for one in MECHANISMS}
        print(f"{name}: batches of {BATCH} from one worker")
        rates = in_turn(runs, rounds, BATCHES // 10 if source is sources["images of 224 x 224"] else BATCHES)
        report(rates, "as it is")
        for one, of_mechanism in gains.items():
            pairs = zip(rates["as it is"], rates[f"no {one}"], strict=True)
            of_mechanism.append(statistics.median(whole.cpu / lacking.cpu for whole, lacking in pairs))
    for one, of_mechanism in gains.items():
        short = "" if max(of_mechanism) >= 1.1 else ": SHORT"
        print(
            f"  {one}: {min(of_mechanism):.2f} to {max(of_mechanism):.2f} times as fast by processor time, wanted 1.1{short}"
        )


def compare_loaders(folder: Path, rounds: int) -> None:
    """One worker each, over the same tokens."""
    source = PreparedText(str(folder), SEQUENCE).train
    runs: dict[str, Callable[[int], Iterable[Any]]] = {"ours": lambda turn: loader_batches(source, turn, workers=1)}
    if importlib.util.find_spec("torchdata"):
        runs["torchdata"] = lambda turn: torchdata_batches(folder, turn)
    if importlib.util.find_spec("streaming"):
        write_streaming(folder)
        runs["mosaicml-streaming"] = lambda turn: streaming_batches(folder, turn)
    print(f"batches of {BATCH} x {SEQUENCE} from one worker")
    for name in {"torchdata", "mosaicml-streaming"} - set(runs):
        print(f"  {name} is not installed")
    report(in_turn(runs, rounds), "ours")


def loader_batches(dataset: Any, turn: int, *, workers: int) -> Iterator[Any]:
    steps = BatchLoader(
        dataset,
        seed=turn,
        global_batch_size=BATCH,
        micro_batch_size=BATCH,
        num_workers=workers,
    )
    try:
        for step in islice(steps, BATCHES + 1):
            yield step.micro_batches[0]
    finally:
        steps.close()


def torchdata_batches(folder: Path, turn: int) -> Iterator[Any]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    order = torch.Generator().manual_seed(turn)
    return iter(StatefulDataLoader(ByHand(folder), batch_size=BATCH, shuffle=True, num_workers=1, generator=order))


def write_streaming(folder: Path) -> None:
    from streaming import MDSWriter

    by_hand = ByHand(folder)
    with MDSWriter(out=str(folder / "mds"), columns={"tokens": f"ndarray:uint16:{SEQUENCE + 1}"}) as writer:
        for index in range(len(by_hand)):
            writer.write({"tokens": by_hand._tokens[index * SEQUENCE : (index + 1) * SEQUENCE + 1]})


def streaming_batches(folder: Path, turn: int) -> Iterator[Any]:
    from streaming import StreamingDataLoader, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    class Windows(StreamingDataset):  # type: ignore[misc]  # it has no types
        def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
            window = torch.from_numpy(super().__getitem__(at)["tokens"].astype(np.int64))
            return {"inputs": window[:-1], "targets": window[1:]}

    clean_stale_shared_memory()
    dataset = Windows(local=str(folder / "mds"), shuffle=True, shuffle_seed=turn, batch_size=BATCH)
    return iter(StreamingDataLoader(dataset, batch_size=BATCH, num_workers=1))


def in_turn(
    runs: Mapping[str, Callable[[int], Iterable[Any]]], rounds: int, count: int = BATCHES
) -> dict[str, list[Rate]]:
    """Rates of each, round by round; the first batch, for which workers start, does not count."""
    rates: dict[str, list[Rate]] = {name: [] for name in runs}
    for turn in range(rounds + 1):
        for name, run in runs.items():
            made = iter(run(turn))
            next(made)
            tokens, wall, cpu = 0, time.perf_counter(), cpu_seconds()
            for batch in islice(made, count - 1):
                tokens += batch["inputs"].numel()
            rates[name].append(Rate(tokens / (time.perf_counter() - wall) / 1e6, tokens / (cpu_seconds() - cpu) / 1e6))
            del made
    return {name: of_run[1:] for name, of_run in rates.items()}  # the first round is a warm-up


def cpu_seconds() -> float:
    """Processor time of this process and its workers, which tells more than the clock where others work, too."""
    workers = [Path(f"/proc/{worker.pid}/stat").read_text() for worker in multiprocessing.active_children()]
    ticks = sum(int(field) for stat in workers for field in stat.rpartition(")")[2].split()[11:13])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def report(rates: dict[str, list[Rate]], base: str) -> None:
    for name, of_run in rates.items():
        ratios = [
            [getattr(ours, kind) / getattr(theirs, kind) for ours, theirs in zip(of_run, rates[base], strict=True)]
            for kind in Rate._fields
        ]
        wanted = WANTED.get(name)
        short = wanted is not None and statistics.median(ratios[1]) < wanted
        print(
            f"  {name:28} {statistics.median(rate.wall for rate in of_run):6.1f} million tokens/s, of processor time "
            f"{statistics.median(rate.cpu for rate in of_run):6.1f}; ratio to {base}: {spread(ratios[0])}; by processor time: "
            f"{spread(ratios[1])}{f', wanted {wanted}' if wanted else ''}{': SHORT' if short else ''}",
            flush=True,
        )


def spread(ratios: list[float]) -> str:
    return f"median {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def measure_seek(folder: Path, rounds: int) -> None:
    """Open 10^11 tokens in 100 shards and have the first batch of a run that goes on somewhere in its first epoch."""
    (folder / "train").mkdir(parents=True)
    shards = [Shard(f"{n:05d}", 1, 10**9, 10**9, dict.fromkeys(KINDS, "")) for n in range(100)]
    for shard in shards:
        for kind, size in shard.file_sizes("uint16").items():
            shard_file(folder, "train", shard.name, kind).touch()
            os.truncate(shard_file(folder, "train", shard.name, kind), size)
    Manifest("uint16", TOKENIZER, {"train": Split(tuple(shards))}, ()).write(folder)
    took = []
    # As timeit does: a full collection passes over all objects that torch has made, and belongs to whoever is next.
    gc.disable()
    for turn in range(rounds + 1):
        _opened.cache_clear()
        began = time.perf_counter()
        source = PreparedText(str(folder), SEQUENCE)
        opened = time.perf_counter()
        consumed = (turn + 1) * BATCH * 700_001
        steps = BatchLoader(
            source.train, seed=0, global_batch_size=BATCH, micro_batch_size=BATCH, samples_consumed=consumed
        )
        next(steps)
        took.append((opened - began, time.perf_counter() - opened))
    gc.enable()
    opening, batch = (1000 * statistics.median(times) for times in zip(*took[1:], strict=True))
    worst = 1000 * max(sum(times) for times in took[1:])
    print(
        f"10^11 tokens: opened in {opening:.1f} ms, first batch after a resume {batch:.1f} ms; together at most {worst:.1f}"
    )


def measure_packing() -> None:
    lengths = document_lengths(np.random.default_rng(0), 2_000_000)
    for seq_len in (2048, 8192):
        began = time.perf_counter()
        pieces, counts = best_fit_rows(np.cumsum(lengths).astype(np.uint64), 0, seq_len)
        took = time.perf_counter() - began
        free = 1 - pieces["pairs"].sum(dtype=np.int64) / (len(counts) * seq_len)
        print(
            f"best fit into {seq_len}: {len(lengths) / took / 1e6:.2f} million documents/s, {100 * free:.4f} % left free"
        )


def measure_wait(folder: Path) -> None:
    """The share of the quick start's steps that is spent waiting for data, by its own metrics."""
    words = [
        "cluster=local",
        f"job.runs_dir={folder / 'runs'}",
        "train.steps=60",
        "train.log_every=5",
        "train.eval_every=0",
    ]
    subprocess.run([sys.executable, "-m", "slurmtrain", "train", *words], check=True, capture_output=True, cwd=folder)
    lines = next((folder / "runs").glob("*/*/metrics.jsonl")).read_text().splitlines()
    steps = [record for record in map(json.loads, lines) if "data_wait_s" in record]
    shares = [100 * step["data_wait_s"] / step["step_time_s"] for step in steps[1:]]
    print(
        f"quick start: {statistics.median(shares):.2f} % of a step waits for data ({min(shares):.2f} to {max(shares):.2f})"
    )


if __name__ == "__main__":
    main()
