"""The first weights are a function of the seed and of a parameter's name and place in it, and of nothing else."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slurmtrain.config.schema import Config
from slurmtrain.errors import ConfigError
from slurmtrain.models import Decoder, initialize
from slurmtrain.models.initial import Linear
from slurmtrain.rank.jobs.build_model import build_model, fill

SIZES: dict[str, Any] = {
    "vocab_size": 70, "dim": 40, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 1100, "max_seq_len": 16,
    "tie_embeddings": False, "qkv_bias": True, "qk_norm": True,
}  # fmt: skip


def drawn(seed: int = 5, dtype: torch.dtype = torch.float32, **changes: Any) -> Decoder:
    with torch.device("meta"):
        model = Decoder(**{**SIZES, **changes}).to(dtype)
    model.to_empty(device="cpu")
    model.initialize(seed)
    return model


def test_the_bits_are_those_of_the_seed_on_every_machine() -> None:
    """A change of the stream would go unnoticed otherwise: two halves of a job on different nodes would start differently."""
    digest = hashlib.sha256()
    for name, value in drawn().state_dict().items():
        digest.update(name.encode() + value.numpy().tobytes())
    assert digest.hexdigest()[:16] == "8fa365202832f499"


def test_seeds_and_parameters_have_numbers_of_their_own() -> None:
    values = [drawn(seed).blocks["1"].get_parameter(name) for seed in (5, 6) for name in NAMES]
    values.append(drawn().blocks["2"].get_parameter(NAMES[0]))
    for number, one in enumerate(values):
        assert not any(torch.isin(one[:2], other).any() for other in values[:number])


NAMES = ["feed_forward.gate.weight", "feed_forward.up.weight"]


def test_the_numbers_are_normal_with_the_std_of_their_module() -> None:
    layer = Linear(1500, 1000, bias=True, std=0.5)
    initialize(layer, 1)
    z = layer.weight.detach().double().flatten() / 0.5
    error = z.numel() ** -0.5
    assert z.mean().abs() < 4 * error
    assert (z.square().mean() - 1).abs() < 4 * 2**0.5 * error
    assert (z**4).mean() == pytest.approx(3, abs=4 * 96**0.5 * error)
    assert torch.all(layer.bias == 0)
    rows = layer.weight.detach().double() / 0.5
    assert (rows[:, :-1] * rows[:, 1:]).mean().abs() < 4 * error  # neighbours know nothing of each other
    assert (rows[:-32] * rows[32:]).mean().abs() < 4 * error  # nor do tiles


def test_lower_precision_rounds_the_same_numbers() -> None:
    single, half = drawn().state_dict(), drawn(dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(value.bfloat16(), half[name]) for name, value in single.items())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_gets_the_numbers_of_the_cpu() -> None:
    model = Decoder(**SIZES).cuda()
    model.initialize(5)
    assert all(torch.equal(value.cpu(), drawn().state_dict()[name]) for name, value in model.state_dict().items())


def test_a_wrapped_block_starts_as_the_bare_one() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    whole = drawn().state_dict()
    model = Decoder(**SIZES)
    model.blocks["1"] = checkpoint_wrapper(model.blocks["1"])
    model.blocks["2"] = torch.compile(model.blocks["2"])  # type: ignore[assignment]
    model.initialize(5)
    values = {name.replace("_orig_mod.", ""): value for name, value in model.state_dict().items()}
    assert all(torch.equal(value, whole[name]) for name, value in values.items())


class Own(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.register_buffer("count", torch.zeros(()))


class Late(Own):
    def initialize(self, seed: int) -> None:
        for parameter in self.parameters():
            nn.init.constant_(parameter, seed)


def test_a_model_of_ones_own_is_built_under_the_seed_or_fills_itself() -> None:
    def built(name: str) -> Any:
        config = Config(model={"_target_": f"{__name__}.{name}", "width": 3})
        config.train.seed = 8
        return fill(build_model(config), torch.device("cpu"), 8)

    torch.manual_seed(8)
    expected = nn.Linear(3, 3).weight
    assert torch.equal(built("Own").layer.weight, expected)
    assert torch.equal(built("Own").count, torch.zeros(()))
    assert torch.all(built("Late").layer.weight == 8)


class Scaled(Decoder):
    def __init__(self, **sizes: Any):
        super().__init__(**sizes)
        self.head = nn.Linear(4, 4)


class Buffered(Decoder):
    count: Tensor

    def __init__(self, **sizes: Any):
        super().__init__(**sizes)
        self.register_buffer("count", torch.zeros(()), persistent=False)


@pytest.mark.parametrize(
    ("kind", "message"),
    [(Scaled, "'head' does not define how to initialise weight, bias"), (Buffered, "Buffered '' does not .* count")],
)
def test_what_does_not_say_how_it_starts_is_refused(kind: type[Decoder], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        kind(**SIZES).initialize(1)
    assert "initialize(seed)" in (error.value.hint or "")
