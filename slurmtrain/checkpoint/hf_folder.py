"""A folder of weights as save_pretrained of transformers writes it: config.json, one or several safetensors files, an index.

Tensors may come in any order; they go straight to their places, so that a folder of any size takes no memory. The folder
has its name when all of it is on the disk, and does not exist before.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from slurmtrain.checkpoint.errors import CheckpointError
from slurmtrain.checkpoint.export import Entry, Exported, Output, SafetensorsOutput
from slurmtrain.checkpoint.safetensors_files import INDEX, SINGLE
from slurmtrain.errors import UsageError
from slurmtrain.system.files import fsync_directory, temporary_beside, write_synced

CONFIG = "config.json"
MADE_BY_EXPORTS = (CONFIG, "adapter_config.json", ".metadata")  # one of them is in each folder of an export
SHARD_BYTES = 5_000_000_000  # as transformers: "5GB"
MODE = 0o777  # the umask decides who reads it


def write_hf_folder(
    out: Path,
    entries: Sequence[Entry],
    write: Callable[[Output], None],
    config: Mapping[str, Any],
    *,
    files: Mapping[str, bytes] | None = None,
    about: Mapping[str, str] | None = None,
    shard_bytes: int = SHARD_BYTES,
    force: bool = False,
    weights_name: str = SINGLE,
    config_name: str = CONFIG,
) -> Exported:
    """Write the folder `out`, completely or not at all.

    Args:
        entries: the tensors, by the names of transformers, in the order in which they fill the files.
        write: writes all entries to the output that it is given.
        config: the contents of config.json.
        files: further files by name: those of the tokenizer, generation_config.json.
        about: entries of the header of each file of tensors.
        shard_bytes: greatest size of such a file in bytes of tensors; a larger tensor has a file of its own.
        force: replace `out` if it exists.
        weights_name, config_name: names of the file of tensors, if it is one, and of that with `config`.

    Raises:
        UsageError: `out` exists, or the folder that it is to be in does not.
        CheckpointError: it cannot be written, or `write` fails; `out` does not exist then.
    """
    check_folder(out, force=force)
    temporary = temporary_beside(out, ".tmp")
    try:
        temporary.mkdir(mode=MODE)
        with _Shards(temporary, entries, {"format": "pt", **(about or {})}, shard_bytes, weights_name) as shards:
            write(shards)
            shards.finish()
        for name, content in {**(files or {}), config_name: json_bytes(config), **shards.index()}.items():
            write_synced(temporary / name, content)
        fsync_directory(temporary)
        size = sum(path.stat().st_size for path in temporary.iterdir())
        publish_folder(temporary, out, force=force)
    except OSError as error:
        raise CheckpointError(f"{out} cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Exported(out, len(entries), size)


def check_folder(out: Path, *, force: bool) -> None:
    """Raise UsageError if no folder `out` can be made."""
    if not out.parent.is_dir():
        raise UsageError(f"there is no folder {out.parent} to make {out.name} in")
    if os.path.lexists(out) and (not force or not out.is_dir()):
        hint = "choose another name" + (", or replace it with --force" if out.is_dir() else "")
        raise UsageError(f"{out} exists", hint=hint)
    if out.is_dir() and any(out.iterdir()) and not any((out / name).is_file() for name in MADE_BY_EXPORTS):
        raise UsageError(
            f"{out} is a folder with other files, which --force does not remove", hint="name a folder inside it"
        )
    if out.name in ("", ".."):
        raise UsageError(f"{out} cannot be the name of a new folder", hint="name a folder inside it")


def split(entries: Sequence[Entry], shard_bytes: int) -> list[list[Entry]]:
    """Return the tensors of each file, in their order: as many as fit into `shard_bytes`, and at least one."""
    shards: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if shards[-1] and size + entry.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.nbytes
    return shards


class _Shards:
    """The files of a folder, all of them open."""

    def __init__(self, folder: Path, entries: Sequence[Entry], about: Mapping[str, str], shard_bytes: int, single: str):
        self._descriptors: list[int] = []
        self._outputs: dict[str, SafetensorsOutput] = {}
        self._file_of: dict[str, str] = {}
        self._entries = entries
        shards = split(entries, shard_bytes)
        size, free = sum(entry.nbytes for entry in entries), shutil.disk_usage(folder).free
        if size > free:
            raise CheckpointError(f"the export takes {size / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free there")
        try:
            for number, shard in enumerate(shards, 1):
                name = single if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
                descriptor = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
                self._descriptors.append(descriptor)
                output = SafetensorsOutput(descriptor, shard, about)
                for entry in shard:
                    self._outputs[entry.name], self._file_of[entry.name] = output, name
        except BaseException:
            self._close()
            raise

    def __enter__(self) -> _Shards:
        return self

    def __exit__(self, *error: object) -> None:
        self._close()

    def _close(self) -> None:
        for descriptor in self._descriptors:
            with suppress(OSError):
                os.close(descriptor)
        self._descriptors = []

    def write(self, entry: Entry, tensor: Tensor) -> None:
        self._outputs[entry.name].write(entry, tensor)

    def finish(self) -> None:
        for descriptor in self._descriptors:
            os.fsync(descriptor)

    def index(self) -> dict[str, bytes]:
        """Return the index of several files, by its name; a single one has none."""
        if len(set(self._file_of.values())) <= 1:
            return {}
        total = sum(entry.nbytes for entry in self._entries)
        return {INDEX: json_bytes({"metadata": {"total_size": total}, "weight_map": self._file_of})}


def json_bytes(values: Mapping[str, Any]) -> bytes:
    """Return the contents of a JSON file, as the libraries of Hugging Face write them."""
    return (json.dumps(values, indent=2) + "\n").encode()


def publish_folder(temporary: Path, out: Path, *, force: bool) -> None:
    """Give the folder its name; one that is replaced is moved aside first, since no folder is renamed over another."""
    aside = temporary.with_name(f"{temporary.name}.old")
    if force and out.is_dir():
        out.rename(aside)
    try:
        temporary.rename(out)  # over an empty folder at most
    except OSError:
        if aside.is_dir() and not out.exists():
            aside.rename(out)
        raise
    shutil.rmtree(aside, ignore_errors=True)
    fsync_directory(out.parent)


def in_order(names: Sequence[str]) -> Iterator[str]:
    """Yield names with the numbers in them in the order of numbers, so that layer 2 comes before layer 10."""
    yield from sorted(
        names, key=lambda name: [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]
    )
