"""Messages between ranks as bytes: JSON, and raw bytes after it. Reading a message executes nothing, whoever has sent it.

A message is a word of 4 bytes, the uint64 length of the JSON, the JSON, then all `bytes` values one after another. In the
JSON each of these is an object with the one key BYTES and the value [first byte, length], counted from the end of the JSON.
Numbers are little-endian. Anything after the last of them is ignored, so that messages can be padded to one length.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

from slurmtrain.errors import (
    CheckpointError,
    CheckpointMismatchError,
    DiscardedError,
    LostPeersError,
    NodeFolderError,
    NonFiniteError,
    SlurmtrainError,
    SupersededError,
    UnreadableError,
)

WORD = b"STM1"
HEAD = struct.Struct("<4sQ")
BYTES = "\0bytes"  # begins with what no name of an object begins with
LONGEST = 1 << 40  # bytes; more is no message

# The only errors that a message can name. Never a class by its path: importing what somebody names would execute it.
FAILURES: Mapping[str, type[CheckpointError]] = {
    "checkpoint": CheckpointError,
    "mismatch": CheckpointMismatchError,
    "unreadable": UnreadableError,
    "superseded": SupersededError,
    "lost": LostPeersError,
    "discarded": DiscardedError,
    "not finite": NonFiniteError,
    "node folder": NodeFolderError,
}
_WORDS = {kind: word for word, kind in FAILURES.items()}


def encode(value: Any) -> bytes:
    """Return the message of a value: None, bool, int, float, str, bytes, and lists and dicts (by str) of them.

    Raises:
        TypeError: it is or has something else, which would arrive as another type or not at all.
    """
    parts: list[bytes] = []
    text = json.dumps(_plain(value, parts, [0]), separators=(",", ":")).encode()
    return b"".join([HEAD.pack(WORD, len(text)), text, *parts])


def _plain(value: Any, parts: list[bytes], end: list[int]) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is bytes:
        begin = end[0]
        parts.append(value)
        end[0] += len(value)
        return {BYTES: [begin, len(value)]}
    if kind is list:
        return [_plain(each, parts, end) for each in value]
    if kind is dict:
        if not all(type(key) is str and key != BYTES for key in value):
            raise TypeError("the keys of a message have to be text")
        return {key: _plain(each, parts, end) for key, each in value.items()}
    raise TypeError(f"{kind.__name__} is nothing that ranks tell each other: turn it into plain values first")


def decode(data: memoryview) -> Any:
    """Return the value of a message.

    Raises:
        CheckpointError: it is no message; nothing in it has been executed.
    """
    try:
        word, length = HEAD.unpack_from(data)
        if word != WORD or HEAD.size + length > len(data):
            raise ValueError
        rest = data[HEAD.size + length :]

        def bytes_of(values: dict[str, Any]) -> Any:
            if BYTES not in values:
                return values
            begin, size = values[BYTES]
            if type(begin) is not int or type(size) is not int or not 0 <= begin <= begin + size <= len(rest):
                raise ValueError
            return bytes(rest[begin : begin + size])

        return json.loads(bytes(data[HEAD.size : HEAD.size + length]), object_hook=bytes_of)
    except (ValueError, TypeError, RecursionError, struct.error):
        raise CheckpointError(
            f"a rank has sent {bytes(data[:8])!r}, which is not the beginning of a message between ranks; it was ignored",
            hint="do all ranks run the same version of slurmtrain? If so, another program sent it",
        ) from None


def encode_failure(error: SlurmtrainError) -> list[str | None]:
    """Return [word of its kind, message, hint]; of an error that has no word, that of the nearest class above it."""
    word = next((_WORDS[kind] for kind in type(error).__mro__ if kind in _WORDS), "checkpoint")
    return [word, error.message, error.hint]


def decode_failure(values: Any) -> CheckpointError:
    """Return the error that another rank has told. Of an unknown kind, or told wrongly, it is a plain CheckpointError."""
    if isinstance(values, list) and len(values) == 3 and isinstance(values[1], str):
        word, message, hint = values
        kind = FAILURES.get(word, CheckpointError) if isinstance(word, str) else CheckpointError
        return kind(message, hint=hint if isinstance(hint, str) else None)
    return CheckpointError(f"a rank has failed and told {str(values)[:200]!r} as the reason")
