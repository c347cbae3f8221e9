"""`runs bundle RUN`: one file with what it takes to run a run again elsewhere: config, code, packages, and how.

The bytes of a bundle depend on the run alone. No secret goes into it: a value that is known to be one, and a text or a file
that looks like one, is refused by name.
"""

from __future__ import annotations

import fnmatch
import gzip
import hashlib
import io
import json
import os
import re
import stat
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from slurmtrain.config import secrets
from slurmtrain.config.checks.job import NAME
from slurmtrain.errors import ConfigError, UnreadableRecordError, UsageError
from slurmtrain.runs.code_record import CodeRecord, read_code_record, words_for_changes
from slurmtrain.runs.environment_record import newest_environment
from slurmtrain.runs.ownership import foreign_link
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system import records
from slurmtrain.system.files import give_name, temporary_beside
from slurmtrain.system.process_facts import ProcessFacts
from slurmtrain.system.records import printable
from slurmtrain.system.redaction import SECRET_VARIABLE, SHORTEST, bytes_of, redacted

FORMAT = 1
MANIFEST, CONFIG, ENVIRONMENT, LOCK = "bundle.json", "config.yaml", "environment.json", "requirements.txt"
PATCH = "changes.patch"
MOST_BYTES = 2 << 30  # of all files of a bundle
TORCH_INDEX = "https://download.pytorch.org/whl"
PICKLED = re.compile(r"slurmtrain\.runtime\.(jobs\.)?(map_task|hydra_task)\b")  # programs of job.command
SECRET_TEXT = re.compile(
    rb"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----"
    rb"|\b(?:hf_[A-Za-z0-9]{30,}|gh[pousr]_[A-Za-z0-9]{36,}|github_pat_\w{40,}|glpat-[\w-]{20,}|sk-[A-Za-z0-9_-]{32,}"
    rb"|xox[baprs]-[\w-]{20,}|AKIA[0-9A-Z]{16}|AIza[\w-]{35})\b"
    # A user and a password in a URL, as of a proxy, a database or a package index; words that stand for one are none.
    rb"|://[^\s/:@\"'<>{}$]+:(?!(?:password|passwd|secret|token)@)[^\s/:@\"'<>{}$]{6,}@"
    # A long text with digits in it that is assigned to such a name, as in wandb's, AWS's and npm's files.
    rb"|(?i:api_?key|access_?key|secret|token|passw(?:or)?d)[\"']?[ \t]*[=:][ \t]*[\"']?"
    rb"(?=[A-Za-z+/_-]*[0-9])[A-Za-z0-9+/_-]{32,}"
)
SECRET_FILE = re.compile(
    r"\.env(\.(?!example|sample|template|dist).*)?|\.envrc|\.netrc|\.pgpass|\.pypirc|\.git-credentials|id_(rsa|dsa|ecdsa|ed25519)"
    r"|credentials(\.json)?|application_default_credentials\.json|client_secret.*\.json"
)


@dataclass(frozen=True)
class Member:
    """A file of a bundle: its path below the bundle's folder, its content, and whether it can be executed."""

    name: str
    content: bytes
    executable: bool = False

    @property
    def mode(self) -> int:
        """The permissions that it gets."""
        return 0o755 if self.executable else 0o644


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
        Member("README.md", _readme(facts_of_run, facts, record, code, values).encode()),
        Member(CONFIG, config),
        Member(LOCK, _lock(facts).encode()),
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
    known, unknown = _known_secrets(run_dir)
    _refuse_secrets(run_dir, [first, *members], known, allow)
    if unknown:
        code.warnings.append(
            f"unknown in this shell, so the check of the bundle could not look for these secrets: {some(unknown)}"
        )
    name = info["name"] if NAME.fullmatch(info["name"]) else "run"  # the record may be somebody else's
    return Packed(f"{name}-{run_dir.id}", int(info["created"]), [first, *members], code.warnings)


def with_digest(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the list of a bundle with a digest of itself, by which a damaged one is found."""
    rest = {name: value for name, value in manifest.items() if name != "digest"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return {**rest, "digest": hashlib.sha256(text.encode()).hexdigest()}


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


# The code.


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
        if _matches(name, exclude):
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
        if is_inside(name) and not _matches(name, exclude):
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


def is_inside(name: str) -> bool:
    """Return whether a path stays within the folder that it is relative to."""
    parts = name.split("/")
    return bool(name) and not name.startswith("/") and "\0" not in name and not {"..", "", "."} & set(parts)


def leads_inside(name: str, target: str, links: Mapping[str, str]) -> bool:
    """Return whether a link stays within the folder that its name is relative to, whatever other links there are."""
    below_a_link = any(name.startswith(f"{other}/") for other in links)
    plain = os.path.normpath(target) == target.rstrip("/")  # after a link, `..` is not where it seems to be
    return plain and not below_a_link and is_inside(os.path.normpath(os.path.join(os.path.dirname(name), target)))


def _matches(name: str, patterns: Sequence[str]) -> bool:
    plain = [pattern.removeprefix("code/") for pattern in patterns]
    return any(fnmatch.fnmatchcase(name, each) or fnmatch.fnmatchcase(Path(name).name, each) for each in plain)


def some(names: Sequence[str], most: int = 5, separator: str = ", ") -> str:
    """Return the first few of these in a line, and how many there are besides."""
    return printable(separator.join(names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")


# Secrets.


def _refuse_secrets(run_dir: RunDir, members: Iterable[Member], known: Mapping[str, str], allow: Sequence[str]) -> None:
    """Raise ConfigError if a file holds a value that is secret here, or looks like a secret itself."""
    found: list[str] = []
    for member in members:
        of_code = member.name.startswith("code/")
        content = member.content
        name = next((name for name, value in known.items() if bytes_of(value) in content), None)
        if name is not None:
            found.append(f"{member.name} contains the value of {name}")
            continue
        if _matches(member.name.removeprefix("code/"), allow):
            continue
        if member.name == PATCH:
            content = bytes_of(without_files(content.decode(errors="surrogateescape"), allow))
        if of_code and SECRET_FILE.fullmatch(Path(member.name).name):
            found.append(f"{member.name} is a file that usually holds secrets")
        elif match := SECRET_TEXT.search(content):
            line = content.count(b"\n", 0, match.start()) + 1
            found.append(f"{member.name} seems to contain a secret, in line {line}")
    if not _matches(CONFIG, allow):
        found += [
            f"{CONFIG}: {key} looks like a secret that is written out" for key in _written_out(run_dir.config_values())
        ]
    if found:
        raise ConfigError(
            f"a bundle must not contain secrets, but {some(found, separator='; ')}",
            hint="--exclude PATTERN leaves files of the code out; --allow PATTERN packs what only looks like a secret; a "
            "variable of this shell whose value is none can be unset",
        )


def without_files(diff: str, patterns: Sequence[str]) -> str:
    """Return a diff of git's without the parts on files that match one of these patterns."""
    if not patterns:
        return diff
    parts = re.split(r"^(?=diff --git )", diff, flags=re.MULTILINE)
    return "".join(part for part in parts if not any(_matches(name, patterns) for name in _files_of(part)))


def _files_of(part: str) -> Iterator[str]:
    """Yield the names of the file that a part of a diff is about, before and after."""
    head = part.partition("\n@@")[0].splitlines()
    for line in head[1:]:
        if found := re.match(r"(?:---|\+\+\+|rename from|rename to|copy from|copy to) \"?(.*?)\"?\t?$", line):
            yield found[1]
            yield found[1].partition("/")[2]  # after git's a/ and b/
    for name in head[0].split()[2:] if head else ():  # of an empty or a binary file
        yield name.strip('"').partition("/")[2]


def _known_secrets(run_dir: RunDir) -> tuple[dict[str, str], list[str]]:
    """Return the secrets whose value is known here, of this shell by name and of the run, and the names of the run's others."""
    found = {name: value for name, value in os.environ.items() if SECRET_VARIABLE.search(name)}
    values, unknown = run_dir.config_values(), []
    named = values.get("secrets") if isinstance(values, Mapping) else None
    for name, source in named.items() if isinstance(named, Mapping) else ():
        try:
            found |= secrets.read({str(name): str(source)})
        except ConfigError:
            unknown.append(str(name))
    return {name: value for name, value in found.items() if len(value) >= SHORTEST}, unknown


def _written_out(values: Any, where: str = "") -> Iterator[str]:
    """Yield the keys of a config whose name is a secret's, and whose value is no reference to a variable."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            place = f"{where}.{key}".lstrip(".")
            if where == "secrets":
                continue
            if SECRET_VARIABLE.search(str(key)) and isinstance(value, str) and value and "${oc.env:" not in value:
                yield place
            else:
                yield from _written_out(value, place)
    elif isinstance(values, list):
        for index, value in enumerate(values):
            yield from _written_out(value, f"{where}[{index}]")


# What a person reads.


def _lock(facts: ProcessFacts) -> str:
    """Return the packages as pip reads them. Those that an index has not are given by their URL, or as a comment."""
    python = facts.system.get("python", "an unknown version")
    lines = [f"# What the newest attempt ran with, on Python {python}: pip install -r {LOCK}"]
    local = {
        version.partition("+")[2] for name, version in facts.packages.items() if name == "torch" and "+" in version
    }
    lines += [
        f"--extra-index-url {TORCH_INDEX}/{build}" for build in sorted(local) if re.fullmatch("[a-z0-9.]+", build)
    ]
    for name, version in sorted(facts.packages.items()):
        origin = facts.origins.get(name)
        if not re.fullmatch(r"[a-z0-9-]+", name) or not re.fullmatch(r"[A-Za-z0-9.!+_-]+", version):
            continue  # a line of a record that somebody else may have written
        if origin is None:
            lines.append(f"{name}=={version}")
        elif re.fullmatch(r"(git\+)?(https|ssh)://\S+", origin):
            lines.append(f"{name} @ {origin}")
        else:
            lines.append(f"# {name}=={version}, installed from {' '.join(printable(origin).split())}")
    return "\n".join(lines) + "\n"


def _readme(run: Mapping[str, Any], facts: ProcessFacts, record: CodeRecord, code: _Code, config: Any) -> str:
    revision = "unknown"
    if record.revision:
        revision = f"git {record.revision}" + (f" ({record.branch})" if record.branch else "")
        revision += f", of {record.remote}" if record.remote else ""
        revision += ", with changes (changes.patch)" if record.dirty else words_for_changes(record.dirty)
    image = (run.get("image") or {}) if isinstance(run.get("image"), dict) else {}
    where = "code/" if run["workdir"] else "not in this bundle: the run ran in place"
    lines = [
        f"# {run['name']}, run {run['run']}",
        "",
        "A run of slurmtrain, packed to be run again elsewhere. Look at what is in it before you do: it is run as you.",
        "",
        f"First install slurmtrain {run.get('version', '')}, then:",
        "",
        f"    pip install -r {LOCK}            # the packages that it ran with",
        "    python -m slurmtrain submit --from BUNDLE               # on the same cluster, with the same config",
        "    python -m slurmtrain +cluster=NAME submit --from BUNDLE   # on another one; +cluster=local: on this machine",
        "    python -m slurmtrain +cluster=NAME train.steps=100 submit --from BUNDLE   # with other values",
        "",
        f"- code: {where}; {revision}",
        f"- config: {CONFIG}, with the hash {run.get('config_hash')}; typed as: {' '.join(run.get('overrides') or ()) or '-'}",
        f"- Python {facts.system.get('python', '?')} on {facts.system.get('os', '?')}, {facts.system.get('machine', '?')}",
    ]
    if facts.gpu:
        lines.append("- " + ", ".join(f"{name} {value}" for name, value in sorted(facts.gpu.items())))
    if image:
        lines.append("- container: " + ", ".join(str(value) for _, value in sorted(image.items())))
    paths = sorted(set(_paths(config)))
    if paths:
        lines += ["", "Paths that the config names, which have to be there, or to be given anew:", ""]
        lines += [f"- {key}: {path}" for key, path in paths]
    if code.links_out:
        lines += ["", "Links of the code that lead elsewhere, which are not in this bundle:", ""]
        lines += [f"- {name} -> {target}" for name, target in sorted(code.links_out.items())]
    names = sorted(config.get("secrets") or ()) if isinstance(config, Mapping) else []
    if names:
        lines += ["", f"Secrets that the run needs, and that are not in this bundle: {', '.join(map(str, names))}"]
    text = "\n".join(printable(str(line)) for line in lines) + "\n"
    return str(redacted(text))


def _paths(values: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """Yield key and value of the absolute paths in a config that a run elsewhere has to find."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from _paths(value, f"{where}.{key}".lstrip("."))
    elif isinstance(values, list):
        for value in values:
            yield from _paths(value, where)
    elif isinstance(values, str) and values.startswith("/") and where != "job.runs_dir" and len(values) > 1:
        yield where, values
