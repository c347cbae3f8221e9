"""A checkpoint of another model or config: refused with what differs, or, when it is allowed, exactly what fits is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from slurmtrain.checkpoint.checkpointer import Checkpointer
from slurmtrain.checkpoint.errors import CheckpointError, CheckpointMismatchError
from slurmtrain.checkpoint.format.directory import committed
from slurmtrain.checkpoint.restore import restorer
from slurmtrain.errors import UsageError


class Model(nn.Module):
    """`wide` inputs and the layers of these names."""

    def __init__(self, *names: str, wide: int = 4, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(wide, 3, dtype=dtype) for name in names})

    @property
    def linears(self) -> list[nn.Linear]:
        return [layer for layer in self.layers.values() if isinstance(layer, nn.Linear)]

    def forward(self) -> torch.Tensor:
        return torch.stack([layer.weight.float().square().sum() + layer.bias.sum() for layer in self.linears]).sum()


def data_config(fingerprint: str, path: str) -> dict[str, Any]:
    return {"data": {"path": path}, "data_fingerprint": fingerprint}


def test_other_content_in_the_same_place_is_refused_unless_it_is_allowed(tmp_path: Path) -> None:
    saved(tmp_path, Model("a"), config=data_config("one", "/data"))
    error = refused(tmp_path, Model("a"), config=data_config("two", "/data"))
    assert "was saved with other data: data_fingerprint: one -> two" in error.message
    assert "checkpoint.allow=[data]" in (error.hint or "")
    refused(tmp_path, Model("a"), ("config",), config=data_config("two", "/data"))
    allowed(tmp_path, Model("a"), "data", config=data_config("two", "/data"))
    refused(tmp_path, Model("a"), ("data",), config=data_config("two", "/elsewhere"))
    # Which says that the data is other data.
    allowed(tmp_path, Model("a"), "config", config=data_config("two", "/elsewhere"))


def test_the_step_of_another_run_is_not_carried_onto_other_data_unless_that_is_asked_for(tmp_path: Path) -> None:
    def restore(allow: tuple[str, ...], fingerprint: str) -> object:
        checkpointer = Checkpointer(tmp_path / "other", config=data_config(fingerprint, "/elsewhere"))
        return checkpointer.restore(path=tmp_path / "checkpoint_0000001", model=Model("a"), allow=allow)

    saved(tmp_path, Model("a"), config=data_config("one", "/data"))
    with pytest.raises(
        CheckpointMismatchError, match=r"other data: data\.path: /data -> /elsewhere.*schedule"
    ) as caught:
        restore(("config",), "two")
    assert "checkpoint.restore_only=model" in (caught.value.hint or "")
    assert restore(("config", "data"), "two") is not None
    assert restore(("config",), "one") is not None  # it has only moved


def trained(model: nn.Module) -> tuple[nn.Module, torch.optim.AdamW]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    go_on(model, optimizer)
    return model, optimizer


def go_on(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model().backward()
    optimizer.step()
    optimizer.zero_grad()


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def saved(directory: Path, model: nn.Module, **options: Any) -> dict[str, torch.Tensor]:
    """Save the model after one step, with its optimiser. Returns its values."""
    _, optimizer = trained(model)
    Checkpointer(directory, **options).save(1, model=model, optimizer=optimizer).result()
    return values(model)


def refused(directory: Path, model: nn.Module, allow: tuple[str, ...] = (), **options: Any) -> CheckpointMismatchError:
    """That the model is refused, and left as it was."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = values(model)
    with pytest.raises(CheckpointMismatchError) as caught:
        Checkpointer(directory, **options).restore(model=model, optimizer=optimizer, allow=allow)
    assert_equal(values(model), before)
    assert not optimizer.state
    assert committed(directory), "what does not fit is not damaged"
    assert "\n" not in caught.value.message
    return caught.value


def allowed(directory: Path, model: nn.Module, *allow: str, **options: Any) -> torch.optim.AdamW:
    """Restore all the same, and see that training goes on."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    assert Checkpointer(directory, **options).restore(model=model, optimizer=optimizer, allow=allow) is not None
    after = values(model)
    go_on(model, optimizer)
    for name, tensor in model.named_parameters():
        assert not torch.equal(tensor, after[name])
    model.load_state_dict(after)
    return optimizer


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


# ---------------------------------------------------------------------------------------------------------------- keys


@pytest.mark.parametrize(
    ("kind", "other", "sentence"),
    [
        (
            "keys",
            Model("b"),
            "- model.layers.b.bias is not in the checkpoint; - model.layers.b.weight is not in the checkpoint; "
            "+ model.layers.a.bias is in the checkpoint alone; + model.layers.a.weight is in the checkpoint alone",
        ),
        ("shapes", Model("a", wide=5), "model.layers.a.weight is [3, 4] there and [3, 5] here"),
        (
            "dtypes",
            Model("a", dtype=torch.bfloat16),
            "model.layers.a.weight is float32 there and bfloat16 here; "
            "model.layers.a.bias is float32 there and bfloat16 here",
        ),
    ],
)
def test_another_model_is_refused_with_the_difference(tmp_path: Path, kind: str, other: Model, sentence: str) -> None:
    saved(tmp_path, Model("a"))
    error = refused(tmp_path, other, allow=tuple(set(restorer.KINDS) - {kind}))
    assert error.message.startswith(f"{tmp_path}/checkpoint_0000001 does not fit: {sentence}")
    assert (f"checkpoint.allow=[{kind}]" in (error.hint or "")) == (kind in restorer.KINDS)


def test_other_keys_keep_their_initial_values_when_allowed(tmp_path: Path) -> None:
    before = saved(tmp_path, Model("a", "b"))
    model = Model("c", "a")  # in another order, too
    initial = values(model)
    optimizer = allowed(tmp_path, model, "keys")
    expected = {name: before.get(name, initial[name]) for name in initial}
    assert_equal(values(model), expected)
    steps = {name: optimizer.state[parameter]["step"].item() for name, parameter in model.named_parameters()}
    assert steps["layers.a.weight"] == 2 and steps["layers.c.weight"] == 1  # one of them by `allowed`


def test_an_object_that_was_not_saved_is_refused_or_left_alone(tmp_path: Path) -> None:
    model = Model("a")
    Checkpointer(tmp_path).save(1, model=model).result()
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    with pytest.raises(CheckpointMismatchError, match="- optimizer is not in the checkpoint; - schedule is not in the"):
        Checkpointer(tmp_path).restore(model=model, optimizer=optimizer, schedule=schedule)
    assert (
        Checkpointer(tmp_path).restore(model=model, optimizer=optimizer, schedule=schedule, allow=["keys"]) is not None
    )
    assert not optimizer.state and schedule.last_epoch == 0


def test_a_parameter_in_another_group_is_refused(tmp_path: Path) -> None:
    model = Model("a", "b")
    trained(model)
    layers = model.linears
    one = torch.optim.AdamW([{"params": [*layers[0].parameters()]}, {"params": [*layers[1].parameters()]}])
    Checkpointer(tmp_path).save(1, model=model, optimizer=one).result()
    other = torch.optim.AdamW([{"params": [*layers[1].parameters()]}, {"params": [*layers[0].parameters()]}])
    with pytest.raises(CheckpointMismatchError, match="optimizer: a parameter group holds other parameters"):
        Checkpointer(tmp_path).restore(model=model, optimizer=other)
    with pytest.raises(CheckpointMismatchError, match="optimizer has 1 parameter groups, and 2 in the checkpoint"):
        Checkpointer(tmp_path).restore(model=model, optimizer=torch.optim.AdamW(model.parameters()))


# -------------------------------------------------------------------------------------------------------------- dtypes


@pytest.mark.parametrize(
    ("there", "here"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float32, torch.float64)],
)
def test_dtypes_are_converted_when_allowed(tmp_path: Path, there: torch.dtype, here: torch.dtype) -> None:
    before = saved(tmp_path, Model("a", dtype=there))
    model = Model("a", dtype=here)
    optimizer = allowed(tmp_path, model, "dtypes")
    assert_equal(values(model), {name: tensor.to(here) for name, tensor in before.items()})
    assert all(state["exp_avg"].dtype == here for state in optimizer.state.values())


# -------------------------------------------------------------------------------------------------------------- config

CONFIG = {"model": {"width": 4, "betas": [0.9, 0.95]}, "seed": 1}


def test_another_config_is_refused_with_the_difference(tmp_path: Path) -> None:
    saved(tmp_path, Model("a"), config=CONFIG)
    other = {"model": {"width": 8, "betas": [0.9, 0.95], "bias": None}}
    error = refused(tmp_path, Model("a"), allow=("keys", "dtypes"), config=other)
    assert error.message == (
        f"{tmp_path}/checkpoint_0000001 was saved with another config: model.bias: (not there) -> None; "
        "model.width: 4 -> 8; seed: 1 -> (not there)"
    )
    assert "checkpoint.allow=[config]" in (error.hint or "")
    allowed(tmp_path, Model("a"), "config", config=other)


def test_adapters_go_on_beside_the_weights_that_they_were_trained_beside(tmp_path: Path) -> None:
    def config(path: str, **more: Any) -> dict[str, Any]:
        return {"model": {"_target_": "slurmtrain.models.Decoder", "path": path}, **more}

    restorer.check_config(tmp_path, config("/a"), config("/b"), ())
    lora = {"lora": {"r": 8}}
    restorer.check_config(tmp_path, config("/a", **lora), config("/a", **lora), ())
    with pytest.raises(CheckpointMismatchError, match=r"model\.path: /a -> /b"):
        restorer.check_config(tmp_path, config("/a", **lora), config("/b", **lora), ())


# It has been through JSON: lists and tuples, whole numbers as names.
TYPED = {**CONFIG, "steps": {1: "x"}, "shape": (4, 3)}


@pytest.mark.parametrize(
    ("there", "here"),
    [(None, CONFIG), (CONFIG, None), ({}, {"a": 1}), (TYPED, dict(reversed(TYPED.items())))],
)
def test_the_same_config_however_it_is_ordered_or_typed_or_none_at_all_binds_nothing(
    tmp_path: Path, there: dict[str, Any] | None, here: dict[str, Any] | None
) -> None:
    saved(tmp_path, Model("a"), config=there)
    allowed(tmp_path, Model("a"), config=here)


# --------------------------------------------------------------------------------------------------------------- allow


def test_an_unknown_kind_is_refused_with_the_one_that_was_meant(tmp_path: Path) -> None:
    sentence = r"'dtype' is not a kind of difference that can be allowed\n  hint: .*dtypes"
    with pytest.raises(UsageError, match=sentence):  # before anything is looked for
        Checkpointer(tmp_path).restore(model=Model("a"), allow=["dtype"])


# ------------------------------------------------------------------------------------------ what each rank has for itself


@pytest.mark.parametrize(
    "other", [nn.Linear(6, 3), nn.Linear(2, 3), nn.Linear(4, 3, dtype=torch.float64), nn.Sequential(nn.Linear(4, 3))]
)
def test_a_rank_s_own_module_that_does_not_fit_is_refused(tmp_path: Path, other: nn.Module) -> None:
    Checkpointer(tmp_path).save(1, per_rank={"adapter": nn.Linear(4, 3)}).result()
    before = values(other)
    with pytest.raises(CheckpointError, match="adapter"):
        Checkpointer(tmp_path).restore(per_rank={"adapter": other})
    assert_equal(values(other), before)
