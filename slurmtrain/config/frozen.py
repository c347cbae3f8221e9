"""From a `Config` to its frozen yaml, and back: what a job reads, without Hydra.

A secret stays an interpolation on the disk, and gets its value where the config is read.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from slurmtrain.config import secrets
from slurmtrain.config.fields import typed
from slurmtrain.config.schema import Config
from slurmtrain.errors import ConfigError, SlurmtrainError, first_line
from slurmtrain.system import records
from slurmtrain.system.redaction import SECRET_VARIABLE, hide

SECRET_REFERENCE = re.compile(r"\$\{oc\.env:([A-Za-z_]\w*)\}")  # the form of a secret on disk; it has no default
SCHEMA_VERSION = 1
HEADER = f"# Frozen by slurmtrain, schema version {SCHEMA_VERSION}.\n"


def freeze(config: Config | Mapping[str, Any]) -> str:
    """Return the fully resolved yaml for the run directory, with the version of the schema as its first line.

    Interpolations of secrets are not resolved.

    Args:
        config: the config, or what `to_values` returns for it.
    """
    values = to_values(config) if isinstance(config, Config) else config
    return HEADER + "".join(_section(json.dumps({key: part})) for key, part in values.items())


@functools.lru_cache(maxsize=256)
def _section(values: str) -> str:
    """Return a group of fields as yaml; the points of a sweep have most of them in common."""
    import yaml

    # No allow_unicode: with it, PyYAML writes Unicode's own line ends unchanged and reads them back as a space.
    # libyaml's dumper, where PyYAML was built with it, takes a third of the time.
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    text: str = yaml.dump(json.loads(values), Dumper=dumper, sort_keys=False, default_flow_style=False)
    return text


def load_frozen(path: Path, *, with_secrets: bool = True) -> Config:
    """Read a frozen config back.

    Args:
        with_secrets: resolve secrets to their values; without, they stay `${oc.env:X}`, for a config that is written to
            disk.

    Raises:
        ConfigError: it is missing, is not a config of this version, or a secret is not in the environment.
    """
    try:
        data = path.read_bytes()
        values = records.parse_yaml(data)
    except FileNotFoundError:
        raise ConfigError(
            f"{path} is missing", hint="is this a run directory, and is its file system mounted?"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{path} is not a config of this version: {first_line(error)}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} contains no config", hint="it was written at submit; has it been edited?")
    if with_secrets:
        values = resolve_secrets(values, {**os.environ, **secrets.given(values.get("secrets") or {})})
    try:
        return to_config(values)
    except SlurmtrainError as error:
        raise ConfigError(
            f"{path} is not a config of this version: {error.message}",
            hint="if another version of slurmtrain froze it, install that one where the job runs",
        ) from None


def config_hash(config: Config) -> str:
    """Return the identity of an experiment: 12 hex digits over the values that decide its result.

    The order of keys does not matter.

    Name, run folder, cluster, evaluation and checks are left out: the same experiment elsewhere is the same experiment.
    """
    values = to_values(config)
    for key in ("cluster", "eval", "hooks", "secrets", "watchdog", "observe", "preflight"):
        del values[key]
    for key in ("name", "runs_dir", "snapshot", "snapshot_max_mb", "singleton"):
        del values["job"][key]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def to_config(values: Any) -> Config:
    """Check plain values against the schema and build the `Config`. Text is taken literally, even `${...}` of bash.

    Raises:
        UsageError, ConfigError: there is an unknown key, or a value that its field does not take.
    """
    return typed(values, Config)


def to_values(config: Config) -> dict[str, Any]:
    """Return the config as plain dicts, lists and scalars, in the schema's order."""
    values: dict[str, Any] = json.loads(json.dumps(msgspec.to_builtins(config)))
    return values


def resolve_secrets(values: Any, variables: Mapping[str, str], where: str = "") -> Any:
    """Return plain values with every remaining `${oc.env:X}` replaced by the variable's value, which is redacted in all output.

    Raises:
        ConfigError: the variable is not set.
    """
    if isinstance(values, dict):
        return {key: resolve_secrets(value, variables, f"{where}.{key}".lstrip(".")) for key, value in values.items()}
    if isinstance(values, list):
        return [resolve_secrets(value, variables, f"{where}[{index}]") for index, value in enumerate(values)]
    if not isinstance(values, str):
        return values

    def value_of(match: re.Match[str]) -> str:
        name = match.group(1)
        if name not in variables:
            raise ConfigError(
                f"{where} is {values!r}, but the environment variable {name} is not set",
                hint=f"export {name}=... in the shell that submits; the job inherits it",
            )
        if SECRET_VARIABLE.search(name):  # the values of other variables may be a part of any path
            hide({name: variables[name]})
        return variables[name]

    return SECRET_REFERENCE.sub(value_of, values)
