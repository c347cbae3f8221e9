"""Whatever people hand to a Checkpointer goes on with the same bits after a restore, or is refused when it is saved."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from slurmtrain.checkpoint.checkpointer import Checkpointer
from slurmtrain.checkpoint.errors import CheckpointError
from tests.support.own_objects import Own

# Modules.


def after_state_dict(module: nn.Module, hook: Callable[..., None]) -> None:
    module.register_state_dict_post_hook(hook)


class Hooked(nn.Linear):
    """A matrix, with a hook on what its state_dict gives."""

    def __init__(self, gives: Callable[..., None]):
        super().__init__(3, 3)
        self.calls: dict[str, Any] = {}
        after_state_dict(self, gives)


def clones(module: nn.Module, state: dict[str, Any], *others: Any) -> None:
    """Gives copies, as modules do that gather their parameters."""
    state.update({name: value.clone() for name, value in state.items()})


class Derived(nn.Linear):
    """Computes with a table that a load hook makes of what was loaded."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.seeds: Tensor
        self.register_buffer("seeds", torch.rand(3))
        self.table = torch.outer(self.seeds, self.seeds)
        self.register_load_state_dict_post_hook(renew_table)  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.table


def renew_table(module: Any, incompatible: Any) -> None:
    module.table = torch.outer(module.seeds, module.seeds)


class ExtraState(nn.Linear):
    """Computes with something that is no tensor."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.calls: dict[str, Any] = {"number": 0, "scale": torch.ones(())}

    def forward(self, x: Tensor) -> Tensor:
        self.calls = {"number": self.calls["number"] + 1, "scale": self.calls["scale"] * 1.5}
        scaled: Tensor = super().forward(x) * self.calls["number"] * self.calls["scale"]
        return scaled

    def get_extra_state(self) -> dict[str, Any]:
        return self.calls

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.calls = state


def give_calls(module: Any, state: dict[str, Any], prefix: str, *others: Any) -> None:
    state[f"{prefix}calls"] = module.calls


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        twice: Tensor = self.two(self.one(x))
        return twice


def compiled() -> nn.Module:
    return cast(nn.Module, torch.compile(nn.Linear(3, 3), backend="eager"))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)),
    "load hook": Derived,
    "extra state": ExtraState,
    "extra state in two places": lambda: nn.Sequential(*[ExtraState()] * 2),
    "tied": Tied,
    "compiled": compiled,
    "compiled within": lambda: nn.Sequential(compiled(), nn.BatchNorm1d(3)),
    "parametrized": lambda: torch.nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)),
    "moving average": lambda: torch.optim.swa_utils.AveragedModel(nn.Linear(3, 3)),
}

# Optimisers.

Parameters = Any


class Lists(torch.optim.SGD):
    """Keeps names with dots, numbers, lists and texts in its state, and something for all parameters together."""

    def step(self, closure: Any = None) -> Any:
        states: dict[Any, Any] = self.state
        states["all"] = {"steps": states.get("all", {}).get("steps", 0) + 1, 3: torch.ones(2)}
        factor = states["all"]["steps"]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["factor.left"] = state.get("factor.left", 0.5 * parameter.detach()) + 0.1
                state[0] = state.get(0, torch.zeros_like(parameter)) + factor
                state["history"] = [*state.get("history", [])[-2:], parameter.detach().double() * factor]
                state["kind"] = "text"
                assert isinstance(state["kind"], str) and state["history"][0].dtype == torch.float64
                change = state["factor.left"] + state[0] + sum(state["history"]).float()
                parameter.data.sub_(0.001 * change)


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimisation, as it is mostly written: the base optimiser's state is not in its own."""

    def __init__(self, params: Parameters, base: Any = torch.optim.SGD, **options: Any):
        super().__init__(params, {"rho": 0.05, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["old"] = parameter.clone()
                parameter.add_(parameter.grad, alpha=group["rho"])
                parameter.copy_(self.state[parameter]["old"])
        self.base_optimizer.step()


class Nameless(torch.optim.SGD):
    """Keeps a tensor for each parameter, and no dict."""

    def step(self, closure: Any = None) -> Any:
        states: dict[Any, Any] = self.state
        states.update({each: torch.zeros_like(each) for each in self.param_groups[0]["params"]})


OPTIMIZERS: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "AdamW, its rate a tensor": lambda params: torch.optim.AdamW(
        params, lr=torch.tensor(0.01), amsgrad=True, foreach=False
    ),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
    "LBFGS": lambda params: torch.optim.LBFGS(params, lr=0.01, max_iter=2),
    "lists, numbers, dots": lambda params: Lists(params, lr=0.01),
}


class Training:
    def __init__(self, module: Callable[[], nn.Module], optimizer: Callable[[Parameters], Any], *, seed: int):
        torch.manual_seed(seed)
        self.model = module()
        self.optimizer = optimizer([each for each in self.model.parameters() if each.requires_grad])
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))

    @property
    def objects(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}

    def step(self) -> None:
        x = torch.arange(15.0).reshape(5, 3) / 15

        def closure() -> Tensor:
            self.optimizer.zero_grad()
            loss: Tensor = self.model(x).square().mean()
            loss.backward()
            return loss

        if isinstance(self.optimizer, torch.optim.LBFGS):
            self.optimizer.step(closure)
        else:
            closure()
            self.optimizer.step()
        self.schedule.step()

    def bits(self) -> dict[str, Tensor]:
        held = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        out = {"output": self.model.eval()(torch.ones(2, 3))}
        self.model.train()
        return {name: tensor.detach().clone() for name, tensor in {**held, **out}.items()}


def check_goes_on(root: Path, make: Callable[[int], Training]) -> None:
    """Save after three steps, restore into what is freshly made, and compare two steps later."""
    training, other = make(1), make(2)
    for _ in range(3):
        training.step()
    with closing(Checkpointer(root)) as checkpointer:
        checkpointer.save(3, **training.objects).result()
    with closing(Checkpointer(root)) as checkpointer:
        assert checkpointer.restore(**other.objects)
    compare(training, other)
    for _ in range(2):
        training.step()
        other.step()
        compare(training, other)


def compare(one: Training, other: Training) -> None:
    left, right = one.bits(), other.bits()
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []
    assert one.schedule.get_last_lr() == other.schedule.get_last_lr()


@pytest.mark.parametrize("kind", MODULES)
def test_modules_of_every_kind_go_on_with_the_same_bits(tmp_path: Path, kind: str) -> None:
    check_goes_on(
        tmp_path, lambda seed: Training(MODULES[kind], lambda params: torch.optim.AdamW(params, lr=0.05), seed=seed)
    )


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizers_of_every_kind_go_on_with_the_same_bits(tmp_path: Path, kind: str) -> None:
    check_goes_on(tmp_path, lambda seed: Training(MODULES["plain"], OPTIMIZERS[kind], seed=seed))


def test_a_checkpoint_of_a_compiled_model_is_that_of_the_model(tmp_path: Path) -> None:
    model = cast(nn.Module, torch.compile(nn.Sequential(compiled()), backend="eager"))
    with closing(Checkpointer(tmp_path)) as checkpointer:
        checkpointer.save(1, model=model).result()
        plain = nn.Sequential(nn.Linear(3, 3))
        assert checkpointer.restore(model=plain)
    assert torch.equal(plain.state_dict()["0.weight"], model.state_dict()["_orig_mod.0._orig_mod.weight"])


def test_what_a_users_object_holds_is_the_template_of_what_it_gets(tmp_path: Path) -> None:
    """Its dtype is the checkpoint's; its layout and device are those of what it holds."""
    given = Own(torch.ones(2, 3).t())
    with closing(Checkpointer(tmp_path)) as checkpointer:
        checkpointer.save(1, ema=given).result()
        other = Own(torch.zeros(2, 3).t())
        assert checkpointer.restore(ema=other)
    assert torch.equal(other.value, given.value) and other.value.stride() == given.value.stride()


# What cannot be right is refused when it is saved.


class LeavesOut(nn.Linear):
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        found = super().state_dict(*args, **kwargs)
        return {name: value for name, value in found.items() if "bias" in name}


def sgd(params: Parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


class ByName(torch.optim.AdamW):
    def state_dict(self) -> dict[str, Any]:
        return {"moments": {"model.weight": self.state[self.param_groups[0]["params"][0]]}}


def expanded() -> nn.Module:
    model = nn.Linear(3, 3)
    model.register_buffer("mask", torch.rand(2, 1, 3).expand(2, 4, 3))
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], Callable[[Parameters], Any], str]] = {
    "clones": (
        lambda: Hooked(clones),
        sgd,
        r"gives model\.weight, a Tensor that is not the memory of a parameter or buffer",
    ),
    "an entry that nothing takes": (
        lambda: Hooked(give_calls),
        sgd,
        r"gives model\.calls, a dict that is not the memory",
    ),
    "a buffer whose elements are one": (expanded, sgd, r"model\.mask is expanded"),
    "a trained parameter that is left out": (
        lambda: LeavesOut(3, 3),
        sgd,
        r"model\.weight is trained, and .* leaves it out",
    ),
    "the base of an optimiser": (
        MODULES["plain"],
        lambda params: Sam(params, lr=0.1, momentum=0.9),
        r"optimizer is a Sam, which keeps another optimiser in \.base_optimizer",
    ),
    "an optimiser with a state_dict of its own": (
        MODULES["plain"],
        ByName,
        r"optimizer is a ByName, which has a state_dict\(\) of its own",
    ),
    "a state without names": (
        MODULES["plain"],
        lambda params: Nameless(params, lr=0.1),
        r"optimizer \(Nameless\) keeps a Tensor for model\.0\.weight, and not a dict",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_could_not_be_restored_is_refused_when_it_is_saved(tmp_path: Path, kind: str) -> None:
    module, optimizer, sentence = REFUSED[kind]
    training = Training(module, optimizer, seed=1)
    training.step()
    with closing(Checkpointer(tmp_path)) as checkpointer, pytest.raises(CheckpointError, match=sentence):
        checkpointer.save(1, **training.objects)
    assert list(tmp_path.glob("checkpoint_*")) == []


def test_a_load_hook_that_changes_what_is_loaded_is_told_at_the_restore(tmp_path: Path) -> None:
    def half(module: Any, state: dict[str, Any], prefix: str, *others: Any) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"] / 2

    model = nn.Linear(3, 3)
    model.register_load_state_dict_pre_hook(half)
    with closing(Checkpointer(tmp_path)) as checkpointer:
        checkpointer.save(1, model=model).result()
        with pytest.raises(CheckpointError, match=r"model\.weight is not what was loaded"):
            checkpointer.restore(model=model)


def test_a_module_that_leaves_out_what_is_frozen_and_has_a_load_hook_is_restored(tmp_path: Path) -> None:
    def without_bias(module: nn.Module, state: dict[str, Any], *others: Any) -> None:
        del state["bias"]

    model = Derived()
    model.bias.requires_grad_(False)
    after_state_dict(model, without_bias)
    table = model.table.clone()
    with closing(Checkpointer(tmp_path)) as checkpointer:
        checkpointer.save(1, model=model).result()
        model.table.zero_()
        assert checkpointer.restore(model=model) is not None
    assert torch.equal(model.table, table)
