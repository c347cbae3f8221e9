"""Secrets of a run: read their values, and check that no config contains one.

`secrets:` maps the name of an environment variable, which every rank gets, to the source of its value: "env", the
environment of the shell that submits, or "file:PATH". The config and the script hold names and paths only.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, TextIO, cast

from slurmtrain.config.overrides import all_keys
from slurmtrain.errors import ConfigError
from slurmtrain.system.redaction import SHORTEST, bytes_of, hide, redact, redact_bytes

ENV, FILE = "env", "file:"


def path_of(source: str) -> Path | None:
    """Return the path of a secret whose source is a file; None for other sources."""
    return Path(source.removeprefix(FILE)).expanduser() if source.startswith(FILE) else None


def read(secrets: Mapping[str, str]) -> dict[str, str]:
    """Return the values of the secrets, by name.

    Raises:
        ConfigError: a source is not valid, a variable is not set, or a file is missing or readable by others.
    """
    return {name: _read(name, source) for name, source in secrets.items()}


def given(secrets: Mapping[str, str]) -> dict[str, str]:
    """Return the values for a rank.

    If a launcher started its attempt, it has read the files, which a container may not see.

    Raises:
        ConfigError: as `read`.
    """
    from slurmtrain.runs.run_dir import ATTEMPT_VARIABLE  # only a rank gets here

    supervised = ATTEMPT_VARIABLE in os.environ
    return read(dict.fromkeys(secrets, ENV) if supervised else secrets)


def take(secrets: Mapping[str, str]) -> None:
    """Put the values into this process's environment, and redact them in all its output.

    Raises:
        ConfigError: as `read`.
    """
    values = given(secrets)
    os.environ.update(values)
    hide(values)
    if values:
        redact_output()


def redact_output() -> None:
    """Redact what Python prints from now on, tracebacks and bytes too.

    Not seen: other processes, what C libraries write, and what is written to a file descriptor.
    """
    for name in ("stdout", "stderr", "__stdout__", "__stderr__"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, _Redacting):
            setattr(sys, name, cast(TextIO, _Redacting(stream)))


class _Redacting:
    """A stream of text or of bytes in front of another one."""

    def __init__(self, stream: Any):
        self._stream = stream

    def write(self, data: Any) -> int:
        if isinstance(data, str):
            self._stream.write(redact(data))
            return len(data)
        self._stream.write(redact_bytes(bytes(data)))
        return memoryview(data).nbytes

    def writelines(self, lines: Iterable[Any]) -> None:
        for line in lines:
            self.write(line)

    @property
    def buffer(self) -> _Redacting:
        return _Redacting(self._stream.buffer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def refuse_written_out(values: Mapping[str, str], config: Mapping[str, Any], overrides: Sequence[str]) -> None:
    """Raise if a config or an override contains the value of a secret, which would be written to disk in clear text.

    Raises:
        ConfigError: one does; the message does not repeat the value.
    """
    if not values:
        return
    fields = frozenset(part for key in all_keys() for part in key.split("."))  # which are no secret
    places = [*scalars(config, fields), *((f"an override ({word.partition('=')[0]})", word) for word in overrides)]
    for name, value in values.items():
        for where in (where for where, text in places if len(value) >= SHORTEST and value in text):
            raise _written_out(where, name, f"in a config, write ${{oc.env:{name}}}")


def refuse_pickled(values: Mapping[str, str], pickled: bytes, what: str) -> None:
    """Raise if bytes that are about to be written contain the value of a secret.

    Raises:
        ConfigError: a secret is in them.
    """
    for name, value in values.items():
        if len(value) >= SHORTEST and bytes_of(value) in pickled:
            raise _written_out(what, name, "read it there, inside the function")


def _written_out(where: str, name: str, instead: str) -> ConfigError:
    return ConfigError(
        f"{where} holds the value of the secret {name}, which would be stored on disk in clear text",
        hint=f"every rank has it in its environment as {name}; {instead}",
    )


def _read(name: str, source: str) -> str:
    path = path_of(source)
    if path is not None:
        value = _read_file(name, path)
    elif source == ENV:
        if name not in os.environ:
            raise ConfigError(
                f"secrets.{name} is env, but the environment variable {name} is not set",
                hint=f"export {name}=... in the shell that submits, or put it into a file: secrets.{name}=file:PATH",
            )
        value = os.environ[name]
    else:  # the source may be the secret itself
        raise ConfigError(
            f"secrets.{name} is neither env nor file:PATH", hint="it must say where the value is, not what it is"
        )
    if not value or "\0" in value:
        raise ConfigError(f"secrets.{name}={source} does not contain a valid value of an environment variable")
    return value


def _read_file(name: str, path: Path) -> str:
    what = f"secrets.{name}=file:{path}"
    if not path.is_absolute():
        raise ConfigError(f"{what}: the path must be absolute, since the job runs elsewhere", hint="file:~/.hf_token")
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o7177:
            raise ConfigError(f"{what}: must be a file of your own that nobody else may read", hint=f"chmod 600 {path}")
        return path.read_text().rstrip("\n")  # the same as $(< file) in the batch script
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{what}: cannot be read: {getattr(error, 'strerror', None) or 'it is not text'}",
            hint="the file must contain only the value",
        ) from None


def scalars(value: Any, fields: AbstractSet[str] = frozenset(), where: str = "") -> Iterator[tuple[str, str]]:
    """Yield each value of a config and each key that a person has chosen, with the place where it stands."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if key not in fields:
                yield f"a key of {where or 'the config'}", str(key)
            yield from scalars(item, fields, f"{where}.{key}".lstrip("."))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from scalars(item, fields, f"{where}[{index}]")
    else:
        yield where, str(value)
