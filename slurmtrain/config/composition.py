"""From config files and overrides to plain values: Hydra says which files belong together, and in which order.

Only Hydra's grammar and its defaults lists are used, not its `compose`: that also loads Hydra's own config and all of its
plugins, and sets up what belongs to the whole process, which a program that uses Hydra itself would notice.
"""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from hydra import version
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.defaults_list import create_defaults_list
from hydra.core.override_parser.types import Override
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import OmegaConf
from packaging.version import Version

from slurmtrain.config.compose import defaults, explaining, finish
from slurmtrain.config.fields import MISSING, raise_all
from slurmtrain.config.folders import Primary, config_groups
from slurmtrain.config.keys import fields_instead, unknown_field
from slurmtrain.config.overrides import parse
from slurmtrain.config.schema import Config
from slurmtrain.errors import ConfigError, SlurmtrainError, UsageError, nearest, shown
from slurmtrain.system.records import config_loader

T = TypeVar("T")
R = TypeVar("R")
SCHEMA = "schema"  # a name in defaults lists: the defaults of all fields, which every config begins with
FOR_HYDRA = re.compile(r"(optional |override )*/?hydra/")  # an entry of a defaults list that is not about our config


class Files(ConfigRepository):
    """The config files in some folders, for Hydra; each is read once."""

    def __init__(self, folders: Sequence[Path]):
        self.sources: list[ConfigSource] = [FileConfigSource("slurmtrain", f"file://{folder}") for folder in folders]
        self._loaded: dict[str, ConfigResult | None] = {}

    def load_config(self, config_path: str) -> ConfigResult | None:
        if config_path not in self._loaded:
            self._loaded[config_path] = self._load(config_path)
        return copy.copy(self._loaded[config_path])

    def _load(self, config_path: str) -> ConfigResult | None:
        if config_path == SCHEMA:
            return ConfigResult("slurmtrain", SCHEMA, {}, {"package": None}, [])  # type: ignore[arg-type]
        source = next((source for source in self.sources if source.is_config(config_path)), None)
        if source is None:
            return None
        path = Path(source.path, ConfigSource._normalize_file_name(config_path))
        try:
            text = path.read_text()
            values = yaml.load(text, config_loader()) or {}
        except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
            raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
        if not isinstance(values, dict):
            raise ConfigError(f"{path} is not a mapping of keys to values", hint="write one `key: value` on each line")
        listed = values.pop("defaults", [])
        entries: list[Any] = listed if isinstance(listed, list) else [None]
        if not all(isinstance(each, str | dict) and all(isinstance(key, str) for key in each) for each in entries):
            raise ConfigError(f"{path}: defaults is not a list of configs", hint="defaults: [{cluster: local}, _self_]")
        kept = [each for each in entries if isinstance(each, str) or not any(map(FOR_HYDRA.match, each))]
        header = ConfigSource._get_header_dict(text[:512])
        result = ConfigResult("slurmtrain", str(path), values, header)  # type: ignore[arg-type]
        result.defaults_list = self._create_defaults_list(str(path), OmegaConf.create(kept))
        return result


class Composer:
    """Composes any number of configs from the same folders; what they have in common is read and merged once."""

    def __init__(self, primary: Primary):
        self.primary, self._files = primary, Files(primary.folders)
        self._groups = config_groups(primary.folders)
        self._merged: dict[tuple[str, ...], dict[str, Any]] = {}  # by the choices of groups

    def compose(self, overrides: Sequence[str]) -> Config:
        """Return the checked config that overrides describe.

        Raises:
            UsageError, ConfigError: as for `compose`.
        """
        return finish(self.values(overrides), overrides)

    def values(self, overrides: Sequence[str]) -> dict[str, Any]:
        """Return the plain values that overrides describe, with their interpolations, and without checks of the values.

        Raises:
            UsageError: an unknown key, group or option, or an override that cannot be parsed.
        """
        parsed = _for_each(self._parsed, overrides)
        choices = [override for override in parsed if self.chooses_group(override)]
        chosen = tuple(str(override.input_line) for override in choices)
        with explaining():
            if chosen not in self._merged:
                self._merged[chosen] = self._merge_files(choices)
        values = copy.deepcopy(self._merged[chosen])
        fields = [each for each in parsed if not each.is_hydra_override() and each not in choices]
        _for_each(lambda override: self._set(values, override), fields)
        return values

    def chooses_group(self, override: Override) -> bool:
        """Return whether an override chooses a file for a group, by Hydra's own rule."""
        if override.is_hydra_override() or isinstance(override.value(), dict):
            return False
        return self._files.group_exists(override.key_or_group)

    def _merge_files(self, choices: list[Override]) -> dict[str, Any]:
        """Return what the chosen files say, each merged over those before it."""
        base = version.VersionBase.instance()  # of the whole process
        before, base.version_base = base.version_base, Version("1.3")
        try:
            found = create_defaults_list(
                self._files, self.primary.name, choices, prepend_hydra=False, skip_missing=False
            )
        finally:
            base.version_base = before
        values = defaults()
        for default in found.defaults:
            loaded = self._files.load_config(default.config_path) if default.config_path is not None else None
            if loaded is not None:
                package = loaded.header["package"] if default.package is None else default.package
                inner: Any = loaded.config
                for name in reversed(package.split(".") if package else []):
                    inner = {name: inner}
                merge(values, inner)
        values.pop("hydra", None)
        return values

    def _parsed(self, word: str) -> Override:
        """Parse an override.

        Raises:
            UsageError: it cannot be read, gives several values, or names a key or an option that does not exist.
        """
        override: Override = parse(word)
        key, value, groups = override.key_or_group, override.value(), self._groups
        if override.is_sweep_override():
            raise UsageError(
                f"{shown(word)} gives several values, but a run accepts only one",
                hint=f"a sweep over them: -m {shown(word)} submit; a list: {key}=[...]; a text with commas: "
                f"{key}='\"a,b\"'",
            )
        if override.is_hydra_override():
            if key == "hydra.searchpath":
                raise UsageError(f"{shown(word)}: folders of configs are not read from it", hint="--config-dir FOLDER")
        elif key in groups:
            is_option = isinstance(value, str) and (value in groups[key] or "/" in value)
            if not (is_option or isinstance(value, dict) or override.is_delete()):
                raise UsageError(f"there is no {key} called {shown(value)!r}", hint=nearest(str(value), groups[key]))
        elif override.package is not None or "/" in key:
            raise UsageError(f"there is no config group {key!r} (in {shown(word)!r})", hint=nearest(key, groups))
        elif (unknown := unknown_field(key, f" (in {shown(word)!r})")) is not None:
            raise unknown
        elif not isinstance(value, dict) and not override.is_delete() and not str(value).startswith("${"):
            hint = fields_instead(key, str(value))
            if hint is not None:
                raise UsageError(f"{key} is a group of fields and cannot have a value (in {shown(word)!r})", hint=hint)
        return override

    def _set(self, values: dict[str, Any], override: Override) -> None:
        """Set a field of `values`, add a key to an open group, or remove one."""
        word, value = str(override.input_line), override.value()
        *path, last = override.key_or_group.split(".")
        inside: Any = values
        for number, name in enumerate([*path, last]):
            where = ".".join(path[:number])
            if isinstance(inside, list) and name.isdecimal() and int(name) < len(inside):
                key: Any = int(name)
            elif not isinstance(inside, dict):
                raise UsageError(f"{where} is {shown(inside)}, and has no {name!r} (in {shown(word)!r})")
            elif name in inside or override.is_add() or override.is_force_add():
                key = name
            else:
                hint = nearest(name, inside) if override.is_delete() else self._hint(word, where, name, inside)
                raise UsageError(f"{where} has no key {name!r}", hint=hint)
            if number < len(path):
                inside = inside.setdefault(key, {}) if isinstance(inside, dict) else inside[key]
        there = inside.get(key) if isinstance(inside, dict) else inside[key]
        if override.is_delete():
            if value is not None and value != there:
                raise UsageError(f"{override.key_or_group} is {shown(there)}, not {shown(value)} (in {shown(word)!r})")
            del inside[key]
        elif isinstance(value, dict) and isinstance(there, dict):
            merge(there, value)
        else:
            inside[key] = value

    def _hint(self, word: str, group: str, name: str, there: Mapping[str, Any]) -> str:
        """Return a hint about a key that an open group (model, data, cluster.env) lacks; another option may have it."""
        if group in self._groups and not difflib.get_close_matches(name, there, cutoff=0.75):
            files = [path for folder in self.primary.folders for path in sorted((folder / group).glob("*.yaml"))]
            having = re.compile(rf"^{re.escape(name)}:", re.MULTILINE)
            others = [f"{group}={path.stem}" for path in files if having.search(path.read_text(errors="replace"))]
            if others:
                return (
                    f"{' or '.join(others[:3])} has it, to be chosen in the same command; +{word} adds it to this one"
                )
        return f"{nearest(name, there)}; +{word} adds it" if there else f"write +{word}"


def _for_each(do: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Return what a function returns for each item, or raise one error for all that are wrong."""
    done, problems = list[R](), list[SlurmtrainError]()
    for item in items:
        try:
            done.append(do(item))
        except UsageError as error:
            problems.append(error)
    raise_all(problems)
    return done


def merge(into: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Merge values key by key: mappings are merged, all else is replaced; ??? leaves what is there."""
    for key, value in values.items():
        if isinstance(value, dict):
            inside = into.get(key)
            if not isinstance(inside, dict):
                inside = into[key] = {}
            merge(inside, value)
        elif value != MISSING or key not in into:
            into[key] = copy.deepcopy(value)
