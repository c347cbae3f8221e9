"""runs: list runs, compare two of them, pack one, and remove those that have ended. Imports no torch."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from slurmtrain.cli.arguments import RUN_HELP, Parser
from slurmtrain.cli.runs.bundle import bundle_run
from slurmtrain.cli.runs.compare import compare_runs
from slurmtrain.cli.runs.listing import list_runs
from slurmtrain.cli.runs.prune import prune_runs
from slurmtrain.report import prune


def main(verb: str, words: list[str]) -> int:
    """Run the verb and return its exit code."""
    options = _parser(verb).parse_args(words)
    actions: dict[str, Callable[[argparse.Namespace], int]] = {
        "list": list_runs,
        "compare": compare_runs,
        "bundle": bundle_run,
        "prune": prune_runs,
    }
    return actions[options.action](options)


def _parser(verb: str) -> Parser:
    parser = Parser.of(verb)
    actions = parser.add_subparsers(dest="action", metavar="list|compare|bundle|prune", title="actions", required=True)

    listing = actions.add_parser("list", help="list all runs", description="List all runs, oldest first.")
    listing.add_argument("--size", action="store_true", help="also show the size on disk, which takes a while")
    listing.add_argument("--json", action="store_true", help="print a list of objects with the keys of `status --json`")

    comparing = actions.add_parser(
        "compare",
        help="show what differs between two runs",
        description="Show what differs between two runs: config, code, what they ran with (packages, driver, CUDA, NCCL, "
        "image, variables), the first step where the samples that they have seen, their metrics or their weights part, and "
        "the last values. Metrics of the machine, such as speed and memory, always differ; they do not count.",
    )
    for name in ("a", "b"):
        comparing.add_argument(name, metavar=name.upper(), help=RUN_HELP)
    comparing.add_argument(
        "--tolerance",
        type=float,
        default=0.0,
        metavar="R",
        help="relative difference up to which values count as equal (default: 0)",
    )
    comparing.add_argument(
        "--weights", action="store_true", help="also read the checkpoints of large models (over 2 GB)"
    )
    comparing.add_argument("--json", action="store_true", help="the same for a program")

    bundling = actions.add_parser(
        "bundle",
        help="pack a run into one file to run it elsewhere",
        description="Pack config, code, revision and list of packages into one tar file, for `submit --from FILE`. "
        "Checkpoints, logs and data are not in it. It holds the code as the run's snapshot has it: read it before you "
        "publish it. The same run gives the same bytes.",
    )
    bundling.add_argument("run", metavar="RUN", help=RUN_HELP)
    bundling.add_argument(
        "file", nargs="?", metavar="FILE", help="default: NAME-RUN.tar.gz here; one with .tar is plain"
    )
    bundling.add_argument("--exclude", action="append", metavar="PATTERN", help="omit these files of the code")
    bundling.add_argument("--json", action="store_true", help="print run, file, sha256 and size as an object")

    pruning = actions.add_parser(
        "prune",
        help="remove runs that have ended",
        description="Removes directories of runs that have ended, checkpoints and all. What is alive, waits, cannot be "
        "asked about, is being read, or is what another run begins from, always stays.",
    )
    pruning.add_argument(
        "--older-than", type=float, metavar="DAYS", help="only runs that have not changed for this long"
    )
    pruning.add_argument(
        "--state", nargs="+", choices=prune.ENDED, metavar="STATE", help=f"only these: {', '.join(prune.ENDED)}"
    )
    pruning.add_argument(
        "--keep-checkpoints", action="store_true", help="remove everything except checkpoints and config.yaml"
    )
    pruning.add_argument("--dry-run", action="store_true", help="only show what would be removed")
    return parser
