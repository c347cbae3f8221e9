"""Objects of classes that a config names by `_target_`: models, data, hooks and metrics of the user's own among them."""

from __future__ import annotations

import sys
from typing import Any

from slurmtrain.errors import ConfigError, SlurmtrainError, why_not_built
from slurmtrain.system.node_copies import with_copies


def build(group: str, values: dict[str, Any]) -> Any:
    """Instantiate a config group's `_target_`, which reads the copies of this node where cluster.stage has made some.

    Raises:
        ConfigError: it cannot be imported, or does not take these arguments.
    """
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    try:
        return instantiate(with_copies(values), _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, SlurmtrainError):
            raise cause from None
        if cause is not None and not isinstance(cause, (ImportError, TypeError, AttributeError)):
            raise cause from None  # the class itself failed: its own traceback says more
        target = str(values.get("_target_"))
        raise ConfigError(
            f"{group}._target_={target}: {why_not_built(error, target)}",
            hint=f"is it importable from {sys.path[0] or 'the working directory'}, and are its arguments spelled correctly?",
        ) from None
