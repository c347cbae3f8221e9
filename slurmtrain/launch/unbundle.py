"""`submit --from BUNDLE`: open a bundle that anybody may have made, and make of it what is submitted.

Its code is run as whoever submits it. So only a file of the user's own is opened: whoever copies one has had it in hand. All
that is in it must be in its list, with the same size and digest, and nothing is written outside of a folder made for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import hashlib
import io
import json
import logging
import os
import re
import stat
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmtrain.config.compose import compose
from slurmtrain.config.frozen import load_frozen
from slurmtrain.config.overrides import normalise
from slurmtrain.config.parallel_dims import ParallelDims
from slurmtrain.config.schema import Config, JobConfig
from slurmtrain.errors import ConfigError, UsageError
from slurmtrain.launch.bundle_format import (
    CONFIG,
    ENVIRONMENT,
    FORMAT,
    MANIFEST,
    MOST_BYTES,
    PATCH,
    is_inside,
    leads_inside,
    some,
    with_digest,
)
from slurmtrain.launch.changes import changed
from slurmtrain.launch.import_paths import interpreter_of
from slurmtrain.launch.snapshot import CodeSource
from slurmtrain.runs.code_record import CodeRecord
from slurmtrain.system import records, trust, user
from slurmtrain.system.process_facts import ProcessFacts, gather_facts
from slurmtrain.system.records import COUNT, FLAG, NOTHING, OBJECT, TEXT, TEXTS, printable
from slurmtrain.system.scratch import scratch_folder

log = logging.getLogger(__name__)

LIST_BYTES = 32 << 20  # of bundle.json
HEADER_BYTES = 1 << 20  # of all headers of tar before a file: they are kept in memory, and hold a long path at most
PIECE_BYTES = 1 << 20
ASK_S = 60
SHOWN = 8  # packages that differ
QUESTION = """
import importlib.metadata as m, json, platform, re
found = {}
for each in m.distributions():
    name = re.sub(r"[-_.]+", "-", each.metadata["Name"] or "").lower()
    found.setdefault(name, each.version)
print(json.dumps({"packages": found, "python": platform.python_version()}))
"""
_FIELDS = {
    "format": COUNT,
    "run": TEXT,
    "name": TEXT,
    "workdir": TEXT | NOTHING,
    "import_roots": TEXTS,
    "overrides": TEXTS,
    "git": OBJECT,
    "untracked": TEXTS,
    "links": OBJECT,
    "links_out": OBJECT,
    "files": OBJECT,
}
_GIT = {"revision": TEXT | NOTHING, "dirty": FLAG | NOTHING, "branch": TEXT | NOTHING, "remote": TEXT | NOTHING}


@dataclass(frozen=True)
class Bundle:
    """A bundle that has been unpacked.

    Attributes:
        path: the file.
        digest: its sha256.
        manifest: its list, with fields of the right types.
        folder: where it is unpacked.
    """

    path: Path
    digest: str
    manifest: Mapping[str, Any]
    folder: Path

    @property
    def code(self) -> CodeSource | None:
        """What the new run's snapshot is made of; None for a run that ran in place."""
        workdir = self.manifest["workdir"]
        if workdir is None:
            return None
        git = self.manifest["git"]
        patch = self.folder / PATCH
        diff = patch.read_text(errors="surrogateescape") if patch.is_file() else "" if git["dirty"] is False else None
        record = CodeRecord(
            **{name: git[name] for name in _GIT}, diff=diff, untracked=tuple(self.manifest["untracked"])
        )
        return CodeSource(
            self.folder / "code", workdir, roots=tuple(self.manifest["import_roots"]), record=record, bundle=self.facts
        )

    @property
    def workdir(self) -> Path | None:
        """The folder in which the program runs, as unpacked; None for a run that ran in place."""
        return None if self.manifest["workdir"] is None else self.folder / self.manifest["workdir"]

    @property
    def facts(self) -> dict[str, Any]:
        """What run.json says of the bundle that a run was made from."""
        return {"file": str(self.path), "sha256": self.digest, "run": self.manifest["run"]}


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Bundle]:
    """Unpack a bundle into a folder that is removed after the block.

    Raises:
        UsageError: there is no such file, or it may be somebody else's work.
        ConfigError: it is torn, is no bundle, or holds what its list does not name.
    """
    with scratch_folder("slurmtrain-bundle-") as folder:
        with _own_file(path) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            file.seek(0)
            manifest = _unpack(path, file, folder)
        yield Bundle(path, digest, manifest, folder)


@contextlib.contextmanager
def _own_file(path: Path) -> Iterator[io.BufferedReader]:
    """Open a file that only this user and root can have written."""
    try:
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", hint="`runs bundle RUN` makes a bundle") from None
    with file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise UsageError(f"{path} is not a regular file", hint="`runs bundle RUN` makes a bundle")
        copy = f"look into it (tar -tvf {path}), and if you trust it, make a copy of your own"
        if found.st_uid not in (os.geteuid(), 0):
            raise UsageError(
                f"{path} belongs to {user.in_words(found.st_uid)}, and its code would be run as you", hint=copy
            )
        if trust.others_may_write(found):
            raise UsageError(
                f"others may change {path} (mode {stat.S_IMODE(found.st_mode):04o}), and its code would be run as you",
                hint=copy,
            )
        if found.st_size > MOST_BYTES:
            raise ConfigError(f"{path} has {found.st_size} bytes, and {MOST_BYTES} is the largest size of a bundle")
        yield file


class _Limited(io.RawIOBase):
    """What is unpacked of a file, up to a limit that is set anew for each part: a few bytes can stand for terabytes.

    tarfile reads a header as long as it says it is into the memory, and any number of them after each other. It can move
    on only.
    """

    def __init__(self, file: io.BufferedReader | gzip.GzipFile):
        self._file, self._position, self._end = file, 0, 0

    def allow(self, size: int) -> None:
        """Let the next `size` bytes be read, and no more."""
        self._end = self._position + size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence != os.SEEK_SET or offset < self._position:
            raise tarfile.ReadError("its files overlap")
        while self._position < offset and self.read(min(PIECE_BYTES, offset - self._position)):
            pass
        return self._position

    def read(self, size: int = -1) -> bytes:
        if size < 0 or self._position + size > self._end:
            raise tarfile.ReadError("it is longer than its header says, or its header is too long")
        data = self._file.read(size)
        self._position += len(data)
        return data


def _unpack(path: Path, file: io.BufferedReader, folder: Path) -> Mapping[str, Any]:
    """Unpack the files of a bundle, and return its list."""
    packed = file.read(2) == b"\x1f\x8b"
    file.seek(0)
    try:
        stream = _Limited(gzip.GzipFile(fileobj=file) if packed else file)
        stream.allow(HEADER_BYTES)
        with tarfile.open(fileobj=stream, mode="r:") as tar:
            first = tar.next()
            if first is None or not first.isreg() or not first.name.endswith(f"/{MANIFEST}") or first.size > LIST_BYTES:
                raise ConfigError(
                    f"{path} is not a bundle: it does not begin with {MANIFEST}", hint="see `runs bundle`"
                )
            manifest = _checked(path, json.loads(b"".join(_pieces(stream, tar, first))))
            _unpack_files(path, stream, tar, first.name.removesuffix(MANIFEST), manifest, folder)
        stream.allow(HEADER_BYTES)
        while stream.read(tarfile.BLOCKSIZE):  # up to the checksum at the end
            pass
        for name, target in manifest["links"].items():  # after the files, so that none is written through one
            link = folder / "code" / name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(target)
        if manifest["workdir"] is not None:
            (folder / manifest["workdir"]).mkdir(parents=True, exist_ok=True)
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} is incomplete, or not a bundle: {printable(str(error))[:200] or type(error).__name__}",
            hint="copy it again, and compare its sha256 with the one that `runs bundle` printed",
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be unpacked into {folder}: {error.strerror}", hint="set TMPDIR to another folder"
        ) from None
    return manifest


def _unpack_files(
    path: Path, stream: _Limited, tar: tarfile.TarFile, prefix: str, manifest: Mapping[str, Any], folder: Path
) -> None:
    files, seen = manifest["files"], set()
    while (entry := _next_entry(stream, tar)) is not None:
        name = entry.name.removeprefix(prefix)
        listed = files.get(name)
        if not entry.name.startswith(prefix) or not entry.isreg() or listed is None or name in seen:
            raise ConfigError(f"{path} holds {printable(entry.name)[:200]!r}, which is not a file in its list")
        tarfile.data_filter(entry, str(folder))
        target = folder / name
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        digest, size = hashlib.sha256(), 0
        with os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as out:
            for piece in _pieces(stream, tar, entry) if entry.size == listed["size"] else ():
                out.write(piece)
                digest.update(piece)
                size += len(piece)
        if digest.hexdigest() != listed["sha256"] or size != entry.size:
            raise ConfigError(
                f"{path}: {printable(name)} does not match the list of the bundle",
                hint="copy the bundle again: part of it was damaged or replaced",
            )
        seen.add(name)
        if listed["executable"]:
            target.chmod(0o700)
    if len(seen) < len(files):
        missing = next(name for name in files if name not in seen)
        raise ConfigError(
            f"{path} is incomplete: it has {len(seen)} of {len(files)} files; {printable(missing)} is missing"
        )


def _next_entry(stream: _Limited, tar: tarfile.TarFile) -> tarfile.TarInfo | None:
    """Return the next file of the archive. Those of before are forgotten: nothing goes back to them."""
    tar.members = []  # type: ignore[attr-defined]  # they would be kept with all of their headers
    stream.allow(HEADER_BYTES)
    entry = tar.next()
    if tar.pax_headers:
        raise tarfile.ReadError("a header for all files")
    return entry


def _pieces(stream: _Limited, tar: tarfile.TarFile, entry: tarfile.TarInfo) -> Iterator[bytes]:
    """Yield a file of the archive in pieces, so that what is claimed and what is there cannot differ unseen."""
    if entry.issparse():
        raise tarfile.ReadError("a file with holes")
    source = tar.extractfile(entry)
    assert source is not None
    stream.allow(entry.size + PIECE_BYTES)  # it may be read ahead
    left = entry.size
    while left and (piece := source.read(min(PIECE_BYTES, left))):
        left -= len(piece)
        yield piece


def _checked(path: Path, manifest: Any) -> Mapping[str, Any]:
    """Check the types of a bundle's list, and that no path in it leads out of the bundle's folder.

    Raises:
        ConfigError: one does, or the list is of another kind.
    """
    wrong = ConfigError(f"{path}: its {MANIFEST} is not one of `runs bundle`")
    if not isinstance(manifest, dict) or any(name not in manifest for name in _FIELDS):
        raise wrong
    if not all(kind.holds(manifest[name]) for name, kind in _FIELDS.items()):
        raise wrong
    if with_digest(manifest)["digest"] != manifest.get("digest"):
        raise ConfigError(f"{path} is damaged: its {MANIFEST} does not match its digest", hint="copy it again")
    if manifest["format"] != FORMAT:
        raise ConfigError(
            f"{path} is of format {manifest['format']}, but this version reads format {FORMAT}",
            hint="install the slurmtrain that packed it",
        )
    git = manifest["git"]
    if any(name not in git or not kind.holds(git[name]) for name, kind in _GIT.items()):
        raise wrong
    for name, listed in manifest["files"].items():
        whole = isinstance(listed, dict) and TEXT.holds(listed.get("sha256")) and COUNT.holds(listed.get("size"))
        if not whole or not FLAG.holds(listed.get("executable")) or listed["size"] < 0 or not is_inside(name):
            raise wrong
    for name in (CONFIG, ENVIRONMENT):
        if name not in manifest["files"]:
            raise ConfigError(f"{path}: its {MANIFEST} names no {name}, which every run needs")
    if sum(listed["size"] for listed in manifest["files"].values()) > MOST_BYTES:
        raise ConfigError(f"{path} unpacks to more than {MOST_BYTES} bytes, the largest size of a bundle")
    workdir, roots = manifest["workdir"], manifest["import_roots"]
    places = [*([] if workdir is None else [workdir]), *(f"code/{root}" for root in roots)]
    if any(not is_inside(place) or not f"{place}/".startswith("code/") for place in places):
        raise wrong
    for name, target in manifest["links"].items():
        if not is_inside(name) or not isinstance(target, str) or not leads_inside(name, target, manifest["links"]):
            raise wrong
    return manifest


# The config, and what differs here.


def config_of(
    bundle: Bundle, overrides: Sequence[str], cwd: Path, *, config_dir: str | None = None
) -> tuple[Config, ParallelDims]:
    """Return the config of a bundle with overrides, after all checks of its fields.

    With `+cluster=NAME` all of the group `cluster` is that of the other cluster. The folder of runs is this shell's.

    Raises:
        UsageError: an override that cannot be read, or chooses another group.
        ConfigError: a value that cannot work.
    """
    config = load_frozen(bundle.folder / CONFIG, with_secrets=False)
    config = dataclasses.replace(config, job=dataclasses.replace(config.job, runs_dir=JobConfig().runs_dir))
    chosen = [word for word in overrides if re.match(r"\+{0,2}cluster=", word)]
    others = [word for word in overrides if word not in chosen]
    if chosen:
        of_cluster = [word for word in others if re.match(r"[+~]{0,2}cluster\.", word)]
        others = [word for word in others if word not in of_cluster]
        composed = compose([*map(normalise, chosen), *of_cluster], config_dir=config_dir)
        config = dataclasses.replace(config, cluster=composed.cluster)
    for word in others:
        key = word.lstrip("+~").partition("=")[0]
        if "." not in key:
            raise UsageError(
                f"{word}: with --from, only single fields can be set, and the group cluster chosen",
                hint="such as optim.lr=1e-4, or +cluster=NAME",
            )
    return changed(config, others, cwd, fixed=())


def tell_differences(bundle: Bundle, config: Config) -> None:
    """Log what this machine has not as the run had it: packages, links of the code, the image."""
    recorded = records.parse(records.read_bytes(bundle.folder / ENVIRONMENT))
    facts = ProcessFacts.from_json(recorded)
    interpreter = interpreter_of(config.cluster)
    if facts.packages and interpreter is not None:
        here = _packages_of(interpreter)
        if here is not None:
            said = package_sentence(facts, here)
            if said:
                log.warning("%s: %s", interpreter, said)
    elif facts.packages:
        log.warning("the packages of the run and of the container %s are not compared", config.cluster.container.image)
    for name, target in bundle.manifest["links_out"].items():
        log.warning("code/%s was a link to %s and is not in the bundle", printable(name), printable(str(target)))
    image = bundle.manifest.get("image")
    was = image.get("image") if isinstance(image, dict) else None
    if was and was != config.cluster.container.image:
        log.warning("the original run used the container %s, and this one does not", printable(str(was)))


def package_sentence(then: ProcessFacts, here: ProcessFacts) -> str:
    """Return in a sentence which packages differ here; an empty text if none does."""
    other = [
        f"{name} {here.packages[name]} (was {version})"
        for name, version in then.packages.items()
        if name in here.packages and here.packages[name] != version
    ]
    missing = [name for name in then.packages if name not in here.packages and name != "slurmtrain"]
    if then.system.get("python") not in (None, here.system.get("python")):
        other.insert(0, f"python {here.system.get('python')} (was {then.system['python']})")
    parts = [f"other versions: {some(other, SHOWN)}"] if other else []
    parts += [f"not installed: {some(missing, SHOWN)}"] if missing else []
    return "; ".join(parts)


def _packages_of(interpreter: str) -> ProcessFacts | None:
    """Return the packages of an interpreter; None if it does not answer."""
    if os.path.realpath(interpreter) == os.path.realpath(sys.executable) and interpreter == sys.executable:
        return gather_facts()
    try:
        answer = subprocess.run(
            [interpreter, "-c", QUESTION], cwd="/", capture_output=True, text=True, timeout=ASK_S, check=True
        )
        found = json.loads(answer.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
    return ProcessFacts(system={"python": found["python"]}, packages=found["packages"])
