"""Load torch._dynamo, the front of torch.compile, only for a program that uses it.

PyTorch's optimisers and DDP import it to tell it that they are not to be compiled. It brings sympy, DTensor, FSDP and the
exporters along: 800 modules, and as much processor time as `import torch` itself, on every rank and at every start. Until
something else is wanted of it, a stand-in answers what they ask, as the real one does where nothing is compiled; any other
use, of this package or of the user's code, loads the real one. torch offers no way to do without it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

NAME = "torch._dynamo"
# What modules of torch ask, whether or not anything is compiled: (who, for what) -> the answer where nothing is.
_ANSWERS: dict[tuple[Any, str], Any] = {
    ("torch.optim.optimizer", "graph_break"): lambda msg="": None,
    ("torch._compile", "disable"): lambda function, recursive=True, **options: function,
    # The answer is that of torch._dynamo.config's default.
    ("torch.nn.parallel.distributed", "utils"): SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer"),
    # init_process_group, if there is such a module: nothing is cached in one that is not loaded.
    ("torch.distributed.distributed_c10d", "trace_rules"): SimpleNamespace(clear_lru_cache=lambda: None),
}


def load_dynamo_on_demand() -> None:
    """Put the stand-in in the place of torch._dynamo, if that is not loaded. torch has to be."""
    if NAME not in sys.modules:
        stand_in = _StandIn(NAME)
        sys.modules[NAME] = vars(sys.modules["torch"])["_dynamo"] = stand_in
        sys.meta_path.insert(0, stand_in)


class _StandIn(ModuleType):
    """What torch._dynamo is taken for until it is loaded, and what loads it when one of its modules is imported."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []  # so that `import torch._dynamo.config` looks for it, and finds `find_spec`

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # questions of the import system and of inspect
            raise AttributeError(name)
        asked = sys._getframe(1).f_globals.get("__name__"), name
        return _ANSWERS[asked] if asked in _ANSWERS else getattr(self._load(), name)

    def _load(self) -> ModuleType:
        """Load the real one, and return it."""
        if sys.modules.get(NAME) is self:
            del sys.modules[NAME]
            vars(sys.modules["torch"]).pop("_dynamo", None)  # its __getattr__ finds the real one, also half loaded
        return importlib.import_module(NAME)

    # The import system and importlib.metadata ask every finder for these.
    find_distributions = None

    def invalidate_caches(self) -> None:
        """Do nothing: nothing is cached."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if not name.startswith(f"{NAME}.") or sys.modules.get(NAME) is not self:
            return None
        self._load()
        # What the package itself imports is loaded by now, and is not loaded once more.
        return ModuleSpec(name, self) if name in sys.modules else importlib.util.find_spec(name)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: it is loaded."""
