"""What must not go into a bundle: values that are known to be secrets, and texts and files that look like one."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slurmtrain.config import secrets
from slurmtrain.errors import ConfigError
from slurmtrain.launch.bundle_format import CONFIG, PATCH, Member, matches, some
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system.redaction import SECRET_VARIABLE, SHORTEST, bytes_of

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


def refuse_secrets(run_dir: RunDir, members: Iterable[Member], known: Mapping[str, str], allow: Sequence[str]) -> None:
    """Raise ConfigError if a file holds a value that is secret here, or looks like a secret itself."""
    found: list[str] = []
    for member in members:
        of_code = member.name.startswith("code/")
        content = member.content
        name = next((name for name, value in known.items() if bytes_of(value) in content), None)
        if name is not None:
            found.append(f"{member.name} contains the value of {name}")
            continue
        if matches(member.name.removeprefix("code/"), allow):
            continue
        if member.name == PATCH:
            content = bytes_of(without_files(content.decode(errors="surrogateescape"), allow))
        if of_code and SECRET_FILE.fullmatch(Path(member.name).name):
            found.append(f"{member.name} is a file that usually holds secrets")
        elif match := SECRET_TEXT.search(content):
            line = content.count(b"\n", 0, match.start()) + 1
            found.append(f"{member.name} seems to contain a secret, in line {line}")
    if not matches(CONFIG, allow):
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
    return "".join(part for part in parts if not any(matches(name, patterns) for name in _files_of(part)))


def _files_of(part: str) -> Iterator[str]:
    """Yield the names of the file that a part of a diff is about, before and after."""
    head = part.partition("\n@@")[0].splitlines()
    for line in head[1:]:
        if found := re.match(r"(?:---|\+\+\+|rename from|rename to|copy from|copy to) \"?(.*?)\"?\t?$", line):
            yield found[1]
            yield found[1].partition("/")[2]  # after git's a/ and b/
    for name in head[0].split()[2:] if head else ():  # of an empty or a binary file
        yield name.strip('"').partition("/")[2]


def known_secrets(run_dir: RunDir) -> tuple[dict[str, str], list[str]]:
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
