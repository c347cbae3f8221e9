"""`prepare` against a bare loop (read lines, json.loads, encode_batch_fast of as much text at a time), side by side.

    python -m tests.bench prepare [--mb 60] [--rounds 3] [--vocabulary 32000]

The text is the standard library's, the tokenizer a BPE trained on it. All take turns. Figures are medians of MB/s of input, by
wall clock and by processor time; `prepare` digests and writes besides, and the start of its processes is included.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

BARE = """
import json, os, resource, sys, time
os.environ["TOKENIZERS_PARALLELISM"] = "false"
from tokenizers import Tokenizer
path, tokenizer, size = sys.argv[1], Tokenizer.from_file(sys.argv[2]), int(sys.argv[3])
began, batch, length, tokens = time.perf_counter(), [], 0, 0
for line in open(path, "rb"):
    batch.append(json.loads(line)["text"])
    length += len(batch[-1])
    if length >= size:
        tokens += sum(len(one.ids) for one in tokenizer.encode_batch_fast(batch, add_special_tokens=False))
        batch, length = [], 0
tokens += sum(len(one.ids) for one in tokenizer.encode_batch_fast(batch, add_special_tokens=False))
used = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps([time.perf_counter() - began, used.ru_utime + used.ru_stime, tokens]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench prepare")
    parser.add_argument("--mb", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vocabulary", type=int, default=32000)
    options = parser.parse_args([word for word in sys.argv[1:] if word != "prepare"])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text, tokenizer = folder / "text.jsonl", folder / "tokenizer.json"
        _write_text(text, options.mb)
        _train(tokenizer, options.vocabulary)
        size = text.stat().st_size / 1e6
        ways: dict[str, list[tuple[float, float, int]]] = {
            "bare loop": [],
            "prepare, 1 process": [],
            "prepare, 2 processes": [],
        }
        for turn in range(options.rounds):
            ways["bare loop"].append(_bare(text, tokenizer))
            for workers in (1, 2):
                ways[f"prepare, {workers} process{'es' if workers > 1 else ''}"].append(
                    _prepare(text, tokenizer, folder / f"out-{turn}-{workers}", workers)
                )
        _write_text(folder / "tiny.jsonl", 0.001)
        start = _prepare(folder / "tiny.jsonl", tokenizer, folder / "out-tiny", 1)
        tokens = {found[2] for runs in ways.values() for found in runs}
        assert len(tokens) == 1, f"not the same tokens: {tokens}"
        print(f"{size:.0f} MB of JSON lines, {tokens.pop() / 1e6:.1f} M tokens; median of {options.rounds}")
        bare = [statistics.median(size / run[place] for run in ways["bare loop"]) for place in (0, 1)]
        for way, runs in ways.items():
            wall, cpu = (statistics.median(size / run[place] for run in runs) for place in (0, 1))
            print(
                f"  {way:<21} {wall:6.2f} MB/s ({wall / bare[0]:.2f})   "
                f"{cpu:6.2f} MB per second of processor time ({cpu / bare[1]:.2f})"
            )
        print(f"  of these the start of `prepare` is {start[0]:.2f} s, {start[1]:.2f} s of processor time")


def _write_text(path: Path, mb: float) -> None:
    left = mb * 1e6
    with path.open("w") as file:
        for document in itertools.cycle(list(_documents())):
            line = json.dumps({"text": document, "url": "https://example.org"}) + "\n"
            file.write(line)
            left -= len(line)
            if left <= 0:
                return


def _documents() -> Iterator[str]:
    """Files of the standard library, in pieces of about 4,000 characters."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = path.read_text(errors="ignore")
        yield from (text[start : start + 4000] for start in range(0, len(text), 4000))


def _train(path: Path, vocabulary: int) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=["<|endoftext|>"], show_progress=False)
    tokenizer.train_from_iterator(_documents(), trainer)
    tokenizer.save(str(path))


def _bare(text: Path, tokenizer: Path) -> tuple[float, float, int]:
    """Seconds, seconds of processor time, tokens."""
    from slurmtrain.data.prepare.unit import BATCH

    words = [sys.executable, "-c", BARE, str(text), str(tokenizer), str(BATCH)]
    seconds, used, tokens = json.loads(subprocess.run(words, capture_output=True, check=True, text=True).stdout)
    return seconds, used, tokens


def _prepare(text: Path, tokenizer: Path, output: Path, workers: int) -> tuple[float, float, int]:
    words = [f"prepare.inputs=[{text}]", f"prepare.output={output}", f"prepare.tokenizer={tokenizer}"]
    words += [f"prepare.workers={workers}", f"prepare.unit_mb={text.stat().st_size / 2e6}", "prepare.eos=none"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "slurmtrain", "prepare", *words], check=True, stdout=subprocess.DEVNULL, env=os.environ
    )
    seconds = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    tokens = json.loads((output / "manifest.json").read_text())["splits"]["train"]["tokens"]
    return seconds, used, tokens


if __name__ == "__main__":
    main()
