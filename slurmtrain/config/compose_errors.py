"""What is wrong with overrides that Hydra or omegaconf has refused, in one sentence with the nearest names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slurmtrain.config.field_types import shown
from slurmtrain.config.folders import Primary, config_groups
from slurmtrain.config.frozen import first_line
from slurmtrain.config.keys import fields_instead, unknown_field
from slurmtrain.errors import ConfigError, SlurmtrainError, UsageError, nearest

Composed = Callable[[Sequence[str]], Any]

OVERRIDE = re.compile(r"^(\+\+|\+|~)?([A-Za-z_][\w./@-]*)(?:=(.*))?$", re.DOTALL)  # sign, key, value


def explain(error: Exception, overrides: Sequence[str], primary: Primary, composed: Composed) -> SlurmtrainError:
    """Return one sentence for an error of Hydra or omegaconf that these overrides have caused.

    Args:
        composed: composes overrides to plain values, or raises any error.
    """
    return _of_grammar(error) or _of_overrides(overrides, primary, composed) or _of_values(error)


def _of_grammar(error: Exception) -> UsageError | None:
    """Return the error for an override that Hydra's grammar refuses, or that gives several values."""
    unreadable = getattr(error, "override", None)  # of OverrideParseException
    if unreadable is not None:
        return UsageError(
            f"cannot read the override {shown(str(unreadable))!r}",
            hint="write key=value, +key=value or ~key; quote a value with other characters: key='\"a=b#c\"'",
        )
    several = re.match(
        r"(?:Ambiguous value for argument|Sweep parameters) '(.*?)'(?: requires --multirun)?$", first_line(error)
    )
    if several is None:
        return None
    key = several.group(1).partition("=")[0].lstrip("+")
    return UsageError(
        f"{shown(several.group(1))} gives several values, but a run accepts only one",
        hint=f"a sweep over them: -m {several.group(1)} submit; a list: {key}=[...]; a text with commas: {key}='\"a,b\"'",
    )


def _of_overrides(overrides: Sequence[str], primary: Primary, composed: Composed) -> UsageError | None:
    """Return the error for the first override that names what does not exist; None if all of them can be meant."""
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
        unknown = unknown_field(key, f" (in {shown(override)!r})")
        if unknown is None and sign not in ("+", "++"):
            values = _without_unknown_keys(key, overrides, groups, composed)
            unknown = _unknown_open_key(override, sign, key, values, groups, primary.folders)
        if unknown is not None:
            return unknown
        hint = fields_instead(key, value) if value and not value.startswith(("{", "$")) else None
        if hint is not None:
            return UsageError(f"{key} is a group of fields and cannot have a value (in {shown(override)!r})", hint=hint)
    return None


def _of_values(error: Exception) -> SlurmtrainError:
    """Return the error for an interpolation or a value that cannot be used."""
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
    if full_key is None:
        return UsageError(first_line(error), hint="python -m slurmtrain --cfg job shows the composed config")
    key = full_key.group(1)
    if key.startswith("hydra."):
        return UsageError(f"{key}: {first_line(cause)}", hint="python -m slurmtrain --cfg hydra shows all Hydra fields")
    return unknown_field(key, "") or ConfigError(  # a key in a yaml file
        f"{key}: {first_line(cause)}", hint="python -m slurmtrain --cfg job shows all fields"
    )


def _unknown_open_key(
    override: str, sign: str, key: str, values: Any, groups: Mapping[str, list[str]], folders: Sequence[Path]
) -> UsageError | None:
    """Return the error for a key that an open dict (model, data, cluster.env) lacks.

    Args:
        values: those of the config without such keys; None: they are not known.
    """
    node, path = values, list[str]()
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
    if sign == "~":
        return UsageError(wrong, hint=nearest(word, node) if node else "there is nothing to remove")
    added = f"+{override}"
    others = _options_with(word, path[0], folders) if len(path) == 1 and path[0] in groups else []
    if others and not difflib.get_close_matches(word, node, cutoff=0.75):
        meant = " or ".join(f"{path[0]}={option}" for option in others)
        return UsageError(wrong, hint=f"{meant} has it, to be chosen in the same command; {added} adds it to this one")
    return UsageError(wrong, hint=f"{nearest(word, node)}; {added} adds it" if node else f"write {added}")


def _without_unknown_keys(
    key: str, overrides: Sequence[str], groups: Mapping[str, list[str]], composed: Composed
) -> Any:
    """Return what the chosen groups and the added keys beside `key` compose to; None when that fails, too."""
    top = key.partition(".")[0]
    kept = [
        override
        for override in overrides
        if (match := OVERRIDE.match(override))
        and (match.group(2) in groups or (match.group(1) in ("+", "++") and match.group(2).startswith(f"{top}.")))
    ]
    try:
        return composed(kept)
    except Exception:  # whatever it is: the error that is being explained is the one to show
        return None


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
