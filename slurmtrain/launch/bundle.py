"""`runs bundle RUN`: one file with what it takes to run a run again elsewhere: config, code, packages, and how.

The bytes of a bundle depend on the run alone, and no secret goes into it (`bundle_secrets`).
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import stat
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from slurmtrain.config.checks.job import NAME
from slurmtrain.errors import ConfigError, UnreadableRecordError, UsageError
from slurmtrain.launch.bundle_format import (
    CONFIG,
    ENVIRONMENT,
    FORMAT,
    LOCK,
    MANIFEST,
    MOST_BYTES,
    PATCH,
    Member,
    is_inside,
    leads_inside,
    matches,
    some,
    with_digest,
)
from slurmtrain.launch.bundle_secrets import known_secrets, refuse_secrets, without_files
from slurmtrain.launch.bundle_texts import lock_text, readme_text
from slurmtrain.runs.code_record import CodeRecord, read_code_record
from slurmtrain.runs.environment_record import newest_environment
from slurmtrain.runs.ownership import foreign_link
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system import records
from slurmtrain.system.files import give_name, temporary_beside
from slurmtrain.system.process_facts import ProcessFacts
from slurmtrain.system.redaction import bytes_of, redacted

PICKLED = re.compile(r"slurmtrain\.runtime\.(jobs\.)?(map_task|hydra_task)\b")  # programs of job.command


@dataclass(frozen=True)
class Packed:
    """What goes into a bundle.

    Attributes:
        folder: name of the folder that all is in.
        created: the time that its files have, in unix seconds.
        members: its files, the list of them first.
        warnings: what is not in it, or is not as it was at submit, in sentences.
    """

    folder: str
    created: int
    members: list[Member]
    warnings: list[str]


@dataclass
class _Code:
    """The files of the snapshot, the links in it, and what is to be said of them."""

    members: list[Member] = field(default_factory=list)
    links: dict[str, str] = field(default_factory=dict)
    links_out: dict[str, str] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def pack(run_dir: RunDir, *, exclude: Sequence[str] = (), allow: Sequence[str] = ()) -> Packed:
    """Collect what a bundle of a run holds.

    Args:
        exclude: patterns of files of the code that are left out, also of the patch.
        allow: patterns of files that are packed although they look like secrets.

    Raises:
        UnreadableRecordError: the run's records cannot be read, or are too large.
        UsageError: what the run calls lies elsewhere.
        ConfigError: something in it is a secret, or looks like one; the message names the first few.
    """
    info = run_dir.info(whole=True)
    values = run_dir.config_values()
    if PICKLED.search(str(_at(values, "job", "command"))):
        raise UsageError(
            f"run {run_dir.id} calls a pickled function of slurmtrain.map or a Hydra program, which a bundle cannot contain",
            hint="run the program again at the other place; bundles are for runs of `submit`",
        )
    record = read_code_record(run_dir.code_record_file) or CodeRecord()
    in_place = str(info.get("workdir", "/")).startswith("/")
    code = _Code() if in_place else _code_of(run_dir, record, exclude)
    if in_place:
        code.warnings.append(
            f"run {run_dir.id} ran in place, in {info.get('workdir')}: its code is not in the bundle, and `submit --from` "
            "takes that of the folder where it is typed"
        )
    recorded = newest_environment(run_dir)
    facts = ProcessFacts() if recorded is None else recorded[1]
    if recorded is None:
        code.warnings.append("no attempt recorded its packages: the bundle has no list of packages")
    config = records.read_bytes(run_dir.config_file)
    facts_of_run = _run_facts(run_dir, info, in_place)
    about = [
        Member("README.md", readme_text(facts_of_run, facts, record, code.links_out, values).encode()),
        Member(CONFIG, config),
        Member(LOCK, lock_text(facts).encode()),
        Member(ENVIRONMENT, _json({**facts.to_json(), "system": _without_host(facts.system)})),
        *([Member("job.sbatch", records.read_bytes(run_dir.script))] if run_dir.script.is_file() else []),
        *([Member(PATCH, bytes_of(diff))] if (diff := without_files(record.diff or "", exclude)) else []),
    ]
    members = sorted([*about, *code.members], key=lambda member: member.name)
    manifest = {
        "format": FORMAT,
        **facts_of_run,
        "git": {"revision": record.revision, "dirty": record.dirty, "branch": record.branch, "remote": record.remote},
        "untracked": list(record.untracked),
        "links": code.links,
        "links_out": code.links_out,
        "changed": code.changed,
        "files": {
            member.name: {
                "sha256": hashlib.sha256(member.content).hexdigest(),
                "size": len(member.content),
                "executable": member.executable,
            }
            for member in members
        },
    }
    first = Member(MANIFEST, _json(with_digest(redacted(manifest))))
    known, unknown = known_secrets(run_dir)
    refuse_secrets(run_dir, [first, *members], known, allow)
    if unknown:
        code.warnings.append(
            f"unknown in this shell, so the check of the bundle could not look for these secrets: {some(unknown)}"
        )
    name = info["name"] if NAME.fullmatch(info["name"]) else "run"  # the record may be somebody else's
    return Packed(f"{name}-{run_dir.id}", int(info["created"]), [first, *members], code.warnings)


def write_bundle(packed: Packed, target: Path) -> str:
    """Write a bundle, and return its sha256. There is a whole file in the end, or none.

    Args:
        target: a file that does not exist; one whose name ends in .tar is not compressed.

    Raises:
        ConfigError: it exists, or cannot be written.
    """
    temporary = temporary_beside(target)
    try:
        with temporary.open("xb") as file:
            if target.suffix == ".tar":
                _write_tar(packed, file)
            else:
                with gzip.GzipFile("", "wb", 6, file, mtime=0) as stream:
                    _write_tar(packed, stream)
            file.flush()
            os.fsync(file.fileno())
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


def _write_tar(packed: Packed, stream: BinaryIO | gzip.GzipFile) -> None:
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for member in packed.members:
            entry = tarfile.TarInfo(f"{packed.folder}/{member.name}")
            entry.size, entry.mode, entry.mtime = len(member.content), member.mode, packed.created
            tar.addfile(entry, io.BytesIO(member.content))


def _at(values: Any, *keys: str) -> Any:
    for key in keys:
        values = values.get(key) if isinstance(values, Mapping) else None
    return values


def _run_facts(run_dir: RunDir, info: Mapping[str, Any], in_place: bool) -> dict[str, Any]:
    known = ("name", "user", "created", "overrides", "config_hash", "version", "image")
    facts: dict[str, Any] = redacted(
        {
            "run": run_dir.id,
            **{name: info[name] for name in known if name in info},
            "workdir": None if in_place else info.get("workdir"),
            "import_roots": [] if in_place else list(info.get("import_roots") or ()),
        }
    )
    return facts


def _without_host(system: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in sorted(system.items()) if name != "host"}


def _json(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(redacted(values), indent=1) + "\n").encode()


def _code_of(run_dir: RunDir, record: CodeRecord, exclude: Sequence[str]) -> _Code:
    """Return the files of a run's snapshot, without those that the program has written beside them."""
    found, root = _Code(), os.path.realpath(run_dir.code)
    of_a_sweep = os.path.join(os.path.realpath(run_dir.path.parent), "code")
    if os.path.lexists(run_dir.code) and foreign_link(run_dir.code) and root != of_a_sweep:
        raise UnreadableRecordError(f"{run_dir.code} is a link, and links in a run are not followed")
    names = sorted(record.files) or sorted(_all_files(Path(root)))
    if not record.files:
        found.warnings.append("the run has no record of its code's files: all that lie there are packed")
    total = 0
    for name in names:
        if not is_inside(name):
            raise UnreadableRecordError(f"{run_dir.code_record_file} names {name!r}, which is no file of the code")
        if matches(name, exclude):
            continue
        path = Path(root) / name
        # A folder in between that is a link, as of a run of somebody else, could lead to any file of the reader's.
        if os.path.realpath(path.parent) != os.path.normpath(path.parent):
            raise UnreadableRecordError(f"{path.parent} is a link, and links in a run are not followed")
        try:
            content = records.read_bytes(path, at_most=MOST_BYTES - total)
        except (FileNotFoundError, NotADirectoryError):
            found.changed.append(name)
            continue
        total += len(content)
        if record.files and hashlib.sha256(content).hexdigest() != record.files[name]:
            found.changed.append(name)
        executable = bool(os.lstat(path).st_mode & stat.S_IXUSR)
        found.members.append(Member(f"code/{name}", content, executable))
    for name, target in sorted(record.links.items()):
        if is_inside(name) and not matches(name, exclude):
            (found.links if leads_inside(name, target, record.links) else found.links_out)[name] = target
    if found.changed:
        found.warnings.append(
            f"changed or gone since the run was submitted: {some(found.changed)}; packed as they are now"
        )
    if found.links_out:
        found.warnings.append(
            f"not in the bundle, because these links lead out of the code: {some(list(found.links_out))}"
        )
    return found


def _all_files(root: Path) -> Iterator[str]:
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in names:
            path = Path(folder) / name
            if path.is_file() and not path.is_symlink():
                yield str(path.relative_to(root))
