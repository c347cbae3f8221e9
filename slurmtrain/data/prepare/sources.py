"""The inputs of `prepare`: which files there are, what is in them, and how they are compressed."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmtrain.choices import RawFormat
from slurmtrain.errors import ConfigError

FORMATS = {
    "jsonl": (".jsonl", ".json", ".ndjson"),
    "parquet": (".parquet",),
    "text": (".txt", ".md"),
}
PACKINGS = {".gz": "gzip", ".zst": "zstd"}  # as pyarrow calls them


@dataclass(frozen=True)
class InputFile:
    """An input file.

    Attributes:
        name: path relative to the folder that all inputs have in common, with slashes.
        format: one of FORMATS.
        packing: compression of the file: one of PACKINGS, or None.
        size: size of the file in bytes.
        modified: time of the last change in nanoseconds.
    """

    name: str
    path: Path
    format: str
    packing: str | None
    size: int
    modified: int

    @property
    def divisible(self) -> bool:
        """Whether reading may begin in the middle of the file."""
        return self.packing is None and self.format == RawFormat.JSONL


def find_sources(inputs: Sequence[str], format: str, output: Path) -> list[InputFile]:
    """Return the files that `inputs` name, each once, sorted by path; the order of the inputs does not matter.

    Raises:
        ConfigError: an input does not exist or matches nothing, the format of a file is not known, or the output is in
            a folder that is an input.
    """
    paths = sorted({path for given in inputs for path in _files_of(given, output)})
    root = Path(os.path.commonpath([path.parent for path in paths]))
    return [_source(path, root, format) for path in paths]


def _files_of(given: str, output: Path) -> Iterator[Path]:
    matches = sorted(glob.glob(given, recursive=True)) if glob.has_magic(given) else [given]
    # A file may have a name that reads like a pattern.
    matches = matches or [given] * os.path.exists(given)
    if not matches:
        raise ConfigError(
            f"prepare.inputs: nothing matches {given!r}", hint="is the pattern quoted, and the path correct?"
        )
    found = False
    for match in matches:
        named = Path(os.path.abspath(match))
        if output.is_relative_to(named):
            raise ConfigError(
                f"prepare.output={output} lies in the input {named}",
                hint="files written there would also be read as input",
            )
        for path in _files_in(named):
            found = True
            yield path
    if not found:
        raise ConfigError(f"prepare.inputs: there is no file in {given}")


def _files_in(path: Path) -> Iterator[Path]:
    """Yield a file itself, or all files in and below a folder but hidden ones."""
    if not path.exists():
        raise ConfigError(f"prepare.inputs: there is no {path}")
    if path.is_file():
        yield path
        return

    def unreadable(error: OSError) -> None:
        raise ConfigError(f"prepare.inputs: {error.filename} cannot be read: {error.strerror}") from None

    for folder, folders, files in os.walk(path, followlinks=True, onerror=unreadable):
        folders[:] = [each for each in folders if not each.startswith(".")]
        paths = (Path(folder, each) for each in files if not each.startswith("."))
        yield from filter(Path.is_file, paths)  # a pipe cannot be read again


def _source(path: Path, root: Path, format: str) -> InputFile:
    try:
        facts = path.stat()
    except OSError as error:
        raise ConfigError(f"prepare.inputs: {path} cannot be read: {error.strerror}") from None
    packing = PACKINGS.get(path.suffix)
    if format == RawFormat.AUTO:
        suffix = Path(path.stem).suffix if packing else path.suffix
        known = {suffix: name for name, suffixes in FORMATS.items() for suffix in suffixes}
        if suffix not in known:
            raise ConfigError(
                f"prepare.inputs: it is not known what is in {path}: its suffix is {suffix!r}",
                hint=f"known are {', '.join(known)}; or prepare.format=text (each file is a document), jsonl, parquet",
            )
        format = known[suffix]
    return InputFile(path.relative_to(root).as_posix(), path, format, packing, facts.st_size, facts.st_mtime_ns)
