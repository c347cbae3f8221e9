"""Tokenizers: text -> ids, as a prepared data set needs them.

Imports no torch, and a tokenizer's package only if its file is used.

There are two kinds: "bytes" (built in), and a `tokenizer.json` of Hugging Face `tokenizers`. A tokenizer's identity is the
sha256 of its file. Special tokens within a text are encoded as plain text; the caller adds each document's bos and eos,
whose ids are in `facts`.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from slurmtrain.data.format.manifest import Kind, TokenizerFacts
from slurmtrain.errors import ConfigError

BYTES: Literal["bytes"] = "bytes"
SEPARATOR = 0  # bytes: ends a document; a text has no use for it
# Common names of the token that ends a document: used if a vocabulary has exactly one of them.
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
NO_TOKEN = "none"
MAX_SPECIAL = 1024  # ids that special tokens which the file does not name may have behind its vocabulary

Ids = NDArray[np.uint8] | NDArray[np.uint32]
Spans = Sequence[tuple[int, int]]  # begin and end of parts of a text, in characters, increasing and apart


class Tokenizer(Protocol):
    """The interface of all kinds of tokenizers."""

    facts: TokenizerFacts

    def encode_batch(self, texts: Sequence[str]) -> Sequence[Ids]:
        """Return the ids of each text [tokens], without bos and eos."""

    def encode_chats(self, texts: Sequence[str], spans: Sequence[Spans]) -> Sequence[tuple[Ids, NDArray[np.uint8]]]:
        """Return the ids of each text [tokens], and 1 for each token that ends within one of its spans, else 0 [tokens].

        Here special tokens within a text, which a chat template writes, are what they stand for.

        Raises:
            ConfigError: tokenizers of this kind have no special tokens.
        """


@dataclass(frozen=True)
class TokenizerChoice:
    """The user's settings of a tokenizer.

    Attributes:
        name: "bytes", or the path of a tokenizer.json.
        bos, eos: a token's id or text, or "none". None: no bos; the eos that the file names.
    """

    name: str = BYTES
    bos: str | None = None
    eos: str | None = None


def load_tokenizer(choice: TokenizerChoice) -> tuple[Tokenizer, bytes]:
    """Return the tokenizer and the bytes of its file (empty for "bytes").

    Raises:
        ConfigError: there is no such file, it cannot be read, its package is missing, or it is not clear which token
            ends a document.
    """
    if choice.name == BYTES:
        return _Bytes(choice), b""
    path = Path(choice.name)
    if path.suffix != ".json":
        inside = path / "tokenizer.json"  # a folder as transformers takes it
        raise ConfigError(
            f"prepare.tokenizer={choice.name} is not a known tokenizer",
            hint=f"prepare.tokenizer={inside}" if inside.is_file() else '"bytes", or a tokenizer.json of Hugging Face',
        )
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"prepare.tokenizer={choice.name} cannot be read: {error.strerror}") from None
    return _HuggingFace(choice, content), content


def needed(module: str, what: str) -> ModuleType:
    """Import and return a module of the extra `data`.

    Raises:
        ConfigError: the module is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(
            f"{what} needs the package {module.partition('.')[0]}, which is not installed",
            hint="pip install 'slurmtrain[data]'",
        ) from None


class _Bytes:
    def __init__(self, choice: TokenizerChoice):
        eos = SEPARATOR if choice.eos is None else _special(choice, "eos", {}, 256)
        self.facts = _facts(BYTES, b"", 256, _special(choice, "bos", {}, 256), eos)

    def encode_batch(self, texts: Sequence[str]) -> Sequence[Ids]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def encode_chats(self, texts: Sequence[str], spans: Sequence[Spans]) -> Sequence[tuple[Ids, NDArray[np.uint8]]]:
        found = []
        for text, inside in zip(texts, spans, strict=True):
            ids = np.frombuffer(text.encode(), np.uint8)
            mask = np.zeros(len(ids), np.uint8)
            place = position = 0  # the same place in characters and in bytes
            for begin, end in inside:
                first = position + len(text[place:begin].encode())
                place, position = end, first + len(text[begin:end].encode())
                mask[first:position] = 1
            found.append((ids, mask))
        return found


class _HuggingFace:
    def __init__(self, choice: TokenizerChoice, content: bytes):
        tokenizers = needed("tokenizers", f"prepare.tokenizer={choice.name}")
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # tokenizers raises nothing more specific
            raise ConfigError(
                f"prepare.tokenizer={choice.name} is not a Hugging Face tokenizer.json: {error}"
            ) from None
        if getattr(self._tokenizer.model, "dropout", None):
            raise ConfigError(
                f"prepare.tokenizer={choice.name} encodes at random (model.dropout={self._tokenizer.model.dropout:g})",
                hint="set dropout to null in that file",
            )
        # A file may ask for both, which would cut documents and fill them up.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # the words of the package for: special tokens are plain text
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        size = max(vocabulary.values(), default=0) + 1
        added = self._tokenizer.get_added_tokens_decoder().values()
        special = [token.content for token in added if token.special]
        eos = (
            _only_end(choice, vocabulary, special) if choice.eos is None else _special(choice, "eos", vocabulary, size)
        )
        self.facts = _facts("tokenizers", content, size, _special(choice, "bos", vocabulary, size), eos)

    def encode_batch(self, texts: Sequence[str]) -> Sequence[Ids]:
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    def encode_chats(self, texts: Sequence[str], spans: Sequence[Spans]) -> Sequence[tuple[Ids, NDArray[np.uint8]]]:
        self._tokenizer.encode_special_tokens = False
        try:
            encodings = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        finally:
            self._tokenizer.encode_special_tokens = True
        found = []
        added = np.array(list(self._tokenizer.get_added_tokens_decoder()), np.uint32)
        for encoding, inside in zip(encodings, spans, strict=True):
            ids = np.array(encoding.ids, np.uint32)
            begins, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
            # Some special tokens take the blanks after them along (Phi 3), which are not in the span.
            ends = np.where(np.isin(ids, added), begins + 1, ends)
            mask = np.zeros(len(begins), np.uint8)
            for begin, end in inside:
                # The first one may begin before the span, with the blank of a prompt that ends in one.
                mask |= (((begins >= begin) | (ends > begin)) & (begins < end) & (ends <= end)).astype(np.uint8)
            found.append((ids, mask))
        return found


def _special(
    choice: TokenizerChoice, which: Literal["bos", "eos"], vocabulary: dict[str, int], size: int
) -> int | None:
    """Return the id of the token that the user has named by its text or number; None for "none" or nothing."""
    word: str | None = getattr(choice, which)
    if word is None or word == NO_TOKEN:
        return None
    if word.isascii() and word.isdigit():
        if int(word) < size + MAX_SPECIAL:
            return int(word)
        raise ConfigError(f"prepare.{which}={word} is far beyond the {size} ids of {choice.name}")
    if word in vocabulary:
        return vocabulary[word]
    raise ConfigError(
        f"prepare.{which}={word} is not a token of {choice.name}", hint=f"give its text or id, or {NO_TOKEN}"
    )


def _only_end(choice: TokenizerChoice, vocabulary: dict[str, int], special: Sequence[str]) -> int:
    """Return the id of the only token that is known to end a document.

    Args:
        special: the vocabulary's special tokens. One of these comes before any that is a piece of text like others, as
            "</s>" of HTML is in Qwen's.

    Raises:
        ConfigError: the vocabulary has none of the known ones, or several.
    """
    known = [token for token in END_TOKENS if token in vocabulary]
    found = [token for token in known if token in special] or known
    if len(found) == 1:
        return vocabulary[found[0]]
    what = f"has {' and '.join(found)}" if found else f"has none of {', '.join(END_TOKENS)}"
    raise ConfigError(
        f"it is not clear which token ends a document: {choice.name} {what}",
        hint=f"prepare.eos= its text or id, or {NO_TOKEN}",
    )


def _facts(kind: Kind, content: bytes, size: int, bos: int | None, eos: int | None) -> TokenizerFacts:
    size = max([size, *(special + 1 for special in (bos, eos) if special is not None)])
    if kind == BYTES:
        return TokenizerFacts(kind, None, None, size, bos, eos)
    return TokenizerFacts(kind, "tokenizer.json", hashlib.sha256(content).hexdigest(), size, bos, eos)
