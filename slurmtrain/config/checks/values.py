"""Checks that every part of a config needs: a least value, and a class to be built."""

from __future__ import annotations

import re

from slurmtrain.errors import ConfigError

SET_NAME = re.compile(r"[A-Za-z0-9_]+")


def at_least(name: str, value: float, least: float, *, why: str | None = None) -> None:
    """Raise if `value` is below `least`, or not a number; `why` becomes the hint."""
    if not value >= least:
        raise ConfigError(f"{name}={value} must be at least {least}", hint=why)


def check_target(where: str, values: object, hint: str | None = None) -> None:
    """Raise if `values` does not name the class to be built."""
    if not isinstance(values, dict) or not isinstance(values.get("_target_"), str):
        raise ConfigError(f"{where}={values!r} has no _target_", hint=hint or f"+{where}._target_=my_package.MyClass")
