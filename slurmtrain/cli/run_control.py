"""What cancel, preempt, requeue and resume share: their arguments, their run, and what they say of it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from slurmtrain.cli.arguments import RUN_HELP, Parser
from slurmtrain.cli.json_output import print_json
from slurmtrain.errors import UsageError
from slurmtrain.runs import lookup, ownership
from slurmtrain.runs.run_dir import RunDir

CHANGES_HELP = "continue with this value of a config field; train.steps=+N means N more steps"
OVERRIDE = re.compile(r"[+~]{0,2}\w[\w.@-]*=")  # not a path with a = in it


def parser_of(verb: str) -> Parser:
    """Return the parser of a verb for one run, with RUN and --json."""
    parser = Parser.of(verb)
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    parser.add_argument("--json", action="store_true", help="print the answer as JSON, for a program")
    return parser


def split_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the KEY=VALUE among the words of a verb for one run, and the other words.

    A --set may stand before each KEY=VALUE, or before several.

    Raises:
        UsageError: there is a --set without KEY=VALUE.
    """
    overrides: list[str] = []
    others: list[str] = []
    for index, word in enumerate(words):
        if word == "--set":
            if index + 1 == len(words) or not OVERRIDE.match(words[index + 1]):
                raise UsageError("--set needs a KEY=VALUE", hint="or leave it out: optim.lr=1e-4")
        elif word.startswith("--set="):
            overrides.append(word.removeprefix("--set="))
        else:
            (overrides if OVERRIDE.match(word) else others).append(word)
    return overrides, others


def open_run(reference: str) -> RunDir:
    """Return the run that a person means by RUN, after a look that it is theirs and can be read whole."""
    run_dir = lookup.find(reference, lookup.runs_root())
    ownership.require_own(run_dir)
    run_dir.info(whole=True)
    return run_dir


def say(run_dir: RunDir, said: str, *, as_json: bool) -> None:
    """Print what was done to a run, for a person or for a program."""
    if as_json:
        print_json({"run": run_dir.id, "said": said, "job_ids": run_dir.info()["job_ids"]})
    else:
        print(said)
