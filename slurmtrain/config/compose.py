"""From overrides, or from what a program has built, to a typed and checked `Config`.

Hydra is imported only where something is composed: the verbs that look at runs do without it.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from slurmtrain.config import secrets
from slurmtrain.config.compose_errors import explain
from slurmtrain.config.families import with_sizes
from slurmtrain.config.field_types import check_types
from slurmtrain.config.folders import Primary, search_folders, search_path
from slurmtrain.config.frozen import SECRET_REFERENCE, first_line, resolve_secrets, to_config, to_values
from slurmtrain.config.keys import unknown_field
from slurmtrain.config.schema import Config
from slurmtrain.config.typed import structured, typed
from slurmtrain.errors import ConfigError
from slurmtrain.system.redaction import SECRET_NAME, hide

ENVIRONMENT = re.compile(r"\$\{oc\.env:([A-Za-z_]\w*)")  # with or without a default


def register_schema() -> None:
    """Register the schema under the name that the defaults list of conf/config.yaml uses."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="schema", node=structured(Config))


def compose(
    overrides: Sequence[str],
    *,
    config_name: str = "config",
    config_dir: str | None = None,
    config_path: str | None = None,
) -> Config:
    """Compose the config that `overrides` describe.

    Args:
        overrides: Hydra's grammar: `key=value`, `+key=value`, `~key`, `group=option`.
        config_name: the primary config.
        config_dir: a folder of the user's own configs, searched besides the shipped ones.
        config_path: a folder that holds the primary config and is searched before all others.

    Raises:
        UsageError: an unknown key, group or option, or an override that cannot be parsed.
        ConfigError: a value of the wrong type.
    """
    return compose_from(Primary(config_name, search_folders(config_name, config_dir, config_path)), overrides)


def compose_from(primary: Primary, overrides: Sequence[str]) -> Config:
    """Compose a config from these folders.

    Raises:
        UsageError, ConfigError: as for `compose`.
    """
    with explaining(overrides, primary), initialized(primary):
        return finish(composed_by_hydra(primary, overrides), overrides)


@contextmanager
def explaining(overrides: Sequence[str], primary: Primary) -> Iterator[None]:
    """Raise errors of Hydra or omegaconf as one sentence."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        yield
    except (HydraException, OmegaConfBaseException, ValueError) as error:  # the last: Hydra's, for `=3` or `cluster=3`
        raise explain(error, overrides, primary, partial(_composed_values, primary)) from None


@contextmanager
def initialized(primary: Primary) -> Iterator[None]:
    """Set Hydra up to compose from these folders."""
    from hydra import initialize_config_dir

    register_schema()
    with initialize_config_dir(str(primary.folders[0]), version_base="1.3"):
        yield


def composed_by_hydra(primary: Primary, overrides: Sequence[str], *, with_hydra: bool = False) -> Any:
    """Return the DictConfig that Hydra composes, with interpolations unresolved. Called within `initialized`.

    Args:
        with_hydra: keep Hydra's own node.
    """
    from hydra import compose as hydra_compose
    from hydra.errors import HydraException

    from slurmtrain.config.override_parser import for_hydra

    others = primary.folders[1:]
    words = [for_hydra(override) for override in overrides]
    words += [search_path(others)] if others else []
    try:
        return hydra_compose(primary.name, words, return_hydra_config=with_hydra)
    except (TypeError, AttributeError, OSError, RecursionError, AssertionError) as error:
        # Hydra's own errors, for values that it did not expect: a list as the choice of a group, a name longer than a
        # file's.
        raise HydraException(f"Hydra cannot compose these overrides: {first_line(error)}") from None


def _composed_values(primary: Primary, overrides: Sequence[str]) -> Any:
    from omegaconf import OmegaConf

    with initialized(primary):
        return OmegaConf.to_container(composed_by_hydra(primary, overrides))


def finish(composed: Any, overrides: Sequence[str]) -> Config:
    """Resolve the composed config, except for secrets, and check it against the schema."""
    from omegaconf import OmegaConf

    _keep_secrets_unresolved(composed, frozenset(composed.get("secrets") or ()))
    if OmegaConf.get_type(composed) is structured(Config):
        built = OmegaConf.to_object(composed)
        _refuse_unknown(built)  # `+cluster.node=3` gets past Hydra, and omegaconf makes an attribute of it
        config = typed(built, Config)
    else:  # a primary config of somebody's own, that does not begin with our schema
        config = to_config(OmegaConf.to_container(composed, resolve=True))
    return _checked(config, overrides)


def from_program(values: Any) -> Config:
    """Return the config that a program has built, as a `Config` or a DictConfig, after the checks of a composed one.

    Raises:
        UsageError: an unknown key.
        ConfigError: a value of the wrong type, or a secret that is written out or not set.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        if isinstance(values, Config):
            return _checked(to_config(to_values(values)), ())
        _keep_secrets_unresolved(values := copy.deepcopy(values), frozenset(values.get("secrets") or ()))
        return _checked(to_config(OmegaConf.to_container(values, resolve=True)), ())
    except OmegaConfBaseException as error:
        key = re.search(r"full_key: (\S+)", str(error))
        unknown = unknown_field(key.group(1), "") if key else None
        raise unknown or ConfigError(f"{key.group(1) + ': ' if key else ''}{first_line(error)}") from None
    except TypeError as error:  # what JSON has no word for
        raise ConfigError(f"a config value does not have a plain type: {error}") from None


def _checked(config: Config, overrides: Sequence[str]) -> Config:
    check_types(config)
    config = dataclasses.replace(config, model=with_sizes(config.model))
    values, plain = secrets.read(config.secrets), to_values(config)
    hide(values)
    secrets.refuse_written_out(values, plain, overrides)
    resolve_secrets(plain, {**os.environ, **values})  # said here when one is not set, not by every rank
    return config


def literal_override(key: str, text: str) -> str:
    """Return the override that sets a field to this text, whatever characters are in it.

    `${oc.env:NAME}` alone keeps its meaning, which it also has in the frozen config.
    """
    text = re.sub(r"(\\*)\$\{(?!oc\.env:)", lambda match: match.group(1) * 2 + r"\${", text)
    text = re.sub(r"(\\*)'", lambda match: match.group(1) * 2 + r"\'", text)
    text = re.sub(r"(\\+)\Z", lambda match: match.group(1) * 2, text)
    return f"{key}='{text}'"


def _refuse_unknown(part: Any, where: str = "") -> None:
    known = {field.name for field in dataclasses.fields(part)}
    for name, value in vars(part).items():
        if name not in known:
            error = unknown_field(f"{where}{name}", "")
            assert error is not None
            raise error
        if dataclasses.is_dataclass(value):
            _refuse_unknown(value, f"{where}{name}.")


def _keep_secrets_unresolved(node: Any, named: Collection[str]) -> None:
    """Escape `${oc.env:X}` of secrets, so that resolving leaves the interpolation and no secret reaches the disk.

    Args:
        named: variables that are secrets, even if their names do not look like it.
    """
    from omegaconf import DictConfig, ListConfig

    keys = list(node.keys()) if isinstance(node, DictConfig) else range(len(node))
    for key in keys:
        raw = node._get_node(key)
        if isinstance(raw, (DictConfig, ListConfig)):
            if not raw._is_none() and not raw._is_missing() and not raw._is_interpolation():
                _keep_secrets_unresolved(raw, named)
            continue
        text = raw._value() if raw is not None else None
        if not isinstance(text, str):
            continue
        read = ENVIRONMENT.findall(text)
        # omegaconf's message about a value that it cannot use repeats the value.
        hide({name: os.environ.get(name, "") for name in read if name in named or SECRET_NAME.search(name)})
        is_named = any(name in named for name in read)
        if is_named or SECRET_NAME.search(text) or SECRET_NAME.search(str(key)):
            kept = SECRET_REFERENCE.sub(lambda match: "\\" + match.group(), text)
            if "${oc.env:" in re.sub(r"\\\$", "", kept):
                raise ConfigError(
                    f"{raw._get_full_key(None)} is {text!r}: a secret must be taken from the environment without a default",
                    hint="write ${oc.env:NAME}",
                )
            raw._set_value(kept)
