"""render: the script of a job, to read, explained line by line, or written into a file; or the manifest of another engine."""

from __future__ import annotations

import argparse
import shutil
from itertools import groupby
from pathlib import Path

from slurmtrain.cli.columns import sentence_lines, terminal_width
from slurmtrain.cli.json_output import emit
from slurmtrain.cli.submit import compose_and_validate
from slurmtrain.control.checks import check
from slurmtrain.errors import UsageError
from slurmtrain.launch.script import dry_manifest, dry_run, explained
from slurmtrain.launch.submit import preparing
from slurmtrain.runs.events import Event
from slurmtrain.system.paths import current_folder


def main(arguments: argparse.Namespace) -> int:
    """Run the verb and return its exit code."""
    config, dims = compose_and_validate(arguments)
    check(config, dims, current_folder())
    target = arguments.output
    if arguments.target is not None:
        if arguments.explain or arguments.json:
            raise UsageError("--explain explains the lines of the sbatch script only", hint="leave out --target")
        print(dry_manifest(arguments.target, config, current_folder()), end="")
        return 0
    if arguments.explain:
        if target is not None:
            raise UsageError("--explain prints, but -o writes a script", hint="leave one of them out")
        lines = explained(config, current_folder())
        text: list[str] = []
        for why, group in groupby(lines, key=lambda line: line.why):
            text += [line.text for line in group]
            text += sentence_lines(f"    | {why}", len("    | "), terminal_width()) if why else []
        emit([{"line": line.text, "why": line.why} for line in lines], "\n".join(text), as_json=arguments.json)
        return 0
    if arguments.json:
        raise UsageError("--json needs --explain", hint="render --explain --json")
    if target is None:
        print(dry_run(config, current_folder()), end="")
        return 0
    output = Path(target)
    if output.is_dir() or not output.resolve().parent.is_dir():
        raise UsageError(f"cannot write {output}: it is a folder, or its folder does not exist", hint="-o job.sbatch")
    with preparing(config, arguments.overrides, current_folder()) as run_dir:
        shutil.copyfile(run_dir.script, output)
    run_dir.event(Event.RENDERED, file=str(output.resolve()))
    print(f"wrote {output} for run {run_dir.id} in {run_dir.path}\n  start it with: sbatch {output}")
    return 0
