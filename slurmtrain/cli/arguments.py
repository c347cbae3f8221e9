"""argv -> the namespace that a verb gets: its options and positional words, and the overrides of the config.

The verb may stand anywhere among the overrides. `split` takes it, the overrides and the program after `--` out of the
command line; what is left goes to the parser of the verb, which is made from the table in `verbs`.
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import textwrap
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

from slurmtrain.cli.verbs import HYDRA, ROOT, VERBS, Argument, Verb, option
from slurmtrain.errors import UsageError, nearest, shown

PROGRAM = "python -m slurmtrain"
HELP_COLUMNS = 100  # longer lines are hard to read
_OVERRIDE = re.compile(r"~|.*=", re.DOTALL)
_PROGRAM = re.compile(r"(.*/)?python[\d.]*|.*\.(py|sh)")  # a word with which a program begins
_CHANGE = re.compile(r"[+~]{0,2}\w[\w.@-]*=")  # not a path with a = in it


class CommandLine(NamedTuple):
    """The parts of a command line.

    Attributes:
        rest: the options with their values, and the words that are no overrides.
        program: the words after `--`; None without it.
    """

    verb: str | None
    overrides: list[str]
    rest: list[str]
    program: list[str] | None


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return `verb`, `overrides` and a value for each argument of the verb.

    Raises:
        UsageError: there is an unknown option or word, or a value that an option cannot have.
    """
    line = split(argv)
    verb, parser = VERBS.get(line.verb or ""), parser_of(line.verb)
    found = (parser.parse_args if verb is not None and verb.actions else parser.parse_intermixed_args)(line.rest)
    found.verb, found.overrides = line.verb, line.overrides
    if line.overrides and (verb is None or verb.composes):
        from slurmtrain.config.overrides import normalise

        found.overrides = [normalise(word) for word in line.overrides]
    words: list[str] = getattr(found, "words", [])
    if words and line.verb is not None:
        raise not_understood(words[0], line.verb)
    if line.program is not None:
        from slurmtrain.config.launched_program import with_program

        _check_program(found, line.program)
        found.overrides = with_program(found.overrides, line.program)
    return found


def split(argv: Sequence[str]) -> CommandLine:
    """Split a command line.

    Raises:
        UsageError: there is an option that the verb does not have.
    """
    words, program = split_program(argv)
    name = find_verb(words)
    verb = VERBS.get(name or "")
    arguments = ROOT if verb is None else verb.arguments_of(verb.action_in(words))
    options = {name: each for each in arguments for name in each.names if name.startswith("-")}
    overrides = _CHANGE if verb is not None and not verb.composes else _OVERRIDE
    line = CommandLine(name, [], [], program)
    remaining, seen_verb = deque(words), False
    while remaining:
        word = remaining.popleft()
        if word.startswith("-") and word != "-":
            option, equals, _ = word.partition("=")
            known = options.get(option)
            if known is None and option not in ("-h", "--help"):
                hint = _meant_option(word, next(iter(remaining), ""), verb, options)
                if verb is not None and verb.runs_program and any(map(_PROGRAM.fullmatch, line.rest)):
                    hint = f"a program comes after --: {name} -- {shlex.join([*line.rest, word, *remaining])}"
                raise UsageError(f"there is no option {option!r}", hint=hint)
            line.rest.append(word)
            if remaining and known is not None and known.takes_value and not equals:
                may_be_absent = known.settings.get("nargs") == "?"
                if not may_be_absent or remaining[0] in known.settings["choices"]:
                    line.rest.append(remaining.popleft())
        elif word == name and not seen_verb:
            seen_verb = True
        elif overrides.match(word) and (verb is None or verb.composes or verb.changes):
            line.overrides.append(word)
        else:
            line.rest.append(word)
    return line


def split_program(argv: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Split a command line at its first `--` into our words and the words of a program (None if there is no `--`)."""
    words = list(argv)
    if "--" not in words:
        return words, None
    return words[: words.index("--")], words[words.index("--") + 1 :]


def find_verb(argv: Sequence[str]) -> str | None:
    """Return the first bare word that is a verb, skipping values of options and a program after `--`."""
    words, _ = split_program(argv)
    known = list(ROOT)
    for verb in VERBS.values():
        for action in () if verb.hidden else (None, *verb.actions):
            known += verb.arguments_of(action)
    with_value = {name for each in known if each.takes_value and "nargs" not in each.settings for name in each.names}
    skip = False
    for word in words:
        if skip:
            skip = False
        elif word.startswith("-"):
            skip = word in with_value
        elif word in VERBS:
            return word
    return None


# The parsers.


class Parser(argparse.ArgumentParser):
    """A parser that raises its errors, each as one sentence with a hint."""

    def error(self, message: str) -> NoReturn:
        raise _explained(message, self)


def parser_of(name: str | None) -> Parser:
    """Return the parser of a verb with its actions, or that of a command line without a verb."""
    if name is None:
        parser = Parser(prog=PROGRAM, add_help=False, allow_abbrev=False)
        _add(parser, [*ROOT, _overrides(CONFIG_WORDS)])
        return parser
    verb = VERBS[name]
    parser = _parser(Parser, f"{PROGRAM} {name}", verb.help or verb.summary, _epilog(verb))
    _add(parser, verb.arguments)
    if verb.composes:
        _add(parser.add_argument_group("config"), [*HYDRA, _overrides(CONFIG_WORDS)])
    elif verb.changes:
        _add(parser, [_overrides(verb.changes)])
    if verb.runs_program:
        _add(parser, [option("PROGRAM", "your own program and its words", nargs="*", metavar="-- PROGRAM")])
    if verb.actions:
        actions = parser.add_subparsers(
            dest="action", title="actions", metavar="|".join(verb.actions), required=verb.default_action is None
        )
        for action_name, action in verb.actions.items():
            text = action.help or f"{action.summary[0].upper()}{action.summary[1:]}."
            _add(_parser(actions.add_parser, action_name, text, help=action.summary), action.arguments)
        parser.set_defaults(action=verb.default_action)
    return parser


CONFIG_WORDS = (
    "GROUP=NAME chooses from a config group, such as cluster=local; KEY=VALUE sets a field, such as cluster.nodes=4; "
    "+KEY=VALUE adds one, ~KEY removes one"
)


def _overrides(what: str) -> Argument:
    return option("KEY=VALUE", what, dest="words", nargs="*")


def _parser(make: Any, name: str, text: str, epilog: str = "", **settings: Any) -> Parser:
    width = max(40, min(shutil.get_terminal_size((HELP_COLUMNS, 24)).columns, HELP_COLUMNS))
    parser: Parser = make(
        **{"prog" if make is Parser else "name": name},
        description=textwrap.fill(text, width),
        epilog=epilog,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, width=width, max_help_position=26),
        allow_abbrev=False,
        **settings,
    )
    return parser


def _add(parser: Any, arguments: Iterable[Argument]) -> None:
    for each in arguments:
        parser.add_argument(*each.names, **each.settings)


def _epilog(verb: Verb) -> str:
    """Return the examples of a verb, and the page of the manual that explains it."""
    lines = [example.partition("  # ") for example in verb.examples]
    width = max((len(line) for line, _, what in lines if what), default=0)
    examples = [f"  {PROGRAM} {line:<{width}}  # {what}" if what else f"  {PROGRAM} {line}" for line, _, what in lines]
    more = [f"more: {PROGRAM} help {verb.topic}"] if verb.topic else []
    return "\n\n".join(["\n".join(["examples:", *examples]), *more]) if examples else ""


# Words that cannot be understood.


def _explained(message: str, parser: Parser) -> UsageError:
    """Return the error for a message of argparse."""
    choice = re.fullmatch(r"argument (.+?): invalid choice: '?(.*?)'? \(choose from (.*)\)", message, re.DOTALL)
    if choice is not None:
        where, value, choices = choice.groups()
        what = f"a value of {where.split('/')[0]}" if where.startswith("-") else f"one of {where}"
        return UsageError(f"{value!r} is not {what}", hint=nearest(value, re.findall(r"[\w-]+", choices)))
    if "required" in message:
        return UsageError(message, hint=" ".join(parser.format_usage().split()))
    missing = re.fullmatch(r"argument (\S+?): expected .*argument.*", message)
    unknown = re.match(r"unrecognized arguments: (\S*)", message)
    if missing is not None:
        message = f"the option {missing[1].split('/')[0]} needs a value"
    elif unknown is not None:
        what = "there is no option" if unknown[1].startswith("-") else "one word too many:"
        message = f"{what} {unknown[1].partition('=')[0]!r}"
    return UsageError(message.removeprefix("argument "), hint=f"{parser.prog} --help shows what it takes")


def _check_program(found: argparse.Namespace, program: Sequence[str]) -> None:
    """Check that a verb takes the words of a program.

    Raises:
        UsageError: there are no words, the verb runs no program, or another program is given, too.
    """
    if found.verb is None or not VERBS[found.verb].runs_program:
        able = [name for name, verb in VERBS.items() if verb.runs_program]
        hint = f"[+cluster=NAME] [key=value ...] submit -- {shlex.join(program) or 'python my_train.py --lr 1e-3'}"
        if found.verb is not None and VERBS[found.verb].changes:
            from slurmtrain.config.overrides import literal_override

            hint = f"{found.verb} RUN {shlex.quote(literal_override('job.command', shlex.join(program)))}"
        raise UsageError(
            f"a program after -- works with {' and '.join(able)}, not with {found.verb or 'no verb at all'}", hint=hint
        )
    if getattr(found, "bundle", None) is not None:
        raise UsageError(
            "a bundle has its own program, so --from takes none after --",
            hint="leave out -- and what follows; job.command='python other.py' runs another program of the bundle",
        )
    if not program:
        raise UsageError("there is no program after --", hint="submit -- python my_train.py --lr 1e-3")
    for override in found.overrides:
        key, _, value = override.lstrip("+").partition("=")
        if key in ("job.command", "job.kind") or (key == "job" and value != "command"):
            raise UsageError(f"{override} and a program after -- contradict each other", hint=f"leave {key} out")


def not_understood(word: str, verb: str | None) -> UsageError:
    """Return the error for a word that is neither a verb, the second one, an option nor an override."""
    from slurmtrain.config.overrides import all_keys, meant

    if verb is not None and not VERBS[verb].composes:
        return UsageError(f"{word!r} is not KEY=VALUE", hint="such as optim.lr=1e-4")
    if word in all_keys():
        return UsageError(f"{word!r} is a key without a value", hint=f"write {word}=VALUE")
    if word in visible_verbs():
        return UsageError(f"{verb} and {word} are both verbs, but a command accepts only one", hint="give two commands")
    if verb is None:
        return UsageError(f"there is no verb {shown(word)!r}", hint=nearest(word, visible_verbs()))
    return UsageError(
        f"cannot read {shown(word)!r}: neither a verb nor an override like key=value",
        hint=meant(word) or nearest(word, visible_verbs()),
    )


def visible_verbs() -> list[str]:
    """Return the names of the verbs that a person types."""
    return [name for name, verb in VERBS.items() if not verb.hidden]


def _meant_option(word: str, following: str, verb: Verb | None, options: Iterable[str]) -> str:
    """Return a hint for an unknown option: many people write --train.steps 100 where Hydra wants train.steps=100."""
    known = nearest(word.partition("=")[0], options)
    if verb is not None and not verb.composes:
        return known
    from slurmtrain.config.overrides import all_keys, meant, shipped_groups

    name, _, value = word.lstrip("-").partition("=")
    key = name.replace("-", "_")
    if not value and following not in VERBS and "=" not in following:
        value = following
    if key in shipped_groups() or key in all_keys():
        return f"Hydra's overrides have no dashes: {key}={value or 'VALUE'}"
    return meant(name) or known
