from __future__ import annotations

import errno
import itertools
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from slurmtrain.cli import main
from slurmtrain.data.format import reading
from slurmtrain.data.format.manifest import shard_file
from slurmtrain.data.format.reading import DataError
from slurmtrain.data.format.rows import best_fit_rows
from slurmtrain.data.loading.batches import concatenate
from slurmtrain.data.sources.mixture import Mixture
from slurmtrain.data.sources.prepared import PreparedText
from slurmtrain.errors import ConfigError
from tests.support.descriptors import open_below
from tests.support.prepared import write_prepared

# Token 10 d + k is the k-th of document d: each says where it stands.
DOCUMENTS = [[10 * d + k for k in range(length)] for d, length in enumerate([5, 1, 9, 3, 2, 8, 4, 6, 7, 2, 10, 3])]
SHARDS = [DOCUMENTS[:4], [], DOCUMENTS[4:5], DOCUMENTS[5:]]


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_prepared(tmp_path / "data", {"train": SHARDS, "valid": [DOCUMENTS[:3]]})
    return tmp_path / "data"


def everything(dataset: Any) -> dict[str, Tensor]:
    batch: dict[str, Tensor] = dataset.get_batch(np.arange(len(dataset)))
    return batch


def pairs(batch: dict[str, Tensor]) -> list[tuple[int, int]]:
    """(input, target) wherever the target counts."""
    kept = batch["targets"] != -100
    return sorted(zip(batch["inputs"][kept].tolist(), batch["targets"][kept].tolist(), strict=True))


def within_documents() -> list[tuple[int, int]]:
    return sorted((a, a + 1) for document in DOCUMENTS for a in document[:-1])


@pytest.mark.parametrize("seq_len", [1, 4, 7, 100])
def test_masked_samples_have_every_pair_of_every_document_once_and_say_which_is_whose(data: Path, seq_len: int) -> None:
    batch = everything(PreparedText(str(data), seq_len, packing="best_fit").train)
    assert "documents" not in PreparedText(str(data), seq_len, packing="best_fit", document_mask=False).train[0]
    assert pairs(batch) == within_documents()
    assert batch["documents"].dtype == torch.int32 and batch["documents"].shape == batch["inputs"].shape
    assert (batch["documents"][:, 0] == 0).all()
    for inputs, targets, documents in zip(*(batch[name].tolist() for name in batch), strict=True):
        assert set(np.diff(documents)) <= {0, 1}
        end = len(targets) - next((i for i, t in enumerate(reversed(targets)) if t != -100), len(targets))
        numbers = [token // 10 for token in inputs[:end]]
        assert [a == b for a, b in itertools.pairwise(numbers)] == [
            a == b for a, b in itertools.pairwise(documents[:end])
        ]
        assert end == len(targets) or end == 0 or documents[end] == documents[end - 1] + 1


def test_a_document_a_sample_is_as_long_as_it_is(data: Path) -> None:
    train = PreparedText(str(data), 6, packing="documents").train
    long_enough = [document for document in DOCUMENTS if len(document) > 1]
    assert len(train) == len(long_enough)
    found = [int((train[index]["targets"] != -100).sum()) for index in range(len(train))]
    assert found == [min(len(d) - 1, 6) for d in long_enough]
    batch = train.get_batch(np.array([0, 2, 3]))
    assert batch["inputs"].tolist() == [[0, 1, 2, 3], [30, 31, 0, 0], [40, 0, 0, 0]]
    assert batch["targets"].tolist() == [[1, 2, 3, 4], [31, 32, -100, -100], [41, -100, -100, -100]]


@given(
    st.lists(st.lists(st.integers(1, 9), max_size=8), min_size=1, max_size=4).filter(lambda s: sum(map(sum, s)) > 1),
    st.integers(1, 12),
    st.sampled_from(["concat", "best_fit", "documents"]),
)
def test_no_pair_is_lost_or_doubled_in_any_shape(
    tmp_path_factory: pytest.TempPathFactory, shards: list[list[int]], seq_len: int, packing: str
) -> None:
    folder, numbers = tmp_path_factory.mktemp("data"), iter(range(1, 10_000))
    documents = [[[next(numbers) for _ in range(length)] for length in shard] for shard in shards]
    write_prepared(folder, {"train": documents}, vocab_size=10_000)
    source = PreparedText(
        str(folder), seq_len if packing != "documents" else 8, packing=packing
    )  # which would cut them
    expected = [(a, a + 1) for shard in documents for document in shard for a in document[:-1]]
    if packing == "concat":
        expected = [(a, a + 1) for a in range(1, next(numbers) - 1)]
    assert pairs(everything(source.train)) == expected


@pytest.mark.parametrize(("other", "mask"), [("best_fit", True), ("documents", None)])
def test_batches_of_a_mixture_are_its_samples_stacked(data: Path, other: str, mask: bool | None) -> None:
    masked = PreparedText(str(data), 7, packing=other, document_mask=mask)
    train = Mixture({"plain": PreparedText(str(data), 10), "masked": masked}).train
    for of_batch in np.random.default_rng(0).integers(0, len(train), (100, 4)).tolist():
        rows = [{name: row[None] for name, row in train[index].items()} for index in of_batch]
        expected = concatenate(rows)  # as long as the longest
        if mask:  # whichever samples it has
            expected.setdefault("documents", torch.zeros_like(expected["inputs"], dtype=torch.int32))
        got = train.get_batch(np.array(of_batch))
        assert got.keys() == expected.keys() and all(torch.equal(got[name], expected[name]) for name in got)


def test_the_source_says_what_it_is(data: Path) -> None:
    source = PreparedText(str(data), 16)
    assert source.vocab_size == 257 and "60 tokens, 4 + 1 samples of 16 tokens (concat)" in source.description
    others = PreparedText(str(data), 8), PreparedText(str(data), 16, packing="best_fit")
    assert len({each.fingerprint for each in (source, *others)}) == 3


def test_bytes_of_text_are_known_where_no_pair_is_missing(tmp_path: Path, data: Path) -> None:
    def num_bytes(folder: Path, **settings: Any) -> int | None:
        return PreparedText(str(folder), 6, **settings).train.num_bytes

    assert num_bytes(data) == 240
    # Without bos the first byte of a document is no target.
    assert num_bytes(data, packing="best_fit") == 240 - 12
    write_prepared(tmp_path / "bos", {"train": SHARDS}, bos=256)
    assert num_bytes(tmp_path / "bos", packing="best_fit") == 240
    assert num_bytes(tmp_path / "bos", packing="documents") is None  # some were cut


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"seq_len": 0}, "data.seq_len is 0"),
        ({"packing": "bestfit"}, r"data.packing is 'bestfit'\n.*did you mean best_fit"),
        ({"packing": "documents", "document_mask": True}, "data.document_mask=True with data.packing=documents"),
        ({"document_mask": True}, "data.document_mask=True with data.packing=concat"),
    ],
)
def test_arguments_that_cannot_work(data: Path, arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        PreparedText(str(data), **{"seq_len": 4, **arguments})
    with pytest.raises(ConfigError, match=r"has no manifest.json"):
        PreparedText(str(data / "train"), 4)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["data=prepared", "data.path={data}"], "model.vocab_size=256 is too small for data with 257 token ids"),
        (["data=mixture", "+data.sources.web={source}"], "hint: set model.vocab_size=257, or more"),
        (["eval.sets.web={source}"], "model.vocab_size=256 is too small for data with 257 token ids"),
        (["data=prepared", "data.path=/nodes/x", "model=huggingface", "model.path=/m", "data.packing=best_fit"], "tell apart"),
        (["data=prepared", "data.path={data}", "model.vocab_size=257"], ""),
        (["data=prepared", "data.path=/nodes/x", "model=huggingface", "model.path=/m"], ""),
    ],
)  # fmt: skip
def test_a_model_that_does_not_know_all_tokens_or_masks_is_refused_before_it_queues(
    words: list[str], told: str, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = f"{{_target_: slurmtrain.data.PreparedText, path: {data}, seq_len: 64}}"
    words = [word.replace("{data}", str(data)).replace("{source}", source) for word in words]
    assert main([*words, "submit", "--dry-run"]) == (78 if told else 0)
    assert told in capsys.readouterr().err


def tokens_file(data: Path, shard: str = "00003", kind: str = "tokens") -> Path:
    return shard_file(data, "train", shard, kind)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 2)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (cut, "train.tokens has 78 bytes, but 80 were written"),
        (Path.unlink, "train.tokens cannot be read: No such file"),
    ],
)
def test_a_damaged_file_is_one_sentence_at_the_start_and_later(
    data: Path, damage: Callable[[Path], None], sentence: str
) -> None:
    train = PreparedText(str(data), 4).train
    everything(train)
    opened_later = PreparedText(str(data), 4).train
    damage(tokens_file(data))
    with pytest.raises(ConfigError, match=sentence):
        PreparedText(str(data), 4)
    with pytest.raises(ConfigError, match=sentence):
        everything(opened_later)
    if damage is not Path.unlink:  # what is open can be read, whatever happens to the name
        with pytest.raises(ConfigError, match=r"train.tokens has \d+ bytes, but 80 were written"):
            everything(train)


@pytest.mark.parametrize(
    ("kind", "number", "value", "told"),
    [
        ("tokens", 3, 300, r"the split train .* is not below the tokenizer's 257 ids"),
        ("ends", 1, 3, r"train.ends: the ends .* do not rise to the 40 tokens"),
        ("ends", 6, 41, r"train.ends: the ends .* do not rise to the 40 tokens"),
    ],
)
def test_what_cannot_be_right_in_a_file_is_refused(data: Path, kind: str, number: int, value: int, told: str) -> None:
    path = tokens_file(data, kind=kind)
    values = np.fromfile(path, dtype="<u2" if kind == "tokens" else "<u8")
    values[number] = value
    values.tofile(path)
    with pytest.raises(ConfigError, match=told):
        everything(PreparedText(str(data), 4, packing="best_fit").train)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], list[int]]:
    """The next reads fail so many times with this error; returns the descriptors that were tried."""
    preadv = os.preadv

    def arrange(number: int, times: int) -> list[int]:
        tried: list[int] = []

        def read(descriptor: int, buffers: Any, offset: int) -> int:
            tried.append(descriptor)
            if len(tried) <= times:
                raise OSError(number, os.strerror(number))
            return preadv(descriptor, buffers, offset)

        monkeypatch.setattr(os, "preadv", read)
        monkeypatch.setattr(time, "sleep", lambda seconds: None)
        return tried

    return arrange


def test_a_file_server_that_stumbles_costs_a_message(
    data: Path, failing: Callable[[int, int], list[int]], capfd: pytest.CaptureFixture[str]
) -> None:
    train = PreparedText(str(data), 4).train
    expected = everything(train)
    failing(errno.ESTALE, 2)
    assert torch.equal(everything(train)["inputs"], expected["inputs"])
    assert capfd.readouterr().err.count("cannot be read: Stale file handle; it is tried again") == 1


def test_a_file_server_that_stays_away_may_be_there_at_the_next_start(
    data: Path, failing: Callable[[int, int], list[int]]
) -> None:
    train = PreparedText(str(data), 4).train
    tried = failing(errno.EIO, 100)
    with pytest.raises(DataError, match=r"train.tokens cannot be read: Input/output error, also 3 s later") as caught:
        train[0]
    assert len(tried) == 5 and caught.value.exit_code == 1
    tried = failing(errno.EMFILE, 2)
    with pytest.raises(DataError, match="Too many open files"):
        train[0]
    assert len(tried) == 2


def test_a_short_read_is_completed(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = PreparedText(str(data), 30).train
    expected = everything(train)
    preadv = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda fd, buffers, offset: preadv(fd, [memoryview(buffers[0]).cast("B")[:3]], offset)
    )
    assert torch.equal(everything(train)["inputs"], expected["inputs"])


def test_few_files_are_open_at_a_time(tmp_path: Path) -> None:
    write_prepared(tmp_path, {"train": [[[n] * 3] for n in range(2 * reading.OPEN_FILES)]})
    train = PreparedText(str(tmp_path), 3).train
    reading._opened.cache_clear()
    assert everything(train)["inputs"][-1, 0] == 2 * reading.OPEN_FILES - 1
    assert len(open_below(tmp_path)) == reading.OPEN_FILES
    reading._opened.cache_clear()
    assert open_below(tmp_path) == []


def test_the_index_is_made_once_by_one_of_many(data: Path, capfd: pytest.CaptureFixture[str]) -> None:
    context = multiprocessing.get_context("fork")
    ready = context.Barrier(4)

    def start() -> None:
        ready.wait()
        assert pairs(everything(PreparedText(str(data), 6, packing="best_fit").train)) == within_documents()

    processes = [context.Process(target=start) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert capfd.readouterr().err.count("packing the 12 documents of train") == 1
    kept = sorted(path.name for path in (data / "packed").iterdir() if path.name != ".lock")
    assert [name.rsplit("-", 1)[0] for name in kept] == ["train-best_fit-6", "valid-best_fit-6"]


def test_a_damaged_index_is_made_anew(data: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def index() -> Path:
        return next((data / "packed").glob("train-*"))

    def sample() -> dict[str, Tensor]:
        return everything(PreparedText(str(data), 6, packing="best_fit").train)

    expected = sample()
    whole = index().read_bytes()
    for damaged in (b"", whole[:-8], whole[8:]):
        index().write_bytes(damaged)
        assert all(torch.equal(got, expected[name]) for name, got in sample().items())
        assert "is damaged and is made anew" in capfd.readouterr().err
        assert index().read_bytes() == whole
    index().write_bytes(whole[:7] + b"\xff" + whole[8:])  # a start far behind the end; sizes alone do not show it
    with pytest.raises(ConfigError, match=r"is damaged\n.*remove"):
        everything(PreparedText(str(data), 6, packing="best_fit").train)


def test_the_index_goes_to_the_cache_where_the_folder_cannot_be_written(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (data / "packed").write_text("not a folder, so that root cannot write there either")
    PreparedText(str(data), 6, packing="best_fit")
    assert len(list((tmp_path / "cache" / "slurmtrain" / "packed").glob("*.idx"))) == 2
    assert f"{data}/packed cannot keep the packing of train" in capfd.readouterr().err
    monkeypatch.setenv("XDG_CACHE_HOME", str(data / "packed"))
    with pytest.raises(ConfigError, match="no folder can keep the packing of train"):
        PreparedText(str(data), 6, packing="best_fit")


def test_best_fit_of_text_leaves_less_than_a_hundredth_free_and_cuts_only_what_is_too_long() -> None:
    tokens = np.random.default_rng(0).lognormal(6.2, 1.1, 30_000).astype(np.int64) + 2  # about 900 on average
    for seq_len in (512, 2048, 8192):
        pieces, counts = best_fit_rows(np.cumsum(tokens).astype(np.uint64), 0, seq_len)
        assert 1 - (tokens - 1).sum() / (len(counts) * seq_len) < 0.01
        assert len(pieces) == (-(-(tokens - 1) // seq_len)).sum()
