"""Whatever people hand to a Checkpointer goes on with the same bits after a restore, or is refused when it is saved."""

from __future__ import annotations

from collections import defaultdict
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


def before_load(module: nn.Module, hook: Callable[..., None]) -> None:
    module.register_load_state_dict_pre_hook(hook)


class Hooked(nn.Linear):
    """A matrix, with hooks on what its state_dict gives and on what it takes back."""

    def __init__(self, gives: Callable[..., None], takes: Callable[..., None] | None = None, **options: Any):
        super().__init__(3, 3, **options)
        self.calls: dict[str, Any] = {}
        after_state_dict(self, gives)
        if takes is not None:
            before_load(self, takes)


def each_as(change: Callable[[Tensor], Tensor]) -> Callable[..., None]:
    """Gives its tensors changed."""

    def hook(module: nn.Module, state: dict[str, Any], *others: Any) -> None:
        state.update({name: change(value) for name, value in state.items()})

    return hook


class Wider(Hooked):
    """Holds bfloat16 and gives float32, which loses nothing."""

    def __init__(self) -> None:
        super().__init__(each_as(Tensor.float), dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.bfloat16()).float()


class Packed(nn.Module):
    """Saves its two matrices as one, under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = self.q(x) * self.k(x)
        return product

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        found = super().state_dict(*args, **kwargs)
        return {"qk.weight": torch.cat([found["q.weight"], found["k.weight"]])} | {
            name: found[name] for name in ("q.bias", "k.bias")
        }

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        q, k = state["qk.weight"].chunk(2)
        values = {"q.weight": q, "k.weight": k, "q.bias": state["q.bias"], "k.bias": state["k.bias"]}
        return super().load_state_dict(values, strict, assign)


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


class Counted(nn.Linear):
    """Computes with something that is no tensor."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.calls: dict[str, Any] = {"number": 0, "scale": torch.ones(())}

    def forward(self, x: Tensor) -> Tensor:
        self.calls = {"number": self.calls["number"] + 1, "scale": self.calls["scale"] * 1.5}
        scaled: Tensor = super().forward(x) * self.calls["number"] * self.calls["scale"]
        return scaled


class Counting(Counted):
    """Gives it by hooks, and takes it back."""

    def __init__(self) -> None:
        super().__init__()
        after_state_dict(self, give_calls)
        before_load(self, take_calls)


def give_calls(module: Any, state: dict[str, Any], prefix: str, *others: Any) -> None:
    state[f"{prefix}calls"] = module.calls


def take_calls(module: Any, state: dict[str, Any], prefix: str, *others: Any) -> None:
    module.calls = state.pop(f"{prefix}calls")


class ExtraState(Counted):
    def get_extra_state(self) -> dict[str, Any]:
        return self.calls

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.calls = state


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


def cloning() -> nn.Module:
    """Gives copies, as modules do that gather their parameters."""
    return Hooked(each_as(Tensor.clone))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)),
    "clones": cloning,
    "nested clones": lambda: nn.Sequential(nn.Linear(3, 3), cloning()),
    "converts without loss": Wider,
    "packs": Packed,
    "load hook": Derived,
    "entry with hooks": Counting,
    "nested entry with hooks": lambda: nn.Sequential(nn.Linear(3, 3), Counting()),
    "extra state": ExtraState,
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


class Lookahead(torch.optim.Optimizer):
    """Slow weights beside those of another optimiser, named by position."""

    def __init__(self, params: Parameters):
        self.optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
        self.param_groups = self.optimizer.param_groups
        self.state: Any = defaultdict(dict)
        self.count = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.optimizer.step()
        self.count += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                slow = self.state[parameter].setdefault("slow", parameter.detach().clone())
                if self.count % 2 == 0:
                    slow.add_(parameter - slow, alpha=0.5)
                    parameter.copy_(slow)

    def state_dict(self) -> dict[str, Any]:
        every = [parameter for group in self.param_groups for parameter in group["params"]]
        slow = [self.state[parameter].get("slow") for parameter in every]
        return {"fast": self.optimizer.state_dict(), "slow": slow, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["fast"])
        self.param_groups = self.optimizer.param_groups
        every = [parameter for group in self.param_groups for parameter in group["params"]]
        for parameter, slow in zip(every, state["slow"], strict=True):
            self.state[parameter]["slow"] = slow
        self.count = state["count"]


class Wrapper(torch.optim.Optimizer):
    """Shows another optimiser's groups and state as its own, as Accelerate's does."""

    def __init__(self, params: Parameters):
        self.optimizer = torch.optim.AdamW(params, lr=0.01)

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)
    defaults = property(lambda self: self.optimizer.defaults)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.optimizer.load_state_dict(state)


OPTIMIZERS: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "AdamW, its rate a tensor": lambda params: torch.optim.AdamW(
        params, lr=torch.tensor(0.01), amsgrad=True, foreach=False
    ),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
    "ASGD": lambda params: torch.optim.ASGD(params, lr=0.01),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "Rprop": lambda params: torch.optim.Rprop(params, lr=0.01),
    "LBFGS": lambda params: torch.optim.LBFGS(params, lr=0.01, max_iter=2),
    "lists, numbers, dots": lambda params: Lists(params, lr=0.01),
    "Lookahead": Lookahead,
    "Wrapper": Wrapper,
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


@pytest.mark.parametrize(("hooked", "kind"), [(1, "AdamW, its rate a tensor"), (2, "lists, numbers, dots")])
def test_a_state_dict_hook_that_comes_or_goes_does_not_matter(tmp_path: Path, hooked: int, kind: str) -> None:
    """How an optimiser is loaded depends on the checkpoint. The hook is on the one saved (1), or on the one restored (2)."""

    def make(seed: int) -> Training:
        training = Training(MODULES["plain"], OPTIMIZERS[kind], seed=seed)
        if seed == hooked:
            training.optimizer.register_state_dict_post_hook(lambda optimizer, state: state)
        return training

    check_goes_on(tmp_path, make)


def test_a_checkpoint_of_a_compiled_model_is_that_of_the_model(tmp_path: Path) -> None:
    model = compiled()
    with closing(Checkpointer(tmp_path)) as checkpointer:
        checkpointer.save(1, model=model).result()
        plain = nn.Linear(3, 3)
        assert checkpointer.restore(model=plain)
    assert torch.equal(plain.weight, model.state_dict()["_orig_mod.weight"])


def test_what_a_users_object_holds_is_the_template_of_what_it_gets(tmp_path: Path) -> None:
    """Its dtype is the checkpoint's; its layout and device are those of what it holds."""
    given = Own(torch.ones(2, 3).t())
    with closing(Checkpointer(tmp_path)) as checkpointer:
        checkpointer.save(1, ema=given).result()
        other = Own(torch.zeros(2, 3).t())
        assert checkpointer.restore(ema=other)
    assert torch.equal(other.value, given.value) and other.value.stride() == given.value.stride()


# What cannot be right is refused when it is saved.


def doubled(module: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
    """Gives other values than it holds, as adapters do that are merged for export."""
    state[f"{prefix}weight"] = state[f"{prefix}weight"] * 2


def renamed(module: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
    state[f"{prefix}kernel"] = state.pop(f"{prefix}weight").clone()


class LeavesOut(nn.Linear):
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        found = super().state_dict(*args, **kwargs)
        return {name: value for name, value in found.items() if "bias" in name}


def sgd(params: Parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


REFUSED: dict[str, tuple[Callable[[], nn.Module], Callable[[Parameters], Any], str]] = {
    "fewer bits": (
        lambda: Hooked(each_as(Tensor.bfloat16)),
        sgd,
        r"gives model\.weight as torch\.bfloat16, and it is torch\.float32",
    ),
    "other values": (lambda: Hooked(doubled), sgd, r"gives other values for model\.weight than it holds"),
    "an entry that nothing takes": (
        lambda: Hooked(give_calls),
        sgd,
        r"gives model\.calls, a dict, which nothing would take back",
    ),
    "a tensor that nothing takes": (
        lambda: Hooked(renamed),
        sgd,
        r"gives model\.kernel, which is no parameter or buffer",
    ),
    "a trained parameter that is left out": (
        lambda: LeavesOut(3, 3),
        sgd,
        r"model\.weight is trained, and .* leaves it out",
    ),
    "the base of an optimiser": (
        MODULES["plain"],
        lambda params: Sam(params, lr=0.1, momentum=0.9),
        r"optimizer \(Sam\) keeps another optimiser in \.base_optimizer",
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


def test_hooks_that_are_not_each_others_inverse_are_told_at_the_restore(tmp_path: Path) -> None:
    with closing(Checkpointer(tmp_path)) as checkpointer:
        checkpointer.save(1, model=Hooked(doubled, halved_twice)).result()
        with pytest.raises(CheckpointError, match=r"model\.weight is not what was loaded"):
            checkpointer.restore(model=Hooked(doubled, halved_twice))


def halved_twice(module: Any, state: dict[str, Any], prefix: str, *others: Any) -> None:
    state[f"{prefix}weight"] = state[f"{prefix}weight"] / 4
