"""Raw inputs for `prepare` in every format, small tokenizers, and what must come out, computed the plain way."""

from __future__ import annotations

import gzip
import json
import os
import random
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import zstandard
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from slurmtrain.data.format.manifest import read_manifest, shard_file

WORDS = ("of", "the", "naïve", "δέλτα", "🙂", "gradient", "<|endoftext|>", "\n", "checkpoint", "  ")


def texts(count: int, seed: int) -> list[str]:
    source = random.Random(seed)
    return [" ".join(source.choices(WORDS, k=source.randint(1, 40))) for _ in range(count)]


def json_lines(documents: Sequence[str]) -> bytes:
    return "".join(json.dumps({"text": text, "id": number}) + "\n" for number, text in enumerate(documents)).encode()


def write_all_formats(folder: Path) -> list[str]:
    """Inputs of every format in a folder; their documents, in the order of the paths."""
    folder.mkdir()
    documents = {name: texts(60, seed) for seed, name in enumerate(("a", "b", "c", "d", "e", "f"))}
    (folder / "a.jsonl").write_bytes(json_lines(documents["a"]))
    # Several frames in one file, as parallel packers write them; and one that is to be skipped.
    (folder / "b.jsonl.gz").write_bytes(b"".join(gzip.compress(json_lines(each)) for each in halves(documents["b"])))
    frames = [zstandard.compress(json_lines(each)) for each in halves(documents["c"])]
    (folder / "c.jsonl.zst").write_bytes(b"\x50\x2a\x4d\x18\x04\0\0\0skip".join(frames))
    table = pyarrow.table({"id": list(range(60)), "text": documents["d"]})
    pyarrow.parquet.write_table(table, folder / "d.parquet", row_group_size=7)
    (folder / "e").mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"text": documents["e"]}), folder / "e" / "e.parquet", row_group_size=4)
    (folder / "f").mkdir()
    for number, text in enumerate(documents["f"]):
        path = folder / "f" / f"{number:02d}.txt"
        path.write_text(text, newline="")
        if number % 3 == 0:
            path.with_suffix(".txt.gz").write_bytes(gzip.compress(path.read_bytes()))
            path.unlink()
    return [text for name in documents for text in documents[name]]


def halves(documents: Sequence[str]) -> list[Sequence[str]]:
    return [documents[: len(documents) // 2], documents[len(documents) // 2 :]]


@cache
def _trained() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([text.replace("<|endoftext|>", "") for text in texts(200, 99)], trainer)
    tokenizer.enable_truncation(5)  # as many a file has it
    tokenizer.enable_padding(length=50)
    return str(tokenizer.to_str())


def write_tokenizer(path: Path) -> Path:
    path.write_text(_trained())
    return path


def documents_of(output: Path, split: str = "train") -> Iterator[list[int]]:
    """The ids of each document of a prepared data set, read the plain way."""
    manifest = read_manifest(output)
    for shard in manifest.splits[split].shards:
        files: dict[str, Any] = {
            kind: np.fromfile(shard_file(output, split, shard.name, kind), dtype)
            for kind, dtype in (("tokens", manifest.tokenizer.dtype), ("ends", "<u8"))
        }
        begin = 0
        for end in files["ends"].tolist():
            yield files["tokens"][begin:end].tolist()
            begin = end
        assert begin == len(files["tokens"]) == shard.tokens


# Loaded by every Python at its start: a disk that hangs for prepare's workers when so many units are done, while a file is
# there.
HANGING_DISK = """
import os, sys, time
fsync, gate = os.fsync, {gate!r}

def units_done():
    try:
        return sum(name.isdecimal() for name in os.listdir({units!r}))
    except FileNotFoundError:
        return 0

def fsync_or_hang(descriptor):
    while os.path.exists(gate) and units_done() >= int(open(gate).read() or 0):
        time.sleep(0.005)
    fsync(descriptor)

if any("spawn_main" in word for word in sys.orig_argv):
    os.fsync = fsync_or_hang
"""


def hanging_disk(folder: Path, output: Path, after: int) -> dict[str, str]:
    """Variables that let `prepare` hang when so many units of `output` are done, while the file `folder`/gate is there."""
    folder.mkdir(exist_ok=True)
    (folder / "gate").write_text(str(after))
    units = str(output)
    (folder / "sitecustomize.py").write_text(HANGING_DISK.format(gate=str(folder / "gate"), units=units))
    return {"PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}


def content(output: Path) -> dict[str, bytes]:
    """All files of a data set, what `prepare` keeps for itself aside."""
    paths = [path for path in output.rglob("*") if path.is_file() and ".prepare" not in path.parts]
    return {str(path.relative_to(output)): path.read_bytes() for path in paths}
