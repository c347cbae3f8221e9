"""The verbs that stop a run: cancel, for good; preempt and requeue, to start it again."""

from __future__ import annotations

from collections.abc import Callable

from slurmtrain.cli.run_control import CHANGES_HELP, open_run, parser_of, say, split_overrides
from slurmtrain.control import stop
from slurmtrain.errors import UsageError
from slurmtrain.runs.run_dir import RunDir


def main(verb: str, words: list[str]) -> int:
    """Run the verb and return its exit code."""
    overrides: list[str] = []
    parser = parser_of(verb)
    if verb == "requeue":
        overrides, words = split_overrides(words)
        parser.add_argument("set", nargs="*", metavar="KEY=VALUE", help=CHANGES_HELP)
    options = parser.parse_args(words)
    if verb == "requeue" and options.set:
        raise UsageError(f"{options.set[0]!r} is not KEY=VALUE", hint="such as optim.lr=1e-4")
    run_dir = open_run(options.run)
    verbs: dict[str, Callable[[RunDir], str]] = {
        "cancel": stop.cancel,
        "preempt": stop.preempt,
        "requeue": lambda run: stop.requeue(run, overrides),
    }
    say(run_dir, verbs[verb](run_dir), as_json=options.json)
    return 0
