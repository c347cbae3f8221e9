"""`runs bundle` and `submit --from`: a tar file with the config, the code and the revision of a run, to run it again elsewhere.

A bundle holds what the run's snapshot holds, and is not searched for secrets. Its code runs as whoever submits it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import gzip
import hashlib
import io
import json
import logging
import os
import re
import tarfile
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from slurmtrain.config.compose import compose
from slurmtrain.config.frozen import load_frozen
from slurmtrain.config.overrides import normalise
from slurmtrain.config.parallel_dims import ParallelDims
from slurmtrain.config.schema import Config, JobConfig
from slurmtrain.errors import ConfigError, UnreadableRecordError, UsageError
from slurmtrain.launch.changes import changed
from slurmtrain.launch.snapshot import CodeSource
from slurmtrain.runs.code_record import CodeRecord, read_code_record
from slurmtrain.runs.environment_record import newest_environment
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system import records
from slurmtrain.system.files import give_name, temporary_beside
from slurmtrain.system.process_facts import ProcessFacts, gather_facts
from slurmtrain.system.records import COUNT, OBJECT, TEXT, TEXTS, printable
from slurmtrain.system.redaction import redacted

log = logging.getLogger(__name__)

FORMAT = 1
MANIFEST, CONFIG, LOCK = "bundle.json", "config.yaml", "requirements.txt"
PICKLED = re.compile(r"slurmtrain\.runtime\.jobs\.(map_task|hydra_task)\b")  # programs of job.command
TORCH_INDEX = "https://download.pytorch.org/whl"
SHOWN = 8  # packages that differ
_FIELDS = {"format": COUNT, "run": TEXT, "import_roots": TEXTS, "overrides": TEXTS, "git": OBJECT, "packages": OBJECT}


def write_bundle(run_dir: RunDir, target: Path, *, exclude: Sequence[str] = ()) -> str:
    """Write the bundle of a run, the same bytes each time, and return its sha256. There is a whole file in the end, or none.

    Args:
        target: a file that does not exist; one whose name ends in .tar is not compressed.
        exclude: patterns of files of the code that are left out.

    Raises:
        UnreadableRecordError: the run's records cannot be used.
        UsageError: what the run calls lies elsewhere.
        ConfigError: the file exists, or cannot be written.
    """
    info = run_dir.info(whole=True)
    values = run_dir.config_values()
    if isinstance(values, dict) and PICKLED.search(str((values.get("job") or {}).get("command"))):
        raise UsageError(
            f"run {run_dir.id} calls a pickled function of slurmtrain.map or a Hydra program, which a bundle cannot contain",
            hint="run the program again at the other place; bundles are for runs of `submit`",
        )
    record = read_code_record(run_dir.code_record_file) or CodeRecord()
    in_place = str(info.get("workdir", "/")).startswith("/")
    if in_place:
        log.warning("run %s ran in place, in %s: its code is not in the bundle", run_dir.id, info.get("workdir"))
    recorded = newest_environment(run_dir)
    facts = recorded[1] if recorded is not None else ProcessFacts()
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "run": run_dir.id,
        **{name: info[name] for name in ("name", "user", "created", "config_hash", "version", "image") if name in info},
        "overrides": list(info.get("overrides") or ()),
        "workdir": None if in_place else info["workdir"],
        "import_roots": [] if in_place else list(info.get("import_roots") or ()),
        "git": {name: getattr(record, name) for name in ("revision", "dirty", "branch", "remote")},
        "python": facts.system.get("python"),
        "packages": dict(sorted(facts.packages.items())),
    }
    texts = {
        MANIFEST: (json.dumps(redacted(manifest), indent=1) + "\n").encode(),
        CONFIG: records.read_bytes(run_dir.config_file),
        LOCK: _requirements(facts).encode(),
    }
    temporary = temporary_beside(target)
    try:
        with temporary.open("xb") as file:
            packed = file if target.suffix == ".tar" else gzip.GzipFile("", "wb", 6, file, mtime=0)
            with packed, tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
                for name, content in texts.items():
                    _add(tar, run_dir, info, name, io.BytesIO(content), len(content))
                if not in_place:
                    _add_code(tar, run_dir, info, record, exclude)
        with temporary.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        give_name(temporary, target)
        return digest
    except FileExistsError:
        raise ConfigError(f"{target} already exists", hint="choose another file, or remove it") from None
    except OSError as error:
        raise ConfigError(
            f"cannot write {target}: {error.strerror}", hint="name a file in a folder that you may write to"
        ) from None
    finally:
        temporary.unlink(missing_ok=True)


def _add(
    tar: tarfile.TarFile,
    run_dir: RunDir,
    info: Mapping[str, Any],
    name: str,
    content: BinaryIO | None,
    size: int = 0,
    *,
    executable: bool = False,
    link: str | None = None,
) -> None:
    entry = tarfile.TarInfo(f"{run_dir.id}/{name}")
    entry.size, entry.mode, entry.mtime = size, 0o755 if executable else 0o644, int(info["created"])
    if link is not None:
        entry.type, entry.linkname = tarfile.SYMTYPE, link
    tar.addfile(entry, content)


def _add_code(
    tar: tarfile.TarFile, run_dir: RunDir, info: Mapping[str, Any], record: CodeRecord, exclude: Sequence[str]
) -> None:
    """Add the files of the snapshot as they are now, without those that the program has written beside them."""
    root = run_dir.code.resolve()
    if root not in (run_dir.path.resolve() / "code", run_dir.path.resolve().parent / "code"):  # the latter of a sweep
        raise UnreadableRecordError(f"{run_dir.code} leads to {root}, which is not the code of the run")
    gone: list[str] = []
    for name in sorted(record.files):
        path = root / name
        if path.resolve() != path:  # in the run of somebody else it could lead to any file of the reader
            raise UnreadableRecordError(f"{run_dir.code_record_file} names {name!r}, which is no file of the code")
        if _matches(name, exclude):
            continue
        if not path.is_file():
            gone.append(name)
            continue
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            _add(tar, run_dir, info, f"code/{name}", file, found.st_size, executable=bool(found.st_mode & 0o100))
    for name, link in sorted(record.links.items()):
        inside = os.path.normpath(os.path.join(os.path.dirname(name), link))
        if inside.startswith(("/", "..")):
            log.warning("code/%s is a link to %s, which is not in the bundle", printable(name), printable(link))
        elif not _matches(name, exclude):
            _add(tar, run_dir, info, f"code/{name}", None, link=link)
    if gone:
        log.warning("gone since the run was submitted: %s", _some(gone))


def _matches(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a file of the code, by its path or its name alone, matches one of these patterns."""
    plain = [pattern.removeprefix("code/") for pattern in patterns]
    return any(fnmatch.fnmatchcase(each, pattern) for each in (name, os.path.basename(name)) for pattern in plain)


def _requirements(facts: ProcessFacts) -> str:
    """Return the packages as pip reads them. Those that no index has are given by their URL, or in a comment."""
    lines = [f"# What the newest attempt ran with, on Python {facts.system.get('python', '?')}"]
    if build := facts.packages.get("torch", "").partition("+")[2]:
        lines.append(f"--extra-index-url {TORCH_INDEX}/{build}")
    for name, version in sorted(facts.packages.items()):
        origin = facts.origins.get(name)
        if origin is None:
            lines.append(f"{name}=={version}")
        elif re.match(r"(git\+)?(https|ssh)://", origin):
            lines.append(f"{name} @ {origin}")
        else:
            lines.append(f"# {name}=={version}, installed from {origin}")
    return "".join(f"{printable(line)}\n" for line in lines)


def _some(names: Sequence[str], most: int = 5) -> str:
    return printable(", ".join(names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")


@dataclass(frozen=True)
class Bundle:
    """A bundle that has been unpacked.

    Attributes:
        manifest: what its bundle.json says.
        folder: where it is unpacked.
        facts: what run.json says of the bundle that a run was made from.
    """

    manifest: Mapping[str, Any]
    folder: Path
    facts: Mapping[str, Any]

    @property
    def workdir(self) -> Path | None:
        """The folder in which the program runs, as unpacked; None for a run that ran in place."""
        return None if self.manifest["workdir"] is None else self.folder / self.manifest["workdir"]

    @property
    def code(self) -> CodeSource | None:
        """What the new run's snapshot is made of; None for a run that ran in place."""
        if self.manifest["workdir"] is None:
            return None
        git = {name: self.manifest["git"].get(name) for name in ("revision", "dirty", "branch", "remote")}
        record = CodeRecord(**git, diff="" if git["dirty"] is False else None)
        roots = tuple(self.manifest["import_roots"])
        return CodeSource(self.folder / "code", self.manifest["workdir"], roots=roots, record=record, bundle=self.facts)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Bundle]:
    """Unpack a bundle into a folder that is removed after the block.

    Raises:
        UsageError: there is no such file.
        ConfigError: it is torn, is no bundle, or would write outside of the folder.
    """
    with tempfile.TemporaryDirectory(prefix="slurmtrain-bundle-") as name:
        try:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                file.seek(0)
                with tarfile.open(fileobj=file) as tar:
                    tar.extractall(name, filter="data")
                    while tar.fileobj is not None and tar.fileobj.read(1 << 20):  # up to gzip's checksum at the end
                        pass
            folder = next(Path(name).iterdir(), Path(name))
            if not (folder / MANIFEST).is_file():
                raise ValueError(f"it has no {MANIFEST}")
            manifest = json.loads((folder / MANIFEST).read_text())
            if not all(kind.holds(manifest[field]) for field, kind in _FIELDS.items()) or manifest["format"] != FORMAT:
                raise ValueError(f"its {MANIFEST} is none of this version")
            if manifest["workdir"] is not None:
                (folder / manifest["workdir"]).mkdir(parents=True, exist_ok=True)
        except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path} is incomplete, or not a bundle: {printable(str(error))[:200]}",
                hint="copy it again, and compare its sha256 with the one that `runs bundle` printed",
            ) from None
        except OSError as error:
            raise UsageError(
                f"{path} cannot be read: {error.strerror}", hint="`runs bundle RUN` makes a bundle"
            ) from None
        yield Bundle(manifest, folder, {"file": str(path), "sha256": digest, "run": manifest["run"]})


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


def tell_differences(bundle: Bundle) -> None:
    """Log which packages of the run are missing here, or have another version."""
    then, here = bundle.manifest["packages"], gather_facts().packages
    other = [f"{name} {here[name]} (was {then[name]})" for name in then if here.get(name, then[name]) != then[name]]
    missing = [name for name in then if name not in here and name != "slurmtrain"]
    if other:
        log.warning("other versions than those of the run: %s", _some(other, SHOWN))
    if missing:
        log.warning("packages of the run that are not installed here: %s", _some(missing, SHOWN))
