"""From a `Config` to its frozen yaml, and back: what a job reads, without Hydra.

A secret stays an interpolation on the disk, and gets its value where the config is read.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurmtrain.config import secrets
from slurmtrain.config.schema import Config
from slurmtrain.config.typed import structured, typed
from slurmtrain.errors import ConfigError
from slurmtrain.system import records
from slurmtrain.system.redaction import SECRET_VARIABLE, hide

SECRET_REFERENCE = re.compile(r"\$\{oc\.env:([A-Za-z_]\w*)\}")  # the form of a secret on disk; it has no default
LONGEST_LINE = 400  # characters of what Hydra or omegaconf says
SCHEMA_VERSION = 1
HEADER = "# Frozen by slurmtrain, schema version {}.\n"
HEADER_LINE = re.compile(r"# Frozen by slurmtrain, schema version (\d+)\.")


def freeze(config: Config) -> str:
    """Return the fully resolved yaml for the run directory, with the version of the schema as its first line.

    Interpolations of secrets are not resolved.
    """
    import yaml

    # No allow_unicode: with it, PyYAML writes Unicode's own line ends unchanged and reads them back as a space.
    # libyaml's dumper, where PyYAML was built with it, takes a third of the time.
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    text: str = yaml.dump(to_values(config), Dumper=dumper, sort_keys=False, default_flow_style=False)
    return HEADER.format(SCHEMA_VERSION) + text


def load_frozen(path: Path, *, with_secrets: bool = True) -> Config:
    """Read a frozen config back.

    Args:
        with_secrets: resolve secrets to their values; without, they stay `${oc.env:X}`, for a config that is written to
            disk.

    Raises:
        ConfigError: it is missing, is not a config of this version, or a secret is not in the environment.
    """
    from omegaconf.errors import OmegaConfBaseException

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
    try:
        if with_secrets:
            values = resolve_secrets(values, {**os.environ, **secrets.given(values.get("secrets") or {})})
        return to_config(values)
    except OmegaConfBaseException as error:
        found = HEADER_LINE.match(data.decode())
        newer = found is not None and int(found[1]) > SCHEMA_VERSION
        raise ConfigError(
            f"{path} is not a config of this version: {first_line(error)}",
            hint="a newer slurmtrain froze it: install that one where the job runs" if newer else None,
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
        OmegaConfBaseException: there is an unknown key or a wrong type.
        ConfigError: a field does not know the word that it is given.
    """
    from omegaconf import OmegaConf

    return typed(
        OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(structured(Config)), _literal(values))), Config
    )


def to_values(config: Config) -> dict[str, Any]:
    """Return the config as plain dicts, lists and scalars, in the schema's order."""
    values: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
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


def _literal(values: Any) -> Any:
    """Escape everything that omegaconf would take for an interpolation.

    Backslashes are special only in front of one.
    """
    if isinstance(values, dict):
        return {key: _literal(value) for key, value in values.items()}
    if isinstance(values, list):
        return [_literal(value) for value in values]
    if isinstance(values, str):
        return re.sub(r"(\\*)\$\{", lambda match: match.group(1) * 2 + r"\${", values)
    return values


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, shortened, since omegaconf repeats values however long they are."""
    line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return line if len(line) <= LONGEST_LINE else f"{line[: LONGEST_LINE - 4]} ..."
