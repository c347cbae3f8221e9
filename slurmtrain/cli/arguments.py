"""argv -> verb, Hydra's options, the verb's own options, overrides: a pure function that does not import Hydra.

The verb may stand anywhere among the overrides. Hydra's own parser wants options first, so they are moved there.
"""

from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from slurmtrain.cli.verbs import VERBS
from slurmtrain.config.field_types import shown
from slurmtrain.config.keys import all_keys, meant
from slurmtrain.config.overrides import normalise, program_override, shipped_groups
from slurmtrain.errors import UsageError, nearest

# hydra._internal.utils.get_args_parser(): option -> whether a value follows ("?": it may).
HYDRA_OPTIONS = {
    **dict.fromkeys(("--help", "-h", "--hydra-help", "--version", "--resolve", "--run", "-r", "--multirun", "-m"), ""),
    **dict.fromkeys(("--shell-completion", "-sc"), ""),
    **dict.fromkeys(("--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn"), "1"),
    **dict.fromkeys(("--config-dir", "-cd", "--experimental-rerun"), "1"),
    **dict.fromkeys(("--info", "-i"), "?"),
}
CFG_CHOICES = ("job", "hydra", "all")
INFO_CHOICES = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
PROGRAM = "python -m slurmtrain"
HELP_COLUMNS = 100  # longer lines are hard to read
RUNS_PROGRAMS = ("submit", "render", "train", "drill")  # verbs that take a program after --
SHORT = {
    "-h": "--help",
    "-m": "--multirun",
    "-c": "--cfg",
    "-cn": "--config-name",
    "-cd": "--config-dir",
    "-cp": "--config-path",
    "-o": "--output",
}


@dataclass(frozen=True)
class Arguments:
    """A parsed command line.

    Attributes:
        hydra: Hydra's own options with their values, as words.
        options: all options by long name; a flag's value is "".
        positionals: words that are neither verb, option nor override.
    """

    verb: str | None
    overrides: list[str] = field(default_factory=list)
    hydra: list[str] = field(default_factory=list)
    options: dict[str, str] = field(default_factory=dict)
    positionals: list[str] = field(default_factory=list)


class HelpFormatter(argparse.HelpFormatter):
    """Wraps sentences at HELP_COLUMNS at most, and keeps indented lines, such as examples, as they are."""

    def __init__(self, prog: str) -> None:
        columns = shutil.get_terminal_size((HELP_COLUMNS, 24)).columns
        super().__init__(prog, width=max(40, min(columns, HELP_COLUMNS)), max_help_position=26)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith("  ") or "\n" in text:
            return text
        return super()._fill_text(text, width, indent)


RUN_HELP = "a run ID, a unique prefix of one, a path, or last"


class Parser(argparse.ArgumentParser):
    """A parser for verbs that compose no config: it raises errors of argparse as one sentence with a hint."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": HelpFormatter, **options})

    @classmethod
    def of(cls, verb: str) -> Parser:
        """Return the parser of a verb, whose help begins with its sentences and ends with its examples."""
        return cls(prog=f"{PROGRAM} {verb}", description=VERBS[verb].help or VERBS[verb].summary, epilog=epilog(verb))

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (-\S*)", message)
        if unknown is None:
            raise UsageError(message, hint=" ".join(self.format_usage().split()))
        option = unknown.group(1).partition("=")[0]
        raise UsageError(f"there is no option {option!r}", hint=nearest(option, self._known_options() - {option}))

    def _known_options(self) -> set[str]:
        """Return the options of this parser and of its actions, since argparse has the topmost parser report errors."""
        known = set(self._option_string_actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                known.update(*(parser._option_string_actions for parser in action.choices.values()))
        return known


def epilog(verb: str) -> str:
    """Return the examples of a verb, and the page of the manual that explains it; for the end of its help."""
    lines = [example.partition("  # ") for example in VERBS[verb].examples]
    width = max((len(line) for line, _, what in lines if what), default=0)
    examples = "\n".join(
        f"  {PROGRAM} {line:<{width}}  # {what}" if what else f"  {PROGRAM} {line}" for line, _, what in lines
    )
    more = f"more: {PROGRAM} help {VERBS[verb].topic}" if VERBS[verb].topic else ""
    return "\n\n".join(part for part in (f"examples:\n{examples}" if examples else "", more) if part)


def parse(argv: Sequence[str]) -> Arguments:
    """Parse a command line of a verb that composes a config.

    Raises:
        UsageError: there is an unknown option or verb, or an option without its value.
    """
    argv, program = split_program(argv)
    verb = find_verb(argv)
    own = {flag.name: flag.metavar for flag in VERBS[verb].options} if verb else {}
    result = Arguments(verb)
    words = iter(argv)
    seen_verb = False
    for word in words:
        name, equals, value = word.partition("=")
        if word.startswith("-") and word != "-":
            takes = ("1" if own[name] else "") if name in own else HYDRA_OPTIONS.get(name)
            if takes is None:
                raise UsageError(
                    f"there is no option {name!r}", hint=_meant_option(word, next(words, ""), [*own, *HYDRA_OPTIONS])
                )
            if takes == "1" and not equals:
                following = next(words, None)
                if following is None:
                    raise UsageError(f"the option {name} needs a value")
                value = following
            elif takes == "?" and not equals:
                value = _optional_value(argv, word)
                if value:
                    next(words)
            if SHORT.get(name, name) == "--cfg" and value not in CFG_CHOICES:
                raise UsageError(f"--cfg {value}: there is no such config", hint=f"one of: {', '.join(CFG_CHOICES)}")
            result.options[SHORT.get(name, name)] = value
            if name not in own:
                result.hydra.extend([name, value] if value else [name])
        elif "=" in word or word.startswith("~"):
            result.overrides.append(normalise(word))
        elif word == verb and not seen_verb:
            seen_verb = True
        else:
            result.positionals.append(word)
    if program is not None:
        result.overrides.extend(_program_overrides(result, program))
    return result


def split_program(argv: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Split a command line at its first `--` into our words and the words of a program (None if there is no `--`)."""
    words = list(argv)
    if "--" not in words:
        return words, None
    return words[: words.index("--")], words[words.index("--") + 1 :]


def _program_overrides(ours: Arguments, program: Sequence[str]) -> list[str]:
    """Return the overrides that make every rank run this program, word for word.

    Raises:
        UsageError: there are no words, the verb runs no program, or another program is given, too.
    """
    if ours.verb not in RUNS_PROGRAMS:
        raise UsageError(
            f"a program after -- works with {' and '.join(RUNS_PROGRAMS)}, not with {ours.verb or 'no verb at all'}",
            hint="[+cluster=NAME] [key=value ...] submit -- python my_train.py --lr 1e-3",
        )
    if "--from" in ours.options:
        raise UsageError(
            "a bundle has its own program, so --from takes none after --",
            hint="leave out -- and what follows; job.command='python other.py' runs another program of the bundle",
        )
    if not program:
        raise UsageError("there is no program after --", hint="submit -- python my_train.py --lr 1e-3")
    for override in ours.overrides:
        key, _, value = override.lstrip("+").partition("=")
        if key in ("job.command", "job.kind") or (key == "job" and value != "command"):
            raise UsageError(f"{override} and a program after -- contradict each other", hint=f"leave {key} out")
    kind = [] if "job=command" in ours.overrides else ["job=command"]
    return [*kind, program_override(program)]


def find_verb(argv: Sequence[str]) -> str | None:
    """Return the first bare word that is a verb, skipping values of options and a program after `--`."""
    argv, _ = split_program(argv)
    own_with_value = {name for verb in VERBS.values() for name, metavar, _ in verb.options if metavar}
    skip = False
    for word in argv:
        if skip:
            skip = False
        elif word.startswith("-"):
            skip = HYDRA_OPTIONS.get(word) == "1" or word in own_with_value
        elif word in VERBS:
            return word
    return None


def no_override(word: str, verb: str) -> UsageError:
    """Return the error for a word beside a verb that is neither that verb, an option nor an override."""
    if word in VERBS and not VERBS[word].hidden:
        return UsageError(f"{verb} and {word} are both verbs, but a command accepts only one", hint="give two commands")
    if word in all_keys():
        return UsageError(f"{word!r} is a key without a value", hint=f"write {word}=VALUE")
    hint = meant(word) if word not in _verbs() else None
    return UsageError(
        f"cannot read {shown(word)!r}: neither a verb nor an override like key=value",
        hint=hint or nearest(word, _verbs()),
    )


def _meant_option(word: str, following: str, options: Sequence[str]) -> str:
    """Return a hint for an unknown option: many people write --train.steps 100 where Hydra wants train.steps=100."""
    name, _, value = word.lstrip("-").partition("=")
    key = name.replace("-", "_")
    if not value and following not in VERBS and "=" not in following:
        value = following
    if key in shipped_groups() or key in all_keys():
        return f"Hydra's overrides have no dashes: {key}={value or 'VALUE'}"
    return meant(name) or nearest(word.partition("=")[0], options)


def _verbs() -> list[str]:
    return [name for name, verb in VERBS.items() if not verb.hidden]


def unknown_verb(word: str) -> UsageError:
    """Return the error for a word that is no verb."""
    if word in all_keys():
        return UsageError(f"{word!r} is a key without a value", hint=f"write {word}=VALUE, and a verb")
    return UsageError(f"there is no verb {shown(word)!r}", hint=nearest(word, _verbs()))


def _optional_value(argv: Sequence[str], word: str) -> str:
    position = list(argv).index(word) + 1
    return argv[position] if position < len(argv) and argv[position] in INFO_CHOICES else ""
