"""Text as bytes: every byte of every file is one token, and a sample is a window of `seq_len` of them.

There are two sources, neither of which downloads anything: the sources of Python's own standard library, which every
machine with Python has, and a person's own files. Both are held in memory; corpora beyond a few gigabytes need another
kind of data set.
"""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterable, Sequence
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


class ByteText:
    """Files joined into a training text and a validation text of whole held-out files.

    A file is held out by the digest of its name, so the same files are held out everywhere and always, and validation
    text is not merely the end of what was trained on. Only a single file is split within: its end is held out.

    Args:
        files: (name, bytes) of each file. The name decides the split and must not depend on the machine.
        seq_len: bytes per sample.
        valid_fraction: at most this share of the bytes is held out (more only if every file is larger than that).
        source: what the files are, for messages and `description`.

    Attributes:
        train, valid: the two data sets.
        vocab_size: 256.
        fingerprint: sha256 over seq_len, both sizes and all bytes. Equal fingerprints mean that sample i is the same.
        description: one line for a person.

    Raises:
        ConfigError: a value out of range, or not enough text.
    """

    vocab_size = 256

    def __init__(self, files: Sequence[tuple[str, bytes]], *, seq_len: int, valid_fraction: float, source: str):
        _check_at_least_one("seq_len", seq_len)
        if not 0.0 < valid_fraction < 1.0:
            raise ConfigError(
                f"data.valid_fraction is {valid_fraction}", hint="write a share between 0 and 1, e.g. 0.05"
            )
        files = sorted((name, content) for name, content in files if content)
        if sum(len(content) for _, content in files) < 2:
            raise ConfigError(f"{source} hold no text to train on", hint="name files that are not empty")
        train_files, valid_files = _split(files, valid_fraction)
        train, valid = _join(train_files), _join(valid_files)
        self.train, self.valid = ByteWindows(train, seq_len), ByteWindows(valid, seq_len)
        self.unigram_entropy = _cross_entropy(train[1:], valid[1:])
        self.fingerprint = _fingerprint(seq_len, train, valid)
        held_out = f"{len(valid_files)} held out" if len(files) > 1 else "its end held out"
        self.description = (
            f"{source}: {len(files)} files ({held_out}), {(len(train) + len(valid)) / 1e6:.1f} MB, "
            f"{len(self.train)} + {len(self.valid)} samples of {seq_len} bytes"
        )


class StdlibText(ByteText):
    """The sources of Python's standard library: real text of about 10 MB that every machine already has.

    Args:
        seq_len: bytes per sample.
        max_bytes: read no more than this; the files are taken in the order of their paths and the last one is cut.
        valid_fraction: share of the bytes held out for validation.

    Raises:
        ConfigError: this Python has no readable library sources.
    """

    def __init__(self, seq_len: int, max_bytes: int = 16_000_000, valid_fraction: float = 0.05):
        _check_at_least_one("max_bytes", max_bytes)
        library = Path(sysconfig.get_path("stdlib"))
        names = _library_files(library)
        if not names:
            raise ConfigError(
                f"the standard library in {library} has no .py files",
                hint="use data=files with own text, or a Python that was not stripped of its sources",
            )
        files = _read(((name, library / name) for name in names), max_bytes)
        super().__init__(files, seq_len=seq_len, valid_fraction=valid_fraction, source="Python's standard library")


class TextFiles(ByteText):
    """A person's own text files.

    Args:
        paths: files or glob patterns, or a single one (`**` crosses folders, `~` is the home directory). All ranks must see
            them, so write absolute paths on a shared file system.
        seq_len: bytes per sample.
        max_bytes: read no more than this, in the order of the paths; None reads everything.
        valid_fraction: share of the bytes held out for validation.

    Raises:
        ConfigError: a pattern matches nothing, or a file cannot be read.
    """

    def __init__(
        self, paths: Sequence[str] | str, seq_len: int, max_bytes: int | None = None, valid_fraction: float = 0.05
    ):
        if max_bytes is not None:
            _check_at_least_one("max_bytes", max_bytes)
        paths = [paths] if isinstance(paths, str) and paths else paths
        if not paths or not all(isinstance(path, str) for path in paths):
            raise ConfigError(f"data.paths is {paths!r}, not a list of files", hint="write paths: [/data/text/*.txt]")
        found = sorted({path for pattern in paths for path in _matches(pattern)})
        # Names are relative to the common folder, so that moving the data keeps its split.
        folder = os.path.commonpath([path.parent for path in found])
        files = _read(((path.relative_to(folder).as_posix(), path) for path in found), max_bytes)
        super().__init__(files, seq_len=seq_len, valid_fraction=valid_fraction, source=f"text files in {folder}")


def _library_files(library: Path) -> list[str]:
    names = []
    for folder, subfolders, entries in os.walk(library):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_DIRECTORIES]
        names += [
            (Path(folder, entry).relative_to(library)).as_posix()
            for entry in entries
            if entry.endswith(".py") and not entry.startswith(_SKIPPED_PREFIXES)
        ]
    return sorted(names)


def _matches(pattern: str) -> list[Path]:
    paths = [Path(match).absolute() for match in glob.glob(os.path.expanduser(pattern), recursive=True)]
    files = [path for path in paths if path.is_file()]
    if not files:
        raise ConfigError(
            f"data.paths: no file matches {pattern}",
            hint=f"check the spelling, and that it exists on this node; relative paths start in {Path.cwd()}",
        )
    return files


def _read(files: Iterable[tuple[str, Path]], max_bytes: int | None) -> list[tuple[str, bytes]]:
    contents: list[tuple[str, bytes]] = []
    left = float("inf") if max_bytes is None else max_bytes
    for name, path in files:
        if left <= 0:
            break
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}", hint="check its permissions") from error
        contents.append((name, content[: int(min(left, len(content)))]))
        left -= len(content)
    return contents


def _split(
    files: Sequence[tuple[str, bytes]], valid_fraction: float
) -> tuple[Sequence[tuple[str, bytes]], Sequence[tuple[str, bytes]]]:
    total = sum(len(content) for _, content in files)
    if len(files) == 1:
        name, content = files[0]
        cut = min(max(int(total * (1 - valid_fraction)), 1), total - 1)
        return [(name, content[:cut])], [(name, content[cut:])]
    by_digest = sorted(files, key=lambda file: hashlib.sha256(file[0].encode(errors="surrogateescape")).digest())
    held_out: set[str] = set()
    left = total * valid_fraction
    for name, content in by_digest:
        if len(content) <= left:
            held_out.add(name)
            left -= len(content)
    if not held_out:
        held_out = {min(files, key=lambda file: len(file[1]))[0]}
    return [f for f in files if f[0] not in held_out], [f for f in files if f[0] in held_out]


def _join(files: Sequence[tuple[str, bytes]]) -> NDArray[np.uint8]:
    separator = bytes([SEPARATOR])
    # The separator in front makes the first byte of the first file a target as well.
    return np.frombuffer(separator + b"".join(content + separator for _, content in files), dtype=np.uint8)


def _cross_entropy(train: NDArray[np.uint8], valid: NDArray[np.uint8]) -> float:
    """Return the nats per byte of `valid` under the byte frequencies of `train`, with one added to each of the 256 counts.

    A model that ignores the context reaches this loss: a validation loss below it shows that something was learnt.
    """
    counts = np.bincount(train, minlength=256) + 1
    return float(-np.log(counts / counts.sum())[valid].mean())


def _fingerprint(seq_len: int, train: NDArray[np.uint8], valid: NDArray[np.uint8]) -> str:
    digest = hashlib.sha256(f"{seq_len} {len(train)} {len(valid)}\n".encode())
    digest.update(train.data)
    digest.update(valid.data)
    return digest.hexdigest()


def _check_at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"data.{name} is {value}, it must be at least 1", hint=f"set data.{name} to 1 or more")
