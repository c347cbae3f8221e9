"""Tokenizers: what they make of a text is the text again, whole, and what they are is on record."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from slurmtrain.data.format.tokenizers import TokenizerChoice, load_tokenizer
from slurmtrain.errors import ConfigError
from tests.support.raw_text import texts, write_tokenizer

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
        (TokenizerChoice("."), "hint: prepare.tokenizer=tokenizer.json"),
        (TokenizerChoice("broken.json"), "prepare.tokenizer=broken.json is not a Hugging Face tokenizer.json"),
        (TokenizerChoice("random.json"), "prepare.tokenizer=random.json encodes at random (model.dropout=0.5)"),
        (TokenizerChoice("tokenizer.json", eos="</s>"), "prepare.eos=</s> is not a token of tokenizer.json"),
        (TokenizerChoice("tokenizer.json", bos="99999"), "prepare.bos=99999 is far beyond the 320 ids"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_tokenizer_is_told_in_a_sentence(
    choice: TokenizerChoice, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    good = write_tokenizer(tmp_path / "tokenizer.json").read_text()
    (tmp_path / "random.json").write_text(good.replace('"dropout":null', '"dropout":0.5'))
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(ConfigError) as refused:
        load_tokenizer(choice)
    assert said in str(refused.value)


def test_a_missing_package_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match="needs the package tokenizers, which is not installed") as refused:
        load_tokenizer(TokenizerChoice(str(tmp_path / "tokenizer.json")))
    assert refused.value.hint == "pip install 'slurmtrain[data]'"
