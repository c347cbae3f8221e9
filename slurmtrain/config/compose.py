"""From overrides, or from what a program has built, to a typed and checked `Config`.

Hydra is imported only where something is composed: the verbs that look at runs do without it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from slurmtrain.config import secrets
from slurmtrain.config.fields import typed
from slurmtrain.config.folders import Primary, search_folders, search_path
from slurmtrain.config.frozen import SECRET_REFERENCE, resolve_secrets, to_values
from slurmtrain.config.known_models import with_sizes
from slurmtrain.config.schema import SHARES, Config
from slurmtrain.errors import ConfigError, UsageError, first_line, shown
from slurmtrain.system.redaction import SECRET_NAME, hide

ENVIRONMENT = re.compile(r"\$\{oc\.env:([A-Za-z_]\w*)")  # with or without a default


def register_schema() -> None:
    """Register the schema under the name in the defaults list of conf/config.yaml, for a program that composes with Hydra."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="schema", node=defaults())
    _register_resolver()


def _register_resolver() -> None:
    """Register what puts a value into a word of job.command that stands in single quotes."""
    from omegaconf import OmegaConf

    escape = "'\"'\"'"
    OmegaConf.register_new_resolver("in_quotes", lambda value: str(value).replace("'", escape), replace=True)


def defaults() -> dict[str, Any]:
    """Return the defaults of all fields as plain values; those that follow the number of steps are still open."""
    values = to_values(Config())
    for group, name, _ in SHARES:
        values[group][name] = None
    return values


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
        ConfigError: a value of the wrong type, or outside of its range.
    """
    from slurmtrain.config.composition import Composer

    return Composer(Primary(config_name, search_folders(config_name, config_dir, config_path))).compose(overrides)


@contextmanager
def explaining() -> Iterator[None]:
    """Raise errors of Hydra and omegaconf as one sentence."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        yield
    except RecursionError:
        raise UsageError("values are nested too deeply, or refer to each other in a circle") from None
    except (HydraException, OmegaConfBaseException, ValueError, TypeError, AttributeError, OSError) as error:
        cause: BaseException = error
        while cause.__cause__ is not None:  # Hydra wraps omegaconf's words in "Error merging override"
            cause = cause.__cause__
        bare = re.match(r"Interpolation key '(\w+)' not found", str(cause))
        if bare is not None:
            name = bare.group(1)
            raise UsageError(
                f"${{{name}}} refers to another config key, but there is no key called {name!r}",
                hint=f"for bash write ${name} or \\${{{name}}}; the value that the variable has now: ${{oc.env:{name}}}",
            ) from None
        full_key = re.search(r"full_key: (\S+)", str(cause))
        if full_key is None:
            raise UsageError(
                first_line(error), hint="python -m slurmtrain --cfg job shows the composed config"
            ) from None
        kind = UsageError if full_key.group(1).startswith("hydra.") else ConfigError
        raise kind(
            f"{full_key.group(1)}: {first_line(cause)}", hint="python -m slurmtrain --cfg job shows all fields"
        ) from None


def finish(values: dict[str, Any], overrides: Sequence[str]) -> Config:
    """Resolve composed values, except for secrets, and build the config of them.

    Raises:
        UsageError, ConfigError: as for `compose`.
    """
    return _checked(typed(resolved(values), Config), overrides)


def resolved(values: dict[str, Any]) -> dict[str, Any]:
    """Return values with their interpolations resolved, except for those of secrets."""
    if "${" not in repr(values):
        return values
    from hydra.core.utils import setup_globals
    from omegaconf import OmegaConf

    named = values.get("secrets")
    kept = _without_secrets(values, frozenset(named if isinstance(named, Mapping) else ()))
    with explaining():
        setup_globals()  # the resolvers that Hydra's users know, such as ${now:}
        _register_resolver()
        return OmegaConf.to_container(OmegaConf.create(kept), resolve=True)  # type: ignore[return-value]


def with_shares(values: dict[str, Any]) -> dict[str, Any]:
    """Put the numbers that follow train.steps into plain values, as `Config` does."""
    steps = (values.get("train") or {}).get("steps")
    for group, name, share in SHARES:
        part = values.get(group)
        if isinstance(steps, int) and isinstance(part, dict) and part.get(name) is None:
            part[name] = share.of(steps)
    return values


def from_program(values: Any) -> Config:
    """Return the config that a program has built, as a `Config` or a DictConfig, after the checks of a composed one.

    Raises:
        UsageError: an unknown key.
        ConfigError: a value of the wrong type, or a secret that is written out or not set.
    """
    if isinstance(values, Config):
        try:
            return _checked(typed(to_values(values), Config), ())
        except TypeError as error:  # what JSON has no word for
            raise ConfigError(f"a config value does not have a plain type: {error}") from None
    from omegaconf import OmegaConf

    with explaining():
        container = OmegaConf.to_container(values, enum_to_str=True)
    if not isinstance(container, dict):
        raise ConfigError(f"{shown(container)} is not a config")
    return finish(container, ())  # type: ignore[arg-type]


def _checked(config: Config, overrides: Sequence[str]) -> Config:
    config.model = with_sizes(config.model)
    values, plain = secrets.read(config.secrets), to_values(config)
    hide(values)
    secrets.refuse_written_out(values, plain, overrides)
    resolve_secrets(plain, {**os.environ, **values})  # said here when one is not set, not by every rank
    return config


def _without_secrets(value: Any, named: Collection[str], key: str = "") -> Any:
    """Escape `${oc.env:X}` of secrets, so that resolving leaves the interpolation and no secret reaches the disk.

    Args:
        named: variables that are secrets, even if their names do not look like it.
    """
    if isinstance(value, dict):
        return {name: _without_secrets(item, named, f"{key}.{name}".lstrip(".")) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_secrets(item, named, f"{key}[{at}]") for at, item in enumerate(value)]
    if not isinstance(value, str) or "${" not in value:
        return value
    read = ENVIRONMENT.findall(value)
    # omegaconf's message about a value that it cannot use repeats the value.
    hide({name: os.environ.get(name, "") for name in read if name in named or SECRET_NAME.search(name)})
    last = re.split(r"[.\[]", key)[-1]
    if not any(name in named for name in read) and not SECRET_NAME.search(value) and not SECRET_NAME.search(last):
        return value
    kept = SECRET_REFERENCE.sub(lambda match: "\\" + match.group(), value)
    if "${oc.env:" in re.sub(r"\\\$", "", kept):
        raise ConfigError(
            f"{key} is {value!r}: a secret must be taken from the environment without a default",
            hint="write ${oc.env:NAME}",
        )
    return kept


# What needs all of Hydra: its own config, for a sweeper, and what it prints by itself.


@contextmanager
def initialized(primary: Primary) -> Iterator[None]:
    """Set Hydra up to compose from these folders."""
    from hydra import initialize_config_dir

    register_schema()
    with initialize_config_dir(str(primary.folders[0]), version_base="1.3"):
        yield


def composed_by_hydra(primary: Primary, overrides: Sequence[str]) -> Any:
    """Return the DictConfig that Hydra composes with its own node, interpolations unresolved. Called within `initialized`."""
    from hydra import compose as hydra_compose

    others = primary.folders[1:]
    with explaining():
        words = [*overrides, *([search_path(others)] if others else [])]
        return hydra_compose(primary.name, words, return_hydra_config=True)
