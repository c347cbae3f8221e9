"""Load torch._dynamo, the front of torch.compile, only for a program that uses it.

PyTorch's optimisers and DDP import it to tell it that they are not to be compiled. It brings sympy, DTensor, FSDP and the
exporters along: a thousand modules, and as much processor time as `import torch` itself, on every rank and at every
start. Until something else is wanted of it, a stand-in answers what they ask, as the real one does where nothing is
compiled; any other use, of this package or of the user's code, loads the real one.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

NAME = "torch._dynamo"


def load_dynamo_on_demand() -> None:
    """Put the stand-in in the place of torch._dynamo, if that is not loaded. torch has to be."""
    import torch

    if NAME not in sys.modules:
        stand_in = _StandIn(NAME)
        sys.modules[NAME] = stand_in
        torch._dynamo = stand_in
        sys.meta_path.insert(0, _Finder(stand_in))


class _StandIn(ModuleType):
    """What torch._dynamo is taken for until it is loaded."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []  # so that `import torch._dynamo.config` looks for it, and finds `_Finder`

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # questions of the import system and of inspect
            raise AttributeError(name)
        if sys.modules.get(NAME) is self:
            answer = _ANSWERS.get((_caller(), name))
            if answer is not None:
                return answer
        return getattr(load(), name)


def _graph_break(msg: str = "") -> None:
    """Do nothing, as outside of a compilation."""


def _disable(function: Callable[..., Any], recursive: bool = True, **options: Any) -> Callable[..., Any]:
    """Return a function of PyTorch's own, which is not compiled, as it is."""
    return function


def _caller() -> str:
    """Return the name of the module that asks the stand-in for an attribute."""
    return str(sys._getframe(2).f_globals.get("__name__"))


# What modules of torch ask, whether or not anything is compiled: (who, for what) -> the answer where nothing is.
_ANSWERS: dict[tuple[str, str], Any] = {
    ("torch.optim.optimizer", "graph_break"): _graph_break,
    ("torch._compile", "disable"): _disable,
    # The answer is that of torch._dynamo.config's default.
    ("torch.nn.parallel.distributed", "utils"): SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer"),
    # init_process_group, if there is such a module: nothing is cached in one that is not loaded.
    ("torch.distributed.distributed_c10d", "trace_rules"): SimpleNamespace(clear_lru_cache=lambda: None),
}


def load() -> ModuleType:
    """Load the real torch._dynamo, and return it."""
    if isinstance(sys.modules.get(NAME), _StandIn):
        del sys.modules[NAME]
        vars(sys.modules["torch"]).pop("_dynamo", None)  # its __getattr__ finds the real one, also half loaded
    return importlib.import_module(NAME)


class _Finder(importlib.abc.MetaPathFinder):
    """Loads the real package when one of its modules is imported."""

    def __init__(self, stand_in: _StandIn):
        self._stand_in = stand_in

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith(f"{NAME}.") or sys.modules.get(NAME) is not self._stand_in:
            return None
        load()
        found = sys.modules.get(name)
        if found is None:  # it is no part of what the package itself imports
            return importlib.machinery.PathFinder.find_spec(name, sys.modules[NAME].__path__, target)
        return importlib.machinery.ModuleSpec(name, _Loaded(found))


class _Loaded(importlib.abc.Loader):
    """The loader of a module that has been loaded already."""

    def __init__(self, module: ModuleType):
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec
