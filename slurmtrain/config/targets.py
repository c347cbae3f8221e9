"""Why Hydra cannot build the object that a `_target_` of the config names, in one line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slurmtrain.config.frozen import first_line

if TYPE_CHECKING:
    from hydra.errors import InstantiationException


def why_not_built(error: InstantiationException, target: str) -> str:
    """Return the innermost cause: Hydra wraps it into several lines about its own search."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    if isinstance(cause, ModuleNotFoundError) and cause.name == target and "." in target:
        module, _, name = target.rpartition(".")
        return f"{module} has no {name}"
    return first_line(cause)
