"""From overrides, or from what a program has built, to a typed and checked `Config`.

Only Hydra's grammar and its defaults lists are used, not its `compose`: that also loads Hydra's own config and all of its
plugins, and sets up what belongs to the whole process, which a program that uses Hydra itself would notice.

This module imports Hydra, and is imported only where something is composed: the verbs that look at runs do without it.
"""

from __future__ import annotations

import copy
import functools
import os
import re
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import yaml
from hydra import version
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.defaults_list import create_defaults_list
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import create_functions
from hydra.core.override_parser.overrides_visitor import HydraErrorListener, HydraOverrideVisitor
from hydra.core.override_parser.types import Override
from hydra.core.utils import setup_globals
from hydra.errors import HydraException
from hydra.grammar.gen.OverrideLexer import CommonTokenStream, InputStream, OverrideLexer  # type: ignore[attr-defined]
from hydra.grammar.gen.OverrideParser import OverrideParser
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from packaging.version import Version

from slurmtrain.config import secrets
from slurmtrain.config.fields import merge, plain, raise_all, typed
from slurmtrain.config.folders import config_groups, search_folders
from slurmtrain.config.frozen import SECRET_REFERENCE, resolve_secrets, to_values
from slurmtrain.config.known_models import with_sizes
from slurmtrain.config.overrides import (
    fields_instead,
    in_shell,
    kind_inside,
    kind_of,
    literal_override,
    shipped_groups,
    unknown_field,
)
from slurmtrain.config.schema import Config, defaults
from slurmtrain.errors import ConfigError, SlurmtrainError, UsageError, first_line, nearest, shown
from slurmtrain.system.redaction import SECRET_NAME, hide

T = TypeVar("T")
R = TypeVar("R")
SCHEMA = "schema"  # a name in defaults lists: the defaults of all fields, which every config begins with
SWEEPER = "hydra/sweeper"  # the only group of Hydra's own that is read: what expands or chooses the points of a sweep
BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"  # Hydra's own: choices and nothing else
# An override, or an entry of a defaults list, that is about the rest of Hydra.
FOR_HYDRA = re.compile(r"(optional |override )*/?hydra[/.](?!sweeper)")
BUILT_IN: dict[str, dict[str, Any]] = {
    SCHEMA: {},
    f"{SWEEPER}/basic": {"_target_": BASIC_SWEEPER, "max_batch_size": None, "params": None},
}
ENVIRONMENT = re.compile(r"\$\{oc\.env:([A-Za-z_]\w*)")  # with or without a default
FUNCTIONS = create_functions()
SHORT = 200  # characters of an override that a hint repeats
# Puts a value into a word of job.command that stands in single quotes.
OmegaConf.register_new_resolver("in_quotes", lambda value: str(value).replace("'", "'\"'\"'"), replace=True)
# What suits the size of a model, for conf/optim and conf/data: Llama 3 was pretrained at 3e-4, 1.5e-4 and 8e-5 with a dim of
# 4,096, 8,192 and 16,384, and on 8,192 tokens (arXiv:2407.21783, table 3 and section 3.4).
OmegaConf.register_new_resolver(
    "lr_of", lambda model: min(3e-3, float(f"{1.23 / (model.get('dim') or 1):.2g}")), replace=True
)
OmegaConf.register_new_resolver("seq_len_of", lambda model: min(model.get("max_seq_len") or 256, 8192), replace=True)
OF_CHOICES = ("choice", "shuffle", "tag")  # functions whose arguments are values of the field


# A number such as 1e-3, which YAML 1.1 takes for text.
_FLOAT = re.compile(
    r"[-+]?(\d[\d_]*\.[\d_]*([eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+|\.\d[\d_]*([eE][-+]?\d+)?|\.(inf|Inf|INF))"
    r"|\.(nan|NaN|NAN)"
)


@functools.cache
def config_loader() -> Any:
    """Return the loader of YAML for configs: 1e-3 is a number, dates are text, and a key that stands there twice is an error.

    libyaml's parser, where PyYAML was built with it, takes a tenth of the time.
    """
    import yaml

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        """A loader with these rules."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [key.value for key, _ in node.value if key.tag == "tag:yaml.org,2002:str"]
            twice = next((key for key in keys if keys.count(key) > 1), None)
            if twice is not None:
                raise yaml.YAMLError(f"the key {twice!r} is there twice, {str(node.start_mark).strip()}")
            return super().construct_mapping(node, deep=deep)

    Loader.yaml_implicit_resolvers = {
        letter: [(tag, pattern) for tag, pattern in rules if not tag.endswith((":timestamp", ":float"))]
        for letter, rules in Loader.yaml_implicit_resolvers.items()
    }
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(f"(?:{_FLOAT.pattern})$"), list("-+0123456789."))
    return Loader


def compose(overrides: Sequence[str], *, config_name: str = "config", config_dir: str | None = None) -> Config:
    """Compose the config that `overrides` describe.

    Args:
        overrides: Hydra's grammar: `key=value`, `+key=value`, `~key`, `group=option`.
        config_name: the primary config.
        config_dir: a folder of the user's own configs, searched besides the shipped ones; before them, if it holds the
            primary config.

    Raises:
        UsageError: an unknown key, group or option, or an override that cannot be parsed.
        ConfigError: a value of the wrong type, or outside of its range.
    """
    return Composer(search_folders(config_name, config_dir), config_name).compose(overrides)


class Composer(ConfigRepository):
    """Composes any number of configs from the same folders; what they have in common is read and merged once.

    It is the repository of config files that Hydra asks; each is read once.

    Args:
        folders: the folders that are searched; the first one has the primary config.
        config_name: the name of the primary config.
    """

    def __init__(self, folders: Sequence[Path], config_name: str = "config"):
        self.folders, self.config_name = folders, config_name
        self.sources: list[ConfigSource] = [FileConfigSource("slurmtrain", f"file://{folder}") for folder in folders]
        self.load_config = functools.cache(self._load)  # type: ignore[method-assign]
        self.parse = functools.lru_cache(maxsize=4096)(functools.partial(parse, config_loader=self))
        self._groups = config_groups(folders)
        self._groups[SWEEPER] = ["basic", *self.get_group_options(SWEEPER)]
        self._groups[f"{SWEEPER}/sampler"] = self.get_group_options(f"{SWEEPER}/sampler")
        self._merged: dict[tuple[str, ...], dict[str, Any]] = {}  # by the choices of groups
        # The groups with interpolations of the last config, by their text.
        self._resolved: dict[str, dict[str, Any]] = {}

    def compose(self, overrides: Sequence[str]) -> Config:
        """Return the checked config that overrides describe.

        Raises:
            UsageError, ConfigError: as for `compose`.
        """
        values = self.values(overrides)
        del values["hydra"]
        return finish(typed(resolved(values, self._resolved), Config), overrides)

    def values(self, overrides: Sequence[str]) -> dict[str, Any]:
        """Return the plain values that overrides describe, with their interpolations, and without checks of the values.

        Beside the config there is hydra.sweeper: the settings of what expands or chooses the points of a sweep.

        Raises:
            UsageError: an unknown key, group or option, or an override that cannot be parsed.
        """
        parsed = [each for each in _for_each(self._checked, overrides) if not FOR_HYDRA.match(each.key_or_group)]
        choices = [  # by Hydra's own rule
            each for each in parsed if not isinstance(each.value(), dict) and self.group_exists(each.key_or_group)
        ]
        chosen = tuple(str(override.input_line) for override in choices)
        with explaining():
            if chosen not in self._merged:
                self._merged[chosen] = self._merge_files(choices)
        values = copy.deepcopy(self._merged[chosen])
        fields = (each for each in parsed if each not in choices)
        _for_each(lambda override: set_field(values, override, self.folders), fields)
        return values

    def _load(self, config_path: str) -> ConfigResult | None:
        """Return what a config file says, or a config that has no file."""
        if config_path in BUILT_IN:
            return ConfigResult("slurmtrain", config_path, BUILT_IN[config_path], {"package": None}, [])  # type: ignore[arg-type]
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
        if config_path == self.config_name:
            kept = [{SWEEPER: "basic"}, *kept]
        header = ConfigSource._get_header_dict(text[:512])
        result = ConfigResult("slurmtrain", str(path), values, header)  # type: ignore[arg-type]
        result.defaults_list = self._create_defaults_list(str(path), OmegaConf.create(kept))
        return result

    def _merge_files(self, choices: list[Override]) -> dict[str, Any]:
        """Return what the chosen files say, each merged over those before it."""
        base = version.VersionBase.instance()  # of the whole process
        before, base.version_base = base.version_base, Version("1.3")
        try:
            found = create_defaults_list(self, self.config_name, choices, prepend_hydra=False, skip_missing=False)
        finally:
            base.version_base = before
        values = to_values(defaults())
        for default in found.defaults:
            loaded = self.load_config(default.config_path) if default.config_path is not None else None
            if loaded is not None:
                package = loaded.header["package"] if default.package is None else default.package
                inner: Any = loaded.config
                for name in reversed(package.split(".") if package else []):
                    inner = {name: inner}
                merge(values, inner)
        values["hydra"] = {"sweeper": values["hydra"]["sweeper"]}
        return values

    def _checked(self, word: str) -> Override:
        """Parse an override.

        Raises:
            UsageError: it cannot be read, gives several values, or names a key or an option that does not exist.
        """
        override = self.parse(word)
        key, value, groups = override.key_or_group, override.value(), self._groups
        if override.is_sweep_override():
            word = word.replace("+job.args.", "+", 1)  # as it was typed
            raise UsageError(
                f"{shown(word)} gives several values, but a run accepts only one",
                hint=f"a sweep over them: -m {shown(word)} submit; a list: {key}=[...]; a text with commas: "
                f"{key}='\"a,b\"'",
            )
        if override.is_hydra_override() and key not in groups:
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


def set_field(values: dict[str, Any], override: Override, folders: Sequence[Path] = ()) -> None:
    """Set a field of a config's plain values, add a key to an open group (model, data, cluster.env), or remove one.

    Args:
        folders: where another option of the group may have a key that this one lacks.

    Raises:
        UsageError: there is no such key.
    """
    word, value = str(override.input_line), override.value()
    *path, last = override.key_or_group.split(".")
    inside: Any = values
    for number, name in enumerate([*path, last]):
        where = ".".join(path[:number])
        if not isinstance(inside, dict):
            raise UsageError(f"{where} is {shown(inside)}, and has no {name!r} (in {shown(word)!r})")
        if name not in inside and not override.is_add() and not override.is_force_add():
            hint = nearest(name, inside, f"{where}.".lstrip("."))
            if not override.is_delete():
                hint = f"{hint} (+{word} adds it)".strip() if inside else f"write +{word}"
            files = [path for folder in folders for path in sorted((folder / where).glob("*.yaml"))]
            having = re.compile(rf"^{re.escape(name)}:", re.MULTILINE)
            if others := [f"{where}={path.stem}" for path in files if having.search(path.read_text(errors="replace"))]:
                hint = f"{' or '.join(others[:3])} has it, to be chosen in the same command; {hint}"
            raise UsageError(f"{where} has no key {name!r}", hint=hint)
        if number < len(path):
            inside = inside.setdefault(name, {})
    if override.is_delete():
        del inside[last]
    elif isinstance(value, dict) and isinstance(inside.get(last), dict):
        merge(inside[last], value)
    else:
        inside[last] = value


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


# Overrides as a person writes them.


class Word(str):
    """A word as it was typed; `value` is what Hydra reads in it, a number or a boolean."""

    __slots__ = ("value",)
    value: Any


class Visitor(HydraOverrideVisitor):
    """Makes a `Word` of each number and boolean in a value."""

    def visitPrimitive(self, ctx: Any) -> Any:
        value = super().visitPrimitive(ctx)
        if not isinstance(value, bool | int | float):
            return value
        word = Word(ctx.getText().strip())
        word.value = value
        return word

    def visitFunction(self, ctx: Any) -> Any:
        if ctx.getChild(0).getText() in OF_CHOICES:
            return super().visitFunction(ctx)
        return HydraOverrideVisitor(self.functions).visitFunction(ctx)


def parse(word: str, config_loader: Any = None) -> Override:
    """Read a word of the command line by Hydra's grammar, in which text stays as it is typed where a field takes text.

    Hydra reads a value by its look, without the type of the field: `cluster.account=1e5` would be the account 100000.0, and
    `job.command=true` no program. The choices of a sweep stay as they are typed, too, since each point's overrides are
    parsed again.

    Args:
        config_loader: Hydra's, which knows what `glob(*)` stands for.

    Raises:
        UsageError: it cannot be read.
    """
    lexer = OverrideLexer(InputStream(word))
    parser = OverrideParser(CommonTokenStream(lexer))
    for each in (lexer, parser):
        each.removeErrorListeners()
        each.addErrorListener(HydraErrorListener())
    try:
        parsed: Override = Visitor(FUNCTIONS).visit(parser.override())  # type: ignore[no-untyped-call]
        if not parsed.key_or_group:
            raise ValueError
    except (HydraException, ValueError, RecursionError):  # the last two: digits without end, and brackets
        said = f"cannot read the override {shown(word)!r}"
        hint = "write key=value, +key=value or ~key; quote a value with other characters: key='\"a=b#c\"'"
        key, _, value = word.partition("=")
        if len(word) < SHORT and (value.count("'") % 2 or value.count('"') % 2):
            said += ", in which a quote does not end"
            hint = f"as a part of the value, it is typed {in_shell(literal_override(key, value))}"
        raise UsageError(said, hint=hint) from None
    parsed.input_line, parsed.config_loader = word, config_loader
    key = parsed.key_or_group
    # A job that changes a field of its run may have no config files.
    choice = "." not in key and key in shipped_groups() and not isinstance(parsed._value, dict)
    parsed._value = _settled(parsed._value, str if choice else kind_of(key))
    return parsed


def _settled(value: Any, kind: Any) -> Any:
    """Return a parsed value in which each word is text where the field takes text, and otherwise what Hydra reads in it."""
    kind = plain(kind)
    items = typing.get_args(kind)[0] if typing.get_origin(kind) is list else Any
    if isinstance(value, Word):
        return str(value) if kind is str or plain(items) is str else value.value
    if isinstance(value, list):
        return [_settled(item, items) for item in value]
    if hasattr(value, "simple_form"):  # Hydra's ChoiceSweep
        value.list = [_settled(item, kind) for item in value.list]
    if isinstance(value, dict):
        return {_settled(name, Any): _settled(item, kind_inside(kind, str(name))) for name, item in value.items()}
    return value


# From plain values to a config.


def finish(config: Config, overrides: Sequence[str] = ()) -> Config:
    """Check what is beside the fields of a typed config: the folder of its model, and its secrets.

    Raises:
        ConfigError: the model does not fit the folder, or a secret is written out or not set.
    """
    config.model = with_sizes(config.model)
    texts = to_values(config)
    if config.secrets or "${oc.env:" in repr(texts):
        values = secrets.read(config.secrets)
        hide(values)
        secrets.refuse_written_out(values, texts, overrides)
        resolve_secrets(texts, {**os.environ, **values})  # said here when one is not set, not by every rank
    return config


def from_program(values: Any) -> Config:
    """Return the config that a program has built, as a `Config` or a DictConfig, after the checks of a composed one.

    Raises:
        UsageError: an unknown key.
        ConfigError: a value of the wrong type, or a secret that is written out or not set.
    """
    if isinstance(values, Config):
        try:
            return finish(typed(to_values(values), Config))
        except TypeError as error:  # what JSON has no word for
            raise ConfigError(f"a config value does not have a plain type: {error}") from None
    with explaining():
        container: Any = OmegaConf.to_container(values, enum_to_str=True)
    return finish(typed(resolved(container) if isinstance(container, dict) else container, Config))


def resolved(values: dict[str, Any], last: dict[str, dict[str, Any]] | None = None) -> dict[str, Any]:
    """Return values with their interpolations resolved, except for those of secrets.

    omegaconf takes a hundredth of a second for a whole config, and a sweep has thousands of them. So it only gets the groups
    with interpolations, and those whose names are in them.

    Args:
        last: keeps these groups of the last config; the next point of a sweep often has the same.
    """
    texts = {name: repr(part) for name, part in values.items()}
    groups = {name for name, text in texts.items() if "${" in text}
    while more := {name for each in groups for name in re.findall(r"\w+", texts[each])} & values.keys() - groups:
        groups |= more
    if not groups:
        return values
    named = values.get("secrets")
    some = {name: part for name, part in values.items() if name in groups}
    text = repr((some, named))
    last = {} if last is None else last
    if text not in last:
        kept = _without_secrets(some, frozenset(named if isinstance(named, Mapping) else ()))
        with explaining():
            setup_globals()  # the resolvers that Hydra's users know, such as ${now:}
            found: Any = OmegaConf.to_container(OmegaConf.create(kept), resolve=True)
        last.clear()
        last[text] = found
    return {**values, **last[text]}


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


@contextmanager
def explaining() -> Iterator[None]:
    """Raise errors of Hydra and omegaconf as one sentence."""
    try:
        yield
    except RecursionError:
        raise UsageError("values are nested too deeply, or refer to each other in a circle") from None
    except (HydraException, OmegaConfBaseException, ValueError, TypeError, AttributeError, OSError) as error:
        cause: BaseException = error
        while cause.__cause__ is not None:  # Hydra wraps omegaconf's words in "Error merging override"
            cause = cause.__cause__
        if bare := re.match(r"Interpolation key '(\w+)' not found", str(cause)):
            raise UsageError(
                f"${{{bare[1]}}} refers to another config key, but there is no key called {bare[1]!r}",
                hint=f"for bash write ${bare[1]} or \\${{{bare[1]}}}; the value of the variable now: ${{oc.env:{bare[1]}}}",
            ) from None
        key = re.search(r"full_key: (\S+)", str(cause))
        if key is not None and not key[1].startswith("hydra."):
            hint = "python -m slurmtrain --cfg job shows all fields"
            raise ConfigError(f"{key[1]}: {first_line(cause)}", hint=hint) from None
        raise UsageError(first_line(error), hint="python -m slurmtrain --cfg job shows the composed config") from None


def register_schema() -> None:
    """Register the schema under the name in the defaults list of conf/config.yaml, for a program that composes with Hydra."""
    ConfigStore.instance().store(name=SCHEMA, node=to_values(defaults()))
