"""The loaders of an Accelerator, when a training goes on in the midst of an epoch."""

from __future__ import annotations

import random

import pytest

from slurmtrain.checkpoint.random_state import RANDOM_STATE


class Stateful(list[int]):
    """A loader that has loaded its place already, as torchdata's StatefulDataLoader does: it yields what is left."""

    use_stateful_dataloader = True


def test_a_loader_that_knows_its_place_is_not_told_to_skip() -> None:
    accelerate = pytest.importorskip("slurmtrain.integrations.accelerate", reason="the extra `accelerate` is missing")
    checkpointer = object.__new__(accelerate.AcceleratorCheckpointer)
    checkpointer._random_state = RANDOM_STATE.state_dict()
    checkpointer._place = accelerate._Place(None)
    next_draw = random.random()
    assert list(checkpointer.skip_first_batches(Stateful([3, 4, 5]), 3)) == [3, 4, 5]
    assert random.random() == next_draw, "the random state is the restored one after the first batch"
    assert list(checkpointer.skip_first_batches(Stateful([1, 2]), 0)) == [1, 2]
