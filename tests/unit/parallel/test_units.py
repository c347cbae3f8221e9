"""Which modules FSDP gathers at a time, and what the stages of a pipeline have and may share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from slurmtrain.errors import ConfigError
from slurmtrain.models import Decoder
from slurmtrain.parallel.units import units
from tests.parity.own_model import OwnModel


def decoder() -> Decoder:
    with torch.device("meta"):
        return Decoder(vocab_size=64, dim=32, n_layers=3, n_heads=4, max_seq_len=16)


class Net(nn.Module):
    """As nanoGPT's: a dict of an embedding, which is tied, of layers and of a norm."""

    def __init__(self) -> None:
        super().__init__()
        layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)) for _ in range(4))
        self.parts = nn.ModuleDict({"tokens": nn.Embedding(100, 16), "drop": nn.Dropout(), "layers": layers})
        self.head = nn.Linear(16, 100, bias=False)
        self.head.weight = self.parts["tokens"].weight  # type: ignore[assignment]


def test_a_decoder_says_itself_what_its_units_are() -> None:
    model = decoder()
    assert units(model) == list(model.blocks.values())


def test_by_name_the_outermost_are_taken() -> None:
    model = decoder()
    assert units(model, ["FeedForward"]) == [block.feed_forward for block in model.blocks.values()]
    assert units(model, ["Block", "Linear"]) == list(model.blocks.values())


def test_without_names_the_units_are_what_lists_hold_but_no_embedding() -> None:
    model: Any = Net()
    wanted = [layer[place] for layer in model.parts["layers"] for place in (0, 2)]
    assert units(model) == wanted
    model.parts["head"] = model.head  # its matrix is the embedding's
    model.again = nn.Sequential(*model.parts["layers"])
    assert units(model) == wanted  # FSDP manages a parameter in one unit


def test_a_class_that_the_model_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no such modules") as refused:
        units(decoder(), ["LlamaDecoderLayer"])
    assert "Block" in str(refused.value)


# The stages of a pipeline, whose module takes a second to import: not every process that collects this file does.


@pytest.mark.parametrize("tied", [True, False])
def test_the_stages_of_a_decoder_have_all_of_it_and_share_a_tied_embedding_alone(tied: bool) -> None:
    from slurmtrain.parallel.pipeline import part, shared_by_ends

    model = Decoder(vocab_size=16, dim=8, n_layers=4, n_heads=2, max_seq_len=8, tie_embeddings=tied)
    stages = [[name for name, _ in part(model, [number], 4).named_parameters()] for number in range(4)]
    held = [name for stage in stages for name in stage]
    assert set(held) == {name for name, _ in model.named_parameters()}
    shared = ["embedding.weight"] if tied else []
    assert sorted(held) == sorted([*set(held), *shared])
    assert shared_by_ends(model, 4) == shared
    assert ("embedding.weight" in stages[3]) == tied


def test_other_parameters_cannot_be_shared_by_stages() -> None:
    from slurmtrain.parallel.pipeline import shared_by_ends

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
