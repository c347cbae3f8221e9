"""Redaction of secrets in everything that this process writes: its records, its error messages, and what Python prints.

The secret values belong to the process, as its environment does, from which they come. Only the exact text of a value
is replaced: one that is shown in another form (cut, quoted, encoded) is not found, nor is one that is too short to be
told from other text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# Names of variables and fields whose values are likely to be secret.
SECRET_NAME = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|CREDENTIAL)", re.IGNORECASE)
# A narrower pattern, for actions that depend on a name alone: tokenizers have "token" in their names, too.
SECRET_VARIABLE = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY)$", re.IGNORECASE)
SHORTEST = 6  # characters; a shorter value would turn up by chance
_hidden: dict[str, str] = {}  # value -> what stands for it; longer ones first


def hide(values: Mapping[str, str]) -> None:
    """Replace each of these values by `***NAME***` from now on."""
    known = {**_hidden, **{value: f"***{name}***" for name, value in values.items() if len(value) >= SHORTEST}}
    _hidden.clear()
    _hidden.update(sorted(known.items(), key=lambda pair: -len(pair[0])))  # one may be a part of another


def redact(text: str) -> str:
    """Return the text without secrets."""
    for value, stand_in in _hidden.items():
        text = text.replace(value, stand_in)
    return text


def redact_bytes(data: bytes) -> bytes:
    """Return bytes without secrets."""
    for value, stand_in in _hidden.items():
        data = data.replace(bytes_of(value), stand_in.encode())
    return data


def holds_secret(data: bytes) -> bool:
    """Return whether bytes that cannot be redacted contain a secret."""
    return any(bytes_of(value) in data for value in _hidden)


def bytes_of(value: str) -> bytes:
    """Return the bytes of a variable of the environment, which need not be UTF-8."""
    return value.encode(errors="surrogateescape")


def redacted(value: Any) -> Any:
    """Return a JSON value with every text in it redacted; keys are unchanged."""
    if not _hidden:
        return value
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {key: redacted(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redacted(item) for item in value]
    return value
