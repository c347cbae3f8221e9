"""The parser of overrides: Hydra's grammar, where text stays as it is typed in every field of the schema that takes text.

Hydra reads a value by its look, without the type of the field: `cluster.account=1e5` would be the account 100000.0, and
`job.command=true` no program. Hydra is imported here, so this module is imported only where something is composed.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hydra._internal.grammar.functions import Functions
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import KEY_RULES, OverridesParser, create_functions
from hydra.core.override_parser.overrides_visitor import HydraErrorListener, HydraOverrideVisitor
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException
from hydra.grammar.gen.OverrideLexer import (  # type: ignore[attr-defined]
    CommonTokenStream,
    InputStream,
    OverrideLexer,
)
from hydra.grammar.gen.OverrideParser import OverrideParser

from slurmtrain.config.field_types import hints
from slurmtrain.config.schema import Config
from slurmtrain.config.typed import structured

TEXT = (str, str | None, list[str])  # the last of one word, which is a list of one
CHANGES = ("eval.cluster", "eval.parallel")  # open mappings with fields of `cluster` and `parallel`
OF_CHOICES = ("choice", "shuffle", "tag")  # functions whose arguments are values of the field


class TypedOverridesParser(OverridesParser):
    """Hydra's parser, which keeps text as it is typed, and takes one word for a list of one where the field is a list of text.

    Of a sweep's choices for such a list each stays a word, since each point's overrides are parsed again.

    Args:
        quoted: put text that looks like a number or a boolean in quotes, with which Hydra's own parser keeps it, too.
    """

    def __init__(self, functions: Functions, config_loader: ConfigLoader | None = None, *, quoted: bool = False):
        super().__init__(functions, config_loader)
        self._quoted = quoted

    def parse_rule(self, s: str, rule_name: str) -> Any:
        """Return what Hydra's own parser does, except for the values described above.

        Raises:
            HydraException: it cannot be parsed.
        """
        listener = HydraErrorListener()
        lexer = OverrideLexer(InputStream(s))
        lexer.removeErrorListeners()
        lexer.addErrorListener(listener)
        if rule_name not in KEY_RULES:
            lexer.mode(OverrideLexer.VALUE_MODE)
        parser = OverrideParser(CommonTokenStream(lexer))
        parser.removeErrorListeners()
        parser.addErrorListener(listener)
        found = _Visitor(self.functions, quoted=self._quoted).visit(getattr(parser, rule_name)())
        if isinstance(found, Override):
            found.input_line = s
            found.validate()
            if kind_of(found.key_or_group) == list[str] and not found.is_sweep_override():
                found._value = _as_list(found._value)
        return found


class _Visitor(HydraOverrideVisitor):
    """Makes the value of an override out of what the grammar has found in it, with an eye on the type of its field."""

    def __init__(self, functions: Functions, *, quoted: bool):
        super().__init__(functions)
        self._quoted = quoted
        self._kind: Any = Any  # of the field that is being read, or of an item of it

    def visitKey(self, ctx: Any) -> Any:
        key = super().visitKey(ctx)
        self._kind = kind_of(key.key_or_group)
        return key

    def visitPrimitive(self, ctx: Any) -> Any:
        value = super().visitPrimitive(ctx)
        if not isinstance(value, bool | int | float) or self._kind not in TEXT:
            return value
        text = ctx.getText().strip()
        return QuotedString(text, Quote.single) if self._quoted else text

    def visitListContainer(self, ctx: Any) -> Any:
        items = typing.get_args(self._kind) if typing.get_origin(self._kind) is list else (Any,)
        with self._reading(items[0]):
            return super().visitListContainer(ctx)

    def visitDictKeyValuePair(self, ctx: Any) -> Any:
        with self._reading(_inside(self._kind, ctx.getChild(0).getText().strip())):
            return super().visitDictKeyValuePair(ctx)

    def visitFunction(self, ctx: Any) -> Any:
        with self._reading(self._kind if ctx.getChild(0).getText() in OF_CHOICES else Any):
            return super().visitFunction(ctx)

    @contextmanager
    def _reading(self, kind: Any) -> Iterator[None]:
        outer, self._kind = self._kind, kind
        try:
            yield
        finally:
            self._kind = outer


def for_hydra(override: str) -> str:
    """Return an override of one point in a form of which Hydra's own parser makes what `TypedOverridesParser` does."""
    try:
        parsed = TypedOverridesParser(create_functions(), quoted=True).parse_override(override)
        if parsed.is_sweep_override() or parsed._value == OverridesParser.create().parse_override(override)._value:
            return override
        return f"{parsed.get_key_element()}={parsed.get_value_element_as_str()}"
    except HydraException:  # Hydra's own error says it better
        return override


@functools.cache
def kind_of(key: str) -> Any:
    """Return the type of the field with this dotted key, with text for words of a Choice; Any: the schema does not say."""
    if f"{key}.".startswith(tuple(f"{each}." for each in CHANGES)):
        key = key.removeprefix("eval.")
    return functools.reduce(_inside, key.split("."), structured(Config))


def _inside(kind: Any, name: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return hints(typing.cast("type", kind)).get(name, Any)
    return typing.get_args(kind)[1] if typing.get_origin(kind) is dict else Any


def _as_list(value: Any) -> Any:
    """Return one word as a list of one. Null, a list, and an interpolation, which may give a list, stay as they are."""
    text = value.text if isinstance(value, QuotedString) else value
    whole = text is None or isinstance(text, list | dict) or str(text).startswith("${")
    return value if whole else [value]
