"""Overrides as a person writes them: parsed by Hydra's grammar, with the text of a word kept where a field takes text.

Hydra reads a value by its look, without the type of the field: `cluster.account=1e5` would be the account 100000.0, and
`job.command=true` no program. The grammar is imported where something is parsed, since it takes a while.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import typing
from collections.abc import Sequence
from typing import Any

from slurmtrain.config.fields import plain
from slurmtrain.config.folders import config_groups
from slurmtrain.config.keys import all_keys, kind_inside, kind_of, unknown_field
from slurmtrain.config.launched_program import SHELLS
from slurmtrain.errors import UsageError, nearest, shown

OPEN = tuple(f"eval.{group}{end}" for group in ("sets", "metrics", "cluster", "parallel") for end in ".=")
OF_CHOICES = ("choice", "shuffle", "tag")  # functions whose arguments are values of the field


class Word(str):
    """A word as it was typed; `value` is what Hydra reads in it, a number or a boolean."""

    __slots__ = ("value",)
    value: Any


def literal_override(key: str, text: str) -> str:
    """Return the override that sets a field to this text, whatever characters are in it.

    `${oc.env:NAME}` alone keeps its meaning, which it also has in the frozen config.
    """
    text = re.sub(r"(\\*)\$\{(?!oc\.env:)", lambda match: match.group(1) * 2 + r"\${", text)
    text = re.sub(r"(\\*)'", lambda match: match.group(1) * 2 + r"\'", text)
    text = re.sub(r"(\\+)\Z", lambda match: match.group(1) * 2, text)
    return f"{key}='{text}'"


# Reads a field of the config: `${optim.lr}`, or `${lr}` of a `+lr=1e-3`. Names of variables have capitals.
REFERENCE = re.compile(r"\$\{([a-z_]\w*(?:\.\w+)*)\}")


def with_program(overrides: Sequence[str], program: Sequence[str]) -> list[str]:
    """Return the overrides that make every rank of job=command run this program, word for word.

    `${optim.lr}` in its words stands for the field of the config, and `${lr}` for the value of `+lr=...`, which becomes
    `job.args.lr`. Both are resolved when the config is composed, for each point of a sweep. The code of `bash -c` and
    `python -c` is left as it is.

    Raises:
        UsageError: a word refers to what the config does not have, or none to what was made for it.
    """
    given = {word[1:].partition("=")[0]: word for word in overrides if re.match(r"\+[a-z_]\w*=", word)}
    used: dict[str, str] = {}

    def reference(match: re.Match[str]) -> str:
        name = match[1]
        if name in given:
            used[name] = f"job.args.{name}"
        elif "." not in name and name not in all_keys():
            raise UsageError(
                f"the program has {match[0]}, and the config no {name}: choose it with +{name}=VALUE",
                hint=nearest(name, [*given, *(key for key in all_keys() if "." in key)]),
            )
        elif (unknown := unknown_field(name, f" (in {match[0]} of the program)")) is not None:
            raise unknown
        return f"\0{used.get(name, name)}\1"

    words, code = [], False
    for at, word in enumerate(program):
        words.append(word if code else REFERENCE.sub(reference, word))
        before = [os.path.basename(each) for each in program[:at]]
        runs_code = any(name in SHELLS or name.startswith("python") for name in before)
        code = runs_code and re.fullmatch(r"-\w*c", word) is not None
    for name in given.keys() - used.keys() - {*all_keys()} - shipped_groups():
        raise UsageError(
            f"no word of the program refers to {given[name]}",
            hint=f"write '${{{name}}}', in quotes, or the shell empties it",
        )
    command = literal_override("job.command", shlex.join(words)).replace("\0", "${in_quotes:${").replace("\1", "}}")
    renamed = {given[name]: f"+{key}{given[name][1 + len(name) :]}" for name, key in used.items()}
    kind = [] if "job=command" in overrides else ["job=command"]
    return [*(renamed.get(word, word) for word in overrides), *kind, command]


def normalise(override: str) -> str:
    """Return an override in the form that Hydra accepts, so that a plus in front is optional.

    Both `cluster=a100x4` and `+cluster=a100x4` are accepted: conf/config.yaml lists the group, so Hydra wants no plus.
    Both are also accepted for additions to `eval`, whose sets, metrics and changes have names that nobody can know.
    """
    if override.startswith(OPEN):
        return f"++{override}"
    group = override.partition("=")[0].removeprefix("+")
    return override.removeprefix("+") if group in shipped_groups() else override


@functools.cache
def shipped_groups() -> frozenset[str]:
    """Return the names of the config groups."""
    return frozenset(config_groups())


def parse(override: str, config_loader: Any = None) -> Any:
    """Return Hydra's `Override` of a word of the command line, in which text stays as it is typed where a field takes text.

    The choices of a sweep stay as they are typed, too, since each point's overrides are parsed again.

    Args:
        config_loader: Hydra's, which knows what `glob(*)` stands for.

    Raises:
        UsageError: it cannot be read.
    """
    from hydra.errors import HydraException

    try:
        parsed = parser().parse_rule(override, "override")
        if not parsed.key_or_group:
            raise ValueError
    except (HydraException, ValueError, RecursionError):  # the last two: digits without end, and brackets
        raise UsageError(
            f"cannot read the override {shown(override)!r}",
            hint="write key=value, +key=value or ~key; quote a value with other characters: key='\"a=b#c\"'",
        ) from None
    parsed.config_loader = config_loader
    key = parsed.key_or_group
    # A job that changes a field of its run may have no config files.
    choice = "." not in key and key in shipped_groups() and not isinstance(parsed._value, dict)
    parsed._value = _settled(parsed._value, str if choice else kind_of(key))
    return parsed


@functools.cache
def parser() -> Any:
    """Return Hydra's parser, with a visitor that keeps the text of each word."""
    from hydra.core.override_parser.overrides_parser import KEY_RULES, OverridesParser
    from hydra.core.override_parser.overrides_visitor import HydraErrorListener, HydraOverrideVisitor
    from hydra.grammar.gen.OverrideLexer import (  # type: ignore[attr-defined]
        CommonTokenStream,
        InputStream,
        OverrideLexer,
    )
    from hydra.grammar.gen.OverrideParser import OverrideParser

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

    class Parser(OverridesParser):
        """Hydra's parser, whose `parse_rule` names its visitor."""

        def parse_rule(self, s: str, rule_name: str) -> Any:
            listener = HydraErrorListener()
            lexer = OverrideLexer(InputStream(s))
            lexer.removeErrorListeners()
            lexer.addErrorListener(listener)
            if rule_name not in KEY_RULES:
                lexer.mode(OverrideLexer.VALUE_MODE)
            parser = OverrideParser(CommonTokenStream(lexer))
            parser.removeErrorListeners()
            parser.addErrorListener(listener)
            found = Visitor(self.functions).visit(getattr(parser, rule_name)())
            found.input_line = s
            return found

    return Parser.create()


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
