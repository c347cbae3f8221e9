"""Tokenizers: what they make of a text is the text again, whole, and what they are is on record."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

import pytest
import regex
import tiktoken
from tiktoken_ext import openai_public
from tokenizers import Tokenizer

from slurmtrain.data.format.tokenizers import ENCODINGS, TokenizerChoice, load_tokenizer
from slurmtrain.errors import ConfigError
from tests.support.raw_text import texts, write_ranks, write_tokenizer

TEXTS = [*texts(20, seed=5), "", "a <|endoftext|> b"]


def test_bytes_are_the_bytes_of_utf8(tmp_path: Path) -> None:
    tokenizer, _ = load_tokenizer(TokenizerChoice())
    assert [bytes(ids) for ids in tokenizer.encode_batch(TEXTS)] == [text.encode() for text in TEXTS]
    assert (tokenizer.facts.vocab_size, tokenizer.facts.dtype, tokenizer.facts.eos) == (256, "uint8", 0)
    with_own = load_tokenizer(TokenizerChoice(eos="256", bos="257"))[0].facts
    assert (with_own.vocab_size, with_own.dtype, with_own.bos, with_own.eos) == (258, "uint16", 257, 256)
    assert load_tokenizer(TokenizerChoice(eos="none"))[0].facts.eos is None


def test_a_tokenizer_json_neither_cuts_nor_fills_nor_takes_text_for_special_tokens(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "tokenizer.json")
    tokenizer, content = load_tokenizer(TokenizerChoice(str(path)))
    facts = tokenizer.facts
    assert (facts.kind, facts.file, facts.eos, facts.vocab_size) == ("tokenizers", "tokenizer.json", 0, 320)
    assert facts.sha256 == hashlib.sha256(path.read_bytes()).hexdigest() and content == path.read_bytes()
    reference = Tokenizer.from_file(str(path))
    for text, ids in zip(TEXTS, tokenizer.encode_batch(TEXTS), strict=True):
        assert reference.decode(ids.tolist(), skip_special_tokens=False) == text
        assert facts.eos not in ids


def test_ranks_of_tiktoken_encode_as_tiktoken_does(tmp_path: Path) -> None:
    path = write_ranks(tmp_path / "mine.tiktoken", b"th", b"the", b"check")
    tokenizer, _ = load_tokenizer(TokenizerChoice(str(path), pattern="gpt2", eos="259"))
    facts = tokenizer.facts
    assert (facts.kind, facts.file, facts.eos, facts.vocab_size) == ("tiktoken", "mine.tiktoken", 259, 260)
    assert facts.pattern is not None and r"\p{L}" in facts.pattern
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"th": 256, b"the": 257, b"check": 258}
    reference = tiktoken.Encoding(
        "mine", pat_str=facts.pattern, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 259}
    )
    for text, ids in zip(TEXTS, tokenizer.encode_batch(TEXTS), strict=True):
        assert ids.tolist() == reference.encode(text, disallowed_special=())
        assert reference.decode(ids.tolist()) == text


def test_an_encoding_by_its_name_brings_its_special_tokens(tmp_path: Path) -> None:
    path = write_ranks(tmp_path / "cl100k_base.tiktoken")
    facts = load_tokenizer(TokenizerChoice(str(path)))[0].facts
    assert (facts.eos, facts.vocab_size) == (100257, 100277)


def test_known_encodings_are_those_of_tiktoken(monkeypatch: pytest.MonkeyPatch) -> None:
    for loader in ("load_tiktoken_bpe", "data_gym_to_mergeable_bpe_ranks"):  # which would ask the network
        monkeypatch.setattr(openai_public, loader, lambda *files, **more: {})
    text = "I'LL don't  stop,\n\n 12345 naïve ΔΕΛΤΑ δέλτα /// 'Tis\t🙂 x_y HTTPServer  "
    for name, encoding in ENCODINGS.items():
        theirs = openai_public.ENCODING_CONSTRUCTORS[name]()
        assert regex.findall(encoding.pattern, text) == regex.findall(theirs["pat_str"], text)
        assert encoding.end == theirs["special_tokens"]["<|endoftext|>"]
        special = max(theirs["special_tokens"].values()) + 1
        assert encoding.vocab_size == theirs.get("explicit_n_vocab", special)


def test_the_end_token_is_the_one_that_can_only_be_meant(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "tokenizer.json")
    content = json.loads(path.read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 320, "content": "</s>"})
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"not clear which token .* has <\|endoftext\|> and </s>") as refused:
        load_tokenizer(TokenizerChoice(str(path)))
    assert "prepare.eos" in str(refused.value.hint)
    facts = load_tokenizer(TokenizerChoice(str(path), eos="</s>", bos="0"))[0].facts
    assert (facts.bos, facts.eos, facts.vocab_size) == (0, 320, 321)
    content["added_tokens"][-1]["special"] = False  # a piece of text like others, as "</s>" of HTML is in Qwen's
    path.write_text(json.dumps(content))
    assert load_tokenizer(TokenizerChoice(str(path)))[0].facts.eos == 0


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        (TokenizerChoice("nowhere.json"), "prepare.tokenizer=nowhere.json cannot be read: No such file"),
        (TokenizerChoice("model.model"), "prepare.tokenizer=model.model is not a known tokenizer"),
        (TokenizerChoice("broken.json"), "prepare.tokenizer=broken.json is not a Hugging Face tokenizer.json"),
        (TokenizerChoice("random.json"), "prepare.tokenizer=random.json encodes at random (model.dropout=0.5)"),
        (TokenizerChoice("good.json", eos="</s>"), "prepare.eos=</s> is not a token of good.json"),
        (TokenizerChoice("good.json", bos="99999"), "prepare.bos=99999 is far beyond the 320 ids of good.json"),
        (
            TokenizerChoice("good.json", pattern="gpt2"),
            "prepare.tiktoken_pattern=gpt2, but good.json is not a tiktoken file",
        ),
        (TokenizerChoice("mine.tiktoken", eos="256"), "prepare.tokenizer=mine.tiktoken is not one of gpt2"),
        (
            TokenizerChoice("mine.tiktoken", pattern="gpt2"),
            "it is not clear which token ends a document: mine.tiktoken",
        ),
        (TokenizerChoice("mine.tiktoken", pattern="(", eos="256"), "prepare.tiktoken_pattern=( cannot be used"),
        (TokenizerChoice("torn.tiktoken", pattern="gpt2"), "prepare.tokenizer=torn.tiktoken, line 2: b'!!'"),
        (TokenizerChoice("short.tiktoken", pattern="gpt2"), "prepare.tokenizer=short.tiktoken lacks single bytes"),
        (TokenizerChoice("bytes", eos="</s>"), "prepare.eos=</s> is not a token of bytes"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_tokenizer_is_told_in_a_sentence(
    choice: TokenizerChoice, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    good = write_tokenizer(tmp_path / "good.json").read_text()
    (tmp_path / "random.json").write_text(good.replace('"dropout":null', '"dropout":0.5'))
    write_ranks(tmp_path / "mine.tiktoken")
    (tmp_path / "broken.json").write_text("{}")
    (tmp_path / "torn.tiktoken").write_text("YQ== 0\n!!\n")
    (tmp_path / "short.tiktoken").write_text("YQ== 0\n")
    with pytest.raises(ConfigError) as refused:
        load_tokenizer(choice)
    assert said in refused.value.message


def test_the_folder_of_a_model_is_answered_with_the_file_of_its_tokenizer(tmp_path: Path) -> None:
    folder = tmp_path / "Qwen2.5-0.5B"
    folder.mkdir()
    file = write_tokenizer(folder / "tokenizer.json")
    with pytest.raises(ConfigError) as refused:
        load_tokenizer(TokenizerChoice(str(folder)))
    assert refused.value.hint == f"prepare.tokenizer={file}"


def test_a_tokenizer_that_is_a_pipe_is_told_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(ConfigError, match=r"tokenizer\.json is not a plain file"):
        load_tokenizer(TokenizerChoice(str(tmp_path / "tokenizer.json")))


@pytest.mark.parametrize("package", ["tokenizers", "tiktoken"])
def test_a_missing_package_is_named_with_its_extra(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = {"tokenizers": "tokenizer.json", "tiktoken": "gpt2.tiktoken"}[package]
    (tmp_path / name).write_text("YQ== 0\n")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=f"needs the package {package}, which is not installed") as refused:
        load_tokenizer(TokenizerChoice(str(tmp_path / name)))
    assert refused.value.hint == "pip install 'slurmtrain[data]'"
