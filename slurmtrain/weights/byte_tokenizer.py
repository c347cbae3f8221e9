"""The tokenizer "bytes" as a tokenizer.json of Hugging Face: each byte of a text is a token, whose id is the byte."""

from __future__ import annotations

import json
from typing import Any


def files(bos: int | None, eos: int | None) -> dict[str, bytes]:
    """Return tokenizer.json and tokenizer_config.json by name.

    Args:
        bos, eos: ids of the tokens before and after a document; None: there is none.
    """
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    letters = _letters()
    # A separator that is a byte would be taken for a special token in the middle of a text, where it is a byte like others.
    above = {id: f"<|{id}|>" for id in (bos, eos) if id is not None and id > 255}
    special = {"id": 0, "special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{**special, "id": id, "content": text} for id, text in sorted(above.items())],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {
                **{letter: byte for byte, letter in enumerate(letters)},
                **{text: id for id, text in above.items()},
            },
            "merges": [],
        },
    }
    names = {"bos_token": above.get(bos or 0), "eos_token": above.get(eos or 0)}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{name: text for name, text in names.items() if text is not None},
    }
    return {"tokenizer.json": _json(tokenizer), "tokenizer_config.json": _json(config)}


def _letters() -> list[str]:
    """Return the character that stands for each byte in a byte-level vocabulary, as GPT-2's encoder.py assigns them."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + number) for number, byte in enumerate(others)}
    return [letters[byte] for byte in range(256)]


def _json(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, indent=1, ensure_ascii=False) + "\n").encode()
