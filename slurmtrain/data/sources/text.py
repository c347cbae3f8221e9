"""Text as bytes: every byte of Python's own standard library is one token, and a sample is a window of `seq_len` of them.

Every machine with Python has this text, so nothing is downloaded. Text of one's own is prepared once, see `data.prepare`.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from slurmtrain.data.loading.batches import IGNORED_TARGET
from slurmtrain.errors import ConfigError

SEPARATOR = 0  # the byte before each file, and after the last; text has no use for it
# Folders that are left out: other people's packages, tests and their data, and files that differ between machines.
_SKIPPED_DIRECTORIES = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
_SKIPPED_PREFIXES = ("_sysconfigdata", "sitecustomize", "usercustomize")


class ByteWindows(Dataset[dict[str, Tensor]]):
    """A text cut into windows: window i predicts the bytes i*S + 1 ... (i+1)*S of it, each from those before it.

    Every byte but the first is a target exactly once; the last window is padded with targets that the loss ignores.

    Args:
        text: the text, uint8 [N].
        seq_len: S, bytes per window.

    Attributes:
        num_bytes: number of bytes that are targets.
    """

    def __init__(self, text: NDArray[np.uint8], seq_len: int):
        self.num_targets = self.num_bytes = max(len(text) - 1, 0)
        self.seq_len, self._windows = seq_len, -(-self.num_targets // seq_len)
        padded = np.zeros(self._windows * seq_len + 1, dtype=np.uint8)
        padded[: len(text)] = text[: len(padded)]
        # Two views of one array, so a batch is a plain gather of rows.
        self._inputs = padded[:-1].reshape(-1, seq_len)
        self._targets = padded[1:].reshape(-1, seq_len)
        self._last_length = self.num_targets - (self._windows - 1) * seq_len

    def __len__(self) -> int:
        return self._windows

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return one sample: `inputs` and `targets`, int64 [S]."""
        return {name: rows[0] for name, rows in self.get_batch(np.array([index])).items()}

    def get_batch(self, indices: NDArray[np.int64]) -> dict[str, Tensor]:
        """Return the samples `indices` [B] as one batch: `inputs` and `targets`, int64 [B, S]; ignored targets are -100.

        Raises:
            IndexError: an index is not in range(len(self)).
        """
        if len(indices) and (np.min(indices) < 0 or np.max(indices) >= self._windows):
            raise IndexError(f"sample {indices} of a data set of {self._windows}")
        inputs, targets = self._inputs[indices].astype(np.int64), self._targets[indices].astype(np.int64)
        targets[np.asarray(indices) == self._windows - 1, self._last_length :] = IGNORED_TARGET
        return {"inputs": torch.from_numpy(inputs), "targets": torch.from_numpy(targets)}


class StdlibText:
    """The sources of Python's standard library: real text of about 10 MB that every machine already has.

    A file is held out by the digest of its name, so the same files are held out everywhere and always, and validation
    text is not merely the end of what was trained on.

    Args:
        seq_len: bytes per sample.
        max_bytes: read no more than this; the files are taken in the order of their paths and the last one is cut.
        valid_fraction: at most this share of the bytes is held out (more only if every file is larger than that).

    Attributes:
        train, valid: the two data sets.
        vocab_size: 256.
        fingerprint: sha256 over seq_len, both sizes and all bytes. Equal fingerprints mean that sample i is the same.
        description: one line for a person.

    Raises:
        ConfigError: a value out of range, or this Python has no readable library sources.
    """

    vocab_size = 256

    def __init__(self, seq_len: int, max_bytes: int = 16_000_000, valid_fraction: float = 0.05):
        for name, value in (("seq_len", seq_len), ("max_bytes", max_bytes)):
            if value < 1:
                raise ConfigError(
                    f"data.{name} is {value}, it must be at least 1", hint=f"set data.{name} to 1 or more"
                )
        if not 0.0 < valid_fraction < 1.0:
            raise ConfigError(
                f"data.valid_fraction is {valid_fraction}", hint="write a share between 0 and 1, e.g. 0.05"
            )
        library = Path(sysconfig.get_path("stdlib"))
        files: dict[str, bytes] = {}
        for name in sorted(_names(library)):
            if content := (library / name).read_bytes()[:max_bytes]:
                files[name] = content
                max_bytes -= len(content)
        if len(files) < 2:
            raise ConfigError(
                f"the standard library in {library} has too few .py files within data.max_bytes",
                hint="set a higher one, or use a Python that was not stripped of its sources",
            )
        held_out = _held_out(files, valid_fraction)
        train = _join(content for name, content in files.items() if name not in held_out)
        valid = _join(content for name, content in files.items() if name in held_out)
        self.train, self.valid = ByteWindows(train, seq_len), ByteWindows(valid, seq_len)
        self.unigram_entropy = _cross_entropy(train[1:], valid[1:])
        self.fingerprint = hashlib.sha256(
            f"{seq_len} {len(train)} {len(valid)}\n".encode() + train.tobytes() + valid.tobytes()
        ).hexdigest()
        self.description = (
            f"Python's standard library: {len(files)} files ({len(held_out)} held out), "
            f"{(len(train) + len(valid)) / 1e6:.1f} MB, {len(self.train)} + {len(self.valid)} samples of {seq_len} bytes"
        )


def _names(library: Path) -> Iterator[str]:
    for folder, subfolders, entries in os.walk(library):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_DIRECTORIES]
        for entry in entries:
            if entry.endswith(".py") and not entry.startswith(_SKIPPED_PREFIXES):
                yield Path(folder, entry).relative_to(library).as_posix()


def _held_out(files: Mapping[str, bytes], valid_fraction: float) -> set[str]:
    held_out: set[str] = set()
    left = sum(map(len, files.values())) * valid_fraction
    for name in sorted(files, key=lambda name: hashlib.sha256(name.encode(errors="surrogateescape")).digest()):
        if len(files[name]) <= left:
            held_out.add(name)
            left -= len(files[name])
    return held_out or {min(files, key=lambda name: len(files[name]))}


def _join(contents: Iterator[bytes]) -> NDArray[np.uint8]:
    separator = bytes([SEPARATOR])
    # The separator in front makes the first byte of the first file a target as well.
    return np.frombuffer(separator + b"".join(content + separator for content in contents), dtype=np.uint8)


def _cross_entropy(train: NDArray[np.uint8], valid: NDArray[np.uint8]) -> float:
    """Return the nats per byte of `valid` under the byte frequencies of `train`, with one added to each of the 256 counts.

    A model that ignores the context reaches this loss: a validation loss below it shows that something was learnt.
    """
    counts = np.bincount(train, minlength=256) + 1
    return float(-np.log(counts / counts.sum())[valid].mean())
