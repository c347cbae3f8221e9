"""hook: for the batch script, and for what stands in its place: tells a person's command how an attempt has ended."""

from __future__ import annotations

from pathlib import Path

from slurmtrain.cli.arguments import Parser
from slurmtrain.launch.hooks import run_hook
from slurmtrain.runs.run_dir import RunDir


def main(verb: str, words: list[str]) -> int:
    """Run the verb and return its exit code."""
    parser = Parser(prog=f"python -m slurmtrain {verb}", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--attempt", type=int, required=True)
    options = parser.parse_args(words)
    run_hook(RunDir(options.run_dir), options.attempt)
    return 0
