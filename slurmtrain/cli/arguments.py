"""argv -> the namespace that a verb gets: its options and positional words, and the overrides of the config.

The verb, and its action, may stand anywhere among the overrides. They, the overrides and the program after `--` are taken out
of the command line; argparse reads what is left, with a parser that is made from the table in `verbs`.
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import textwrap
from collections.abc import Sequence
from itertools import takewhile
from typing import NoReturn

from slurmtrain.cli.verbs import HYDRA, NO_VERB, VERBS, WITH_VALUE, Verb, option
from slurmtrain.errors import UsageError, nearest, shown

PROGRAM = "python -m slurmtrain"
HELP_COLUMNS = 100  # longer lines are hard to read
EXAMPLES = 8  # that the help of a verb shows
BEFORE_PROGRAM = "--".__ne__  # what follows the first -- are the words of a program
_OVERRIDE = re.compile(r"(?!-)(~|.*=)", re.DOTALL)
_PROGRAM = re.compile(r"(.*/)?python[\d.]*|.*\.(py|sh)")  # a word with which a program begins
_CHANGE = re.compile(r"[+~]{0,2}\w[\w.@-]*=")  # not a path with a = in it


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return `verb`, `action`, `overrides` and a value for each argument of the verb.

    Raises:
        UsageError: there is an unknown option or word, or a value that an option cannot have.
    """
    words = [*takewhile(BEFORE_PROGRAM, argv)]
    program = list(argv[len(words) + 1 :]) if len(words) < len(argv) else None
    name = find_verb(words)
    verb = VERBS[name] if name is not None else NO_VERB
    action: str | None = None
    taken = {name}
    for word in words:
        if word in verb.actions:
            action, verb = word, verb.with_action(word)
            taken.add(word)
    override = _OVERRIDE if verb.composes else _CHANGE if verb.changes else None
    options, before = verb.options, ""
    overrides: list[str] = []
    rest: list[str] = []
    for word in words:
        if before in options and before in WITH_VALUE:
            rest.append(word)
        elif word in taken:
            taken.remove(word)
        elif override is not None and override.match(word):
            overrides.append(word)
        else:
            rest.append(word)
        before = word
    found, unknown = parser_of(name, action).parse_known_intermixed_args(rest)
    found.verb, found.action, found.overrides = name, action or verb.default_action, overrides
    if unknown:
        raise _unknown(unknown[0], words, name, verb)
    if verb.actions and found.action is None:
        raise UsageError(f"{name} needs one of {'|'.join(verb.actions)}", hint=f"{PROGRAM} {name} --help")
    if getattr(found, "words", ()) and (name is not None or program is not None):
        raise not_understood(found.words[0], name)
    if overrides and verb.composes:
        from slurmtrain.config.overrides import normalise

        found.overrides = [normalise(word) for word in overrides]
    if program is not None:
        from slurmtrain.config.launched_program import with_program

        _check_program(found, program)
        found.overrides = with_program(found.overrides, program)
    return found


def find_verb(argv: Sequence[str]) -> str | None:
    """Return the first word that is a verb, skipping values of options and a program after `--`."""
    before = ""
    for word in takewhile(BEFORE_PROGRAM, argv):
        if word in VERBS and before not in WITH_VALUE:
            return word
        before = word
    return None


def visible_verbs() -> list[str]:
    """Return the names of the verbs that a person types."""
    return [name for name, verb in VERBS.items() if not verb.hidden]


class Parser(argparse.ArgumentParser):
    """A parser that raises its errors, each as one sentence with a hint.

    Attributes:
        words: the verb, and its action, which the examples in the help have.
        verb: what is parsed.
    """

    words: Sequence[str] = ()
    verb: Verb = NO_VERB

    def format_help(self) -> str:
        """Return the help; its examples are read from the manual only now."""
        self.epilog = _epilog(self.words, self.verb)
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        choice = re.fullmatch(r"argument (.+?): invalid choice: '?(.*?)'? \(choose from (.*)\)", message, re.DOTALL)
        if choice is not None:
            where, value, choices = choice.groups()
            hint = nearest(value, re.findall(r"[\w-]+", choices))
            raise UsageError(f"{value!r} is not a value of {where.split('/')[0]}", hint=hint)
        if "required" in message:
            raise UsageError(message, hint=" ".join(self.format_usage().split()))
        missing = re.fullmatch(r"argument (\S+?): expected .*argument.*", message)
        if missing is not None:
            message = f"the option {missing[1].split('/')[0]} needs a value"
        raise UsageError(message.removeprefix("argument "), hint=f"{self.prog} --help shows what it takes")


CONFIG_WORDS = (
    "GROUP=NAME chooses from a config group, such as cluster=local; KEY=VALUE sets a field, such as cluster.nodes=4; "
    "+KEY=VALUE adds one, ~KEY removes one"
)


def parser_of(name: str | None, action: str | None = None) -> Parser:
    """Return the parser of a verb, of one of its actions, or of a command line without a verb."""
    verb = VERBS[name] if name is not None else NO_VERB
    if action:
        verb = verb.with_action(action)
    width = max(40, min(shutil.get_terminal_size((HELP_COLUMNS, 24)).columns, HELP_COLUMNS))
    actions = "|".join(verb.actions)
    if actions and verb.default_action is not None:
        actions = f"[{actions}]"
    parser = Parser(
        prog=" ".join(filter(None, [PROGRAM, name, action, actions])),
        description=textwrap.fill(verb.help, width),
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, width=width, max_help_position=26),
        add_help=name is not None,
        allow_abbrev=False,
    )
    parser.words, parser.verb = [each for each in (name, action) if each], verb
    arguments = list(verb.arguments)
    if verb.changes or verb.composes:
        arguments.append(option("KEY=VALUE", verb.changes or CONFIG_WORDS, dest="words", nargs="*"))
    if verb.runs_program:
        arguments.append(option("PROGRAM", "your own program and its words", nargs="*", metavar="-- PROGRAM"))
    for each in arguments:
        parser.add_argument(*each.names, **each.settings)
    if verb.composes:
        config = parser.add_argument_group("config")
        for each in HYDRA:
            config.add_argument(*each.names, **each.settings)
    return parser


def _epilog(words: Sequence[str], verb: Verb) -> str:
    """Return the actions of a verb, the page of the manual that explains it, and the command lines there with these words."""
    if not verb.topic:
        return ""
    from slurmtrain.config.folders import PACKAGE

    page = (PACKAGE / "docs" / f"{verb.topic}.md").read_text(encoding="utf-8")
    shown: dict[tuple[str, ...], str] = {}
    for line in re.findall(r"^    ((?:python -m )?slurmtrain (?:.*\\\n)*.*)$", page, re.MULTILINE):
        own = tuple(takewhile(BEFORE_PROGRAM, line.partition("#")[0].split()))
        if {*words} <= {*own}:
            shown.setdefault(own, f"  {line.rstrip()}")
    actions = [f"  {name:<10}{each.summary}" for name, each in verb.actions.items()]
    examples = [*shown.values()][:EXAMPLES]
    parts = ["\n".join([title, *each]) for title, each in (("actions:", actions), ("examples:", examples)) if each]
    return "\n\n".join([*parts, f"more: {PROGRAM} help {verb.topic}"])


# Words that cannot be understood.


def _unknown(word: str, words: Sequence[str], name: str | None, verb: Verb) -> UsageError:
    """Return the error for a word that argparse has left over.

    Args:
        words: the whole command line.
    """
    if not word.startswith("-"):
        if name is not None and VERBS[name].actions:
            actions = VERBS[name].actions
            return UsageError(f"{word!r} is not one of {'|'.join(actions)}", hint=nearest(word, actions))
        hint = f"{PROGRAM} {name} --help shows what it takes"
        if name == "requeue" and _CHANGE.match(word):
            hint = f"a run that is alive keeps its config: cancel RUN, then resume RUN {shlex.quote(word)}"
        return UsageError(f"one word too many: {word!r}", hint=hint)
    option, _, value = word.partition("=")
    hint = nearest(option, verb.options) if verb.options else f"{PROGRAM} {name} --help shows what it takes"
    if verb.runs_program and (program := [each for each in words if _PROGRAM.fullmatch(each)]):
        hint = f"a program comes after --: {name} -- {shlex.join(words[words.index(program[0]) :])}"
    elif verb.composes:  # many people write --train.steps 100 where Hydra wants train.steps=100
        from slurmtrain.config.overrides import all_keys, meant, shipped_groups

        key = option.lstrip("-").replace("-", "_")
        following = next(iter(words[words.index(word) + 1 :]), "")
        value = value or ("" if following in VERBS or "=" in following else following) or "VALUE"
        is_key = key in shipped_groups() or key in all_keys()
        hint = f"Hydra's overrides have no dashes: {key}={value}" if is_key else meant(option.lstrip("-")) or hint
    return UsageError(f"there is no option {option!r}", hint=hint)


def not_understood(word: str, name: str | None) -> UsageError:
    """Return the error for a word that is neither a verb, the second one, an option nor an override."""
    from slurmtrain.config.overrides import all_keys, meant

    if name is not None and not VERBS[name].composes:
        return UsageError(f"{word!r} is not KEY=VALUE", hint="such as optim.lr=1e-4")
    if word in all_keys():
        return UsageError(f"{word!r} is a key without a value", hint=f"write {word}=VALUE")
    if word in visible_verbs():
        return UsageError(f"{name} and {word} are both verbs, but a command accepts only one", hint="give two commands")
    if name is None:
        return UsageError(f"there is no verb {shown(word)!r}", hint=nearest(word, visible_verbs()))
    hint = meant(word) or nearest(word, visible_verbs())
    if VERBS[name].runs_program and _PROGRAM.fullmatch(word):
        hint = f"a program stands after --: {name} -- {word} ..."
    return UsageError(f"cannot read {shown(word)!r}: neither a verb nor an override like key=value", hint=hint)


def _check_program(found: argparse.Namespace, program: Sequence[str]) -> None:
    """Check that a verb takes the words of a program.

    Raises:
        UsageError: there are no words, the verb runs no program, or another program is given, too.
    """
    verb = VERBS[found.verb] if found.verb is not None else NO_VERB
    if not verb.runs_program:
        able = " and ".join(name for name, each in VERBS.items() if each.runs_program)
        hint = f"[+cluster=NAME] [key=value ...] submit -- {shlex.join(program) or 'python my_train.py --lr 1e-3'}"
        if verb.changes:
            from slurmtrain.config.overrides import literal_override

            hint = f"{found.verb} RUN {shlex.quote(literal_override('job.command', shlex.join(program)))}"
        raise UsageError(f"a program after -- works with {able}, not with {found.verb or 'no verb at all'}", hint=hint)
    if getattr(found, "origin", None) is not None:
        raise UsageError(
            "--from takes the program of the run, so there can be none after --",
            hint="leave out -- and what follows; job.command='python other.py' runs another program of its code",
        )
    if not program:
        raise UsageError("there is no program after --", hint="submit -- python my_train.py --lr 1e-3")
    for override in found.overrides:
        key, _, value = override.lstrip("+").partition("=")
        if key in ("job.command", "job.kind") or (key == "job" and value != "command"):
            raise UsageError(f"{override} and a program after -- contradict each other", hint=f"leave {key} out")
