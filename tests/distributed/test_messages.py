"""Ranks tell each other plain values only, and a rank that sends anything else harms nobody."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from slurmtrain.checkpoint import ranks
from slurmtrain.checkpoint.ranks import RankGroup
from slurmtrain.errors import CheckpointError, CheckpointMismatchError, SlurmtrainError, SupersededError
from slurmtrain.runtime.distributed_context import DistributedContext
from tests.support.gloo import GlooRanks
from tests.support.pickles import Evil


def talk(distributed: DistributedContext, canary: Path) -> list[Any]:
    """What this rank hears; of what fails, the error's type and message."""
    told = RankGroup(distributed.checkpoint_group)
    rank = told.rank
    heard: list[Any] = []

    def fail(error: Exception, on: int) -> None:
        if rank == on:
            raise error

    def hear(question: Any) -> None:
        try:
            heard.append(question())
        except SlurmtrainError as error:
            heard.append([type(error).__name__, error.message])

    def send_pickles(question: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(ranks, "encode", lambda value: pickle.dumps(Evil(canary)))
            hear(question)

    long = bytes([rank]) * (100_000 * rank)
    hear(lambda: told.gather(lambda: [rank, bytes([rank]), {"a": None}]))
    hear(lambda: told.on_rank_0(lambda: ["from", rank]))
    hear(lambda: told.broadcast(rank, source=1))
    hear(lambda: told.gather_on_rank_0(lambda: long, lambda all_: [len(each) for each in all_]))
    hear(lambda: told.gather_on_rank_0(lambda: None, lambda all_: all_))
    hear(lambda: told.all_do(lambda: Path("kept here")).name)
    hear(lambda: told.all_do(lambda: fail(CheckpointMismatchError("another model"), 1)))
    hear(lambda: told.gather_on_rank_0(lambda: fail(SupersededError("a newer one"), 1), lambda all_: "not reached"))
    hear(lambda: told.on_rank_0(lambda: fail(FileNotFoundError(2, "no", "/there"), 0)))
    send_pickles(lambda: told.gather(lambda: rank))
    send_pickles(lambda: told.gather_on_rank_0(lambda: rank, lambda all_: all_))
    hear(lambda: told.gather(lambda: rank))
    return heard


def test_plain_values_and_failures_are_heard_by_all_and_a_pickle_is_refused_and_not_executed(
    gloo_ranks: GlooRanks, tmp_path: Path
) -> None:
    one, other = gloo_ranks(2, talk, tmp_path / "canary")
    assert one == other
    *fine, gathered, collected, last = one
    assert fine == [
        [[0, b"\0", {"a": None}], [1, b"\1", {"a": None}]],
        ["from", 0],
        1,
        [0, 100_000],
        [None, None],
        "kept here",
        ["CheckpointMismatchError", "another model"],
        ["SupersededError", "a newer one"],
        ["CheckpointError", "rank 0: /there: No such file or directory"],
    ]
    for kind, message in (gathered, collected):
        assert kind == CheckpointError.__name__
        assert "is not the beginning of a message between ranks; it was ignored" in message
    assert last == [0, 1]
    assert not (tmp_path / "canary").exists()
