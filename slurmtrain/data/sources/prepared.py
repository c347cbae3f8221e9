"""`data=prepared`: the output of `prepare` as a source of training and evaluation data."""

from __future__ import annotations

import functools
import hashlib
import os
from pathlib import Path

from slurmtrain.data.format.manifest import Manifest, read_manifest
from slurmtrain.data.format.reading import TokenStream
from slurmtrain.data.format.rows import Rows, Windows, best_fit_rows, document_rows, row_index
from slurmtrain.data.format.tokens import PackedTokens
from slurmtrain.errors import ConfigError, nearest

PACKINGS = ("concat", "best_fit", "documents")


class PreparedText:
    """The tokens of a folder that `prepare` has written.

    Args:
        path: the folder; all ranks must see it.
        seq_len: S, tokens of a sample; for packing="documents", of the longest one.
        packing: what a sample consists of. "concat": the documents end to end, cut every S tokens. "best_fit": whole
            documents, packed so that hardly any room is left; only those longer than S are cut. "documents": one
            document, without what it has after S + 1 tokens, so samples differ in length.
        document_mask: of "best_fit": attention does not cross documents, and positions restart; False: documents see
            those before them in their row.

    Attributes:
        train, valid: `PackedTokens` of these splits; valid may be None.
        fingerprint: digest of data and packing; sources with equal fingerprints have the same sample i for every i.
        vocab_size: number of token ids of the tokenizer.
        description: one line for a person.

    Raises:
        ConfigError: an argument is out of range, or the data is not what was prepared.
        DataError: the data cannot be read at the moment.
    """

    def __init__(
        self,
        path: str,
        seq_len: int,
        packing: str = "concat",
        document_mask: bool | None = None,
    ):
        if seq_len < 1:
            raise ConfigError(f"data.seq_len is {seq_len}, it must be at least 1", hint="e.g. data.seq_len=4096")
        if packing not in PACKINGS:
            raise ConfigError(f"data.packing is {packing!r}", hint=nearest(str(packing), PACKINGS))
        if packing != "best_fit" and document_mask:
            raise ConfigError(
                f"data.document_mask={document_mask} with data.packing={packing}: rows of whole documents can be masked",
                hint="data.packing=best_fit masks documents, and leaves hardly any padding",
            )
        self._folder = Path(path).expanduser()
        self._manifest = read_manifest(self._folder)
        self._seq_len, self._packing = seq_len, packing
        self._document_mask = packing == "best_fit" and document_mask is not False
        self.train = self._open("train")
        self.valid = self._open("valid") if "valid" in self._manifest.splits else None
        self.vocab_size = self._manifest.tokenizer.vocab_size
        settings = f"{self._manifest.fingerprint} {seq_len} {packing} {self._document_mask}"
        self.fingerprint = hashlib.sha256(settings.encode()).hexdigest()
        split = self._manifest.splits["train"]
        self.description = (
            f"prepared data in {self._folder}: {split.documents:,} documents, {split.tokens:,} tokens, "
            f"{len(self.train):,}{f' + {len(self.valid):,}' if self.valid else ''} samples of "
            f"{'up to ' if packing == 'documents' else ''}{seq_len} tokens ({packing})"
        )

    def _open(self, split: str) -> PackedTokens:
        manifest = self._manifest
        stream = TokenStream(self._folder, manifest, split)
        return PackedTokens(
            stream,
            self._rows(stream),
            seq_len=self._seq_len,
            ragged=self._packing == "documents",
            document_mask=self._document_mask,
            num_bytes=_text_bytes(manifest, split, self._packing),
        )

    def _rows(self, stream: TokenStream) -> Rows:
        if self._packing == "concat":
            return Windows(stream.tokens, self._seq_len)
        name = f"{self._packing}-{self._seq_len}"
        pack = best_fit_rows if self._packing == "best_fit" else document_rows
        made_from = hashlib.sha256(f"{self._manifest.fingerprint} {stream.name} {name}".encode()).hexdigest()
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        folders = [self._folder / "packed", cache / "slurmtrain" / "packed"]
        return row_index(stream, name, made_from, folders, functools.partial(pack, seq_len=self._seq_len))


def _text_bytes(manifest: Manifest, split: str, packing: str) -> int | None:
    """Return the UTF-8 bytes of the text that all targets of a split stand for; None where that is not known."""
    held, tokenizer = manifest.splits[split], manifest.tokenizer
    if manifest.chat is not None or packing == "documents":  # only some count, or some are cut off
        return None
    if packing == "concat" or tokenizer.bos is not None:
        return held.bytes  # of "concat" all but those of the very first token of the split
    # Without bos nothing predicts the first token of a document.
    return held.bytes - held.documents if tokenizer.kind == "bytes" else None
