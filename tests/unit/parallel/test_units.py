"""Which modules FSDP gathers at a time."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from slurmtrain.errors import ConfigError
from slurmtrain.models import Decoder
from slurmtrain.parallel.units import units


def decoder() -> Decoder:
    with torch.device("meta"):
        return Decoder(vocab_size=64, dim=32, n_layers=3, n_heads=4, max_seq_len=16)


class Net(nn.Module):
    """An embedding, which is tied; a large module that has to be taken apart; small layers; and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 16)
        self.body = nn.Sequential(*(nn.Linear(16, 16) for _ in range(16)))
        self.norm = nn.LayerNorm(2)
        self.head = nn.Linear(16, 100, bias=False)
        self.head.weight = self.embedding.weight


def test_a_decoder_says_itself_what_its_units_are() -> None:
    model = decoder()
    assert units(model) == list(model.blocks.values())


def test_by_name_the_outermost_are_taken() -> None:
    model = decoder()
    assert units(model, ["FeedForward"]) == [block.feed_forward for block in model.blocks.values()]
    assert units(model, ["Block", "Linear"]) == list(model.blocks.values())


def test_by_size_neither_tied_nor_tiny_modules_are_units() -> None:
    model = Net()
    assert units(model) == list(model.body)


def test_a_class_that_the_model_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no such modules") as refused:
        units(decoder(), ["LlamaDecoderLayer"])
    assert "Block" in str(refused.value)
