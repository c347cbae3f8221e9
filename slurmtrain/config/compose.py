"""From overrides to a typed `Config`, and from a `Config` to its frozen yaml and back.

Hydra is imported only where something is composed: the job reads its frozen yaml with omegaconf alone, and the verbs
that look at runs need neither. Hydra's message about a bad override is turned into one sentence with the nearest names.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import hashlib
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slurmtrain.config import secrets
from slurmtrain.config.families import with_sizes
from slurmtrain.config.field_types import check_types, shown
from slurmtrain.config.keys import fields_instead, unknown_field
from slurmtrain.config.migrations import as_first_digested, header, migrate, version_of, without_unused
from slurmtrain.config.schema import Config
from slurmtrain.config.typed import structured, typed
from slurmtrain.earlier_names import NAMES, is_our_decoder
from slurmtrain.errors import ConfigError, SlurmtrainError, UsageError, nearest
from slurmtrain.resources import shipped
from slurmtrain.system import records
from slurmtrain.system.redaction import SECRET_NAME, SECRET_VARIABLE, hide

SECRET_REFERENCE = re.compile(r"\$\{oc\.env:([A-Za-z_]\w*)\}")  # the form of a secret on disk; it has no default
ENVIRONMENT = re.compile(r"\$\{oc\.env:([A-Za-z_]\w*)")  # the same, with or without a default
LONGEST_LINE = 400  # characters of what Hydra or omegaconf says
OVERRIDE = re.compile(r"^(\+\+|\+|~)?([A-Za-z_][\w./@-]*)(?:=(.*))?$", re.DOTALL)  # sign, key, value

OWN_CLUSTERS = "conf/cluster"  # in the folder of the command


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


@dataclasses.dataclass(frozen=True)
class Primary:
    """The primary config's name, and the folders that are searched, its own first."""

    name: str
    folders: Sequence[Path]


def search_folders(config_name: str, config_dir: str | None, config_path: str | None) -> list[Path]:
    """Return the folders to search, in order.

    The last one is conf/ of the current folder if it describes clusters, as `probe` leaves it.

    Raises:
        UsageError: a folder does not exist, or --config-path holds no primary config.
        ConfigError: this is the copy of the package in a run's snapshot, which has no configs.
    """
    folders = [_shipped_configs()]
    for option, given in (("--config-dir", config_dir), ("--config-path", config_path)):
        if given is None:
            continue
        own = Path(given).expanduser().resolve()
        if not own.is_dir():
            raise UsageError(f"{option} {given}: there is no such folder", hint="give a folder with yaml files")
        has_primary = (own / f"{config_name}.yaml").is_file()
        if option == "--config-path" and not has_primary:
            raise UsageError(
                f"--config-path {given}: there is no {config_name}.yaml in this folder",
                hint="name its primary config with --config-name, or add it to the shipped ones with --config-dir",
            )
        # Hydra looks for the primary config in the first folder only.
        folders.insert(0 if has_primary else len(folders), own)
    here = Path(OWN_CLUSTERS).resolve()
    if here.is_dir() and here.parent not in folders:
        folders.append(here.parent)
    return folders


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
    except (
        HydraException,
        OmegaConfBaseException,
        ValueError,
    ) as error:  # ValueError: Hydra's, for `=3` or `cluster=3`
        raise _explain(error, overrides, primary) from None


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


def search_path(folders: Sequence[Path]) -> str:
    """Return the override that makes Hydra search these folders after the first one, quoted since a path may hold a comma."""
    quoted = ",".join("'file://" + str(folder).replace("'", "\\'") + "'" for folder in folders)
    return f"hydra.searchpath=[{quoted}]"


def _refuse_unknown(part: Any, where: str = "") -> None:
    known = {field.name for field in dataclasses.fields(part)}
    for name, value in vars(part).items():
        if name not in known:
            error = unknown_field(f"{where}{name}", "")
            assert error is not None
            raise error
        if dataclasses.is_dataclass(value):
            _refuse_unknown(value, f"{where}{name}.")


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


def freeze(config: Config) -> str:
    """Return the fully resolved yaml for the run directory, with the version of the schema as its first line.

    Interpolations of secrets are not resolved.
    """
    import yaml

    # No allow_unicode: with it, PyYAML writes Unicode's own line ends unchanged and reads them back as a space.
    # libyaml's dumper, where PyYAML was built with it, takes a third of the time.
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    text: str = yaml.dump(without_unused(to_values(config)), Dumper=dumper, sort_keys=False, default_flow_style=False)
    return header() + text


def load_frozen(path: Path, *, with_secrets: bool = True) -> Config:
    """Read a frozen config back.

    Args:
        with_secrets: resolve secrets to their values; without, they stay `${oc.env:X}`, for a config that is written to
            disk.

    Raises:
        ConfigError: it is missing, is not a config of this version or an earlier one, or a secret is not in the
            environment.
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
    left_out = migrate(values, version_of(data.decode()))
    if left_out:
        import logging  # here, since --help loads this module and needs none

        logging.getLogger(__name__).warning("unknown fields ignored: %s of %s", ", ".join(left_out), path)
    try:
        if with_secrets:
            values = resolve_secrets(values, {**os.environ, **secrets.given(values.get("secrets") or {})})
        return to_config(values)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path} is not a config of this version: {first_line(error)}") from None


def config_hash(config: Config) -> str:
    """Return the identity of an experiment: 12 hex digits over the values that decide its result.

    The order of keys does not matter.

    Name, run folder, cluster, evaluation and checks are left out: the same experiment elsewhere is the same experiment.
    """
    values = as_first_digested(to_values(config))
    for key in ("cluster", "eval", "hooks", "secrets"):
        del values[key]
    for key in ("watchdog", "observe", "preflight"):
        values.pop(key, None)
    for key in ("name", "runs_dir", "snapshot", "snapshot_max_mb", "singleton"):
        del values["job"][key]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


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


def _explain(error: Exception, overrides: Sequence[str], primary: Primary) -> SlurmtrainError:
    """Return one sentence for an error of Hydra or omegaconf."""
    unreadable = getattr(error, "override", None)  # Hydra's grammar refused it: OverrideParseException
    if unreadable is not None:
        return UsageError(
            f"cannot read the override {shown(str(unreadable))!r}",
            hint="write key=value, +key=value or ~key; quote a value with other characters: key='\"a=b#c\"'",
        )
    several = re.match(
        r"(?:Ambiguous value for argument|Sweep parameters) '(.*?)'(?: requires --multirun)?$", first_line(error)
    )
    if several is not None:
        key = several.group(1).partition("=")[0].lstrip("+")
        return UsageError(
            f"{shown(several.group(1))} gives several values, but a run accepts only one",
            hint=f"a sweep over them: -m {several.group(1)} submit; a list: {key}=[...]; a text with commas: {key}='\"a,b\"'",
        )
    groups = config_groups(primary.folders)
    for override in overrides:
        match = OVERRIDE.match(override)
        if match is None:
            return UsageError(
                f"cannot read the override {shown(override)!r}", hint="write key=value, +key=value or ~key"
            )
        sign, key, value = match.group(1) or "", match.group(2), match.group(3)
        if key.startswith("hydra"):
            continue
        if key in groups and value and not value.startswith("{"):
            if value not in groups[key]:
                return UsageError(f"there is no {key} called {shown(value)!r}", hint=nearest(value, groups[key]))
            continue
        unknown = unknown_field(key, f" (in {shown(override)!r})") or _unknown_open_key(
            sign, key, overrides, groups, primary
        )
        if unknown is not None:
            return unknown
        hint = fields_instead(key, value) if value and not value.startswith(("{", "$")) else None
        if hint is not None:
            return UsageError(f"{key} is a group of fields and cannot have a value (in {shown(override)!r})", hint=hint)
    cause: BaseException = error
    while cause.__cause__ is not None:  # Hydra wraps omegaconf's words in "Error merging override"
        cause = cause.__cause__
    bare = re.match(r"Interpolation key '(\w+)' not found", str(cause))
    if bare is not None:
        name = bare.group(1)
        return UsageError(
            f"${{{name}}} refers to another config key, but there is no key called {name!r}",
            hint=f"for bash write ${name} or \\${{{name}}}; the value that the variable has now: ${{oc.env:{name}}}",
        )
    full_key = re.search(r"full_key: (\S+)", str(cause))
    if full_key and full_key.group(1):
        key = full_key.group(1)
        if key.startswith("hydra."):
            return UsageError(
                f"{key}: {first_line(cause)}", hint="python -m slurmtrain --cfg hydra shows all Hydra fields"
            )
        return unknown_field(key, "") or ConfigError(  # a key in a yaml file
            f"{key}: {first_line(cause)}", hint="python -m slurmtrain --cfg job shows all fields"
        )
    return UsageError(first_line(error), hint="python -m slurmtrain --cfg job shows the composed config")


def _shipped_configs() -> Path:
    folder = shipped("conf")
    if not folder.is_dir():
        raise ConfigError(
            f"there are no configs in {folder}: the slurmtrain of the current folder runs, which is the snapshot of a run",
            hint="change to another folder; `resume` and the other verbs find a run from anywhere",
        )
    return folder


def config_groups(folders: Sequence[Path] = ()) -> dict[str, list[str]]:
    """Return the config groups and their options in these folders, or in the shipped one."""
    groups: dict[str, list[str]] = {}
    for root in folders or [_shipped_configs()]:
        for folder in sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith((".", "_"))):
            groups.setdefault(folder.name, []).extend(sorted(file.stem for file in folder.glob("*.yaml")))
    return groups


def _unknown_open_key(
    sign: str, key: str, overrides: Sequence[str], groups: dict[str, list[str]], primary: Primary
) -> UsageError | None:
    """Return the error for a key that an open dict (model, data, cluster.env) lacks, unless given with a plus."""
    if sign in ("+", "++"):
        return None
    node = _without_unknown_keys(key, overrides, groups, primary)
    path: list[str] = []
    for word in key.split("."):
        if not isinstance(node, dict):
            return None
        if word not in node:
            break
        node = node[word]
        path.append(word)
    else:
        return None
    wrong = f"{'.'.join(path)} has no key {word!r}"
    if path == ["model"] and is_our_decoder(node) and word in NAMES:
        return UsageError(wrong, hint=f"it is called model.{NAMES[word]}, as in Llama's own files")
    if sign == "~":
        return UsageError(wrong, hint=nearest(word, node) if node else "there is nothing to remove")
    added = next(f"+{override}" for override in overrides if override.partition("=")[0] == key)
    others = _options_with(word, path[0], primary.folders) if len(path) == 1 and path[0] in groups else []
    if others and not difflib.get_close_matches(word, node, cutoff=0.75):
        meant = " or ".join(f"{path[0]}={option}" for option in others)
        return UsageError(wrong, hint=f"{meant} has it, to be chosen in the same command; {added} adds it to this one")
    return UsageError(wrong, hint=f"{nearest(word, node)}; {added} adds it" if node else f"write {added}")


def _options_with(key: str, group: str, folders: Sequence[Path]) -> list[str]:
    """Return the options of a config group whose files have this key, at most three."""
    import yaml

    found = []
    for path in (path for folder in folders for path in sorted((folder / group).glob("*.yaml"))):
        try:
            values = yaml.safe_load(path.read_text())
        except (OSError, ValueError, yaml.YAMLError):
            continue
        if isinstance(values, dict) and key in values:
            found.append(path.stem)
    return found[:3]


def _without_unknown_keys(
    key: str, overrides: Sequence[str], groups: dict[str, list[str]], primary: Primary
) -> dict[str, Any] | None:
    """Return what the chosen groups and the added keys beside `key` compose to; None when that fails, too."""
    from omegaconf import OmegaConf

    top = key.partition(".")[0]
    kept = [
        override
        for override in overrides
        if (match := OVERRIDE.match(override))
        and (match.group(2) in groups or (match.group(1) in ("+", "++") and match.group(2).startswith(f"{top}.")))
    ]
    try:
        with initialized(primary):
            values: Any = OmegaConf.to_container(composed_by_hydra(primary, kept))
    except Exception:  # whatever it is: the error that is being explained is the one to show
        return None
    return values if isinstance(values, dict) else None
