"""What the stages of a pipeline have, and what two of them may share."""

from __future__ import annotations

from typing import Any

import pytest

from slurmtrain.errors import ConfigError
from slurmtrain.models import Decoder
from slurmtrain.parallel.pipeline import part, shared_by_ends
from tests.parity.own_model import OwnModel


def decoder(*, tied: bool) -> Decoder:
    return Decoder(vocab_size=16, dim=8, n_layers=4, n_heads=2, max_seq_len=8, tie_embeddings=tied)


@pytest.mark.parametrize("tied", [True, False])
def test_the_stages_of_a_decoder_have_all_of_it_and_share_a_tied_embedding_alone(tied: bool) -> None:
    model = decoder(tied=tied)
    stages = [[name for name, _ in part(model, [number], 4).named_parameters()] for number in range(4)]
    held = [name for stage in stages for name in stage]
    assert set(held) == {name for name, _ in model.named_parameters()}
    shared = ["embedding.weight"] if tied else []
    assert sorted(held) == sorted([*set(held), *shared])
    assert shared_by_ends(model, 4) == shared
    assert ("embedding.weight" in stages[3]) == tied


def test_other_parameters_cannot_be_shared_by_stages() -> None:
    repeated: Any = OwnModel()
    repeated.layers["1"] = repeated.layers["0"]
    with pytest.raises(
        ConfigError, match=r"stages 0, 1 of OwnModel share the parameter layers\.0\.up\.weight = layers\.1"
    ):
        shared_by_ends(repeated, 4)
    renamed: Any = OwnModel()
    renamed.head.weight = renamed.tokens.weight
    with pytest.raises(ConfigError, match=r"stages 0, 3 of OwnModel share the parameter tokens\.weight = head\.weight"):
        shared_by_ends(renamed, 4)
