"""render: the script of a job, to read, explained line by line, or written into a file; or the manifest of another engine."""

from __future__ import annotations

import argparse
import contextlib
import logging
import shutil
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from slurmtrain.choices import Backend, Target
from slurmtrain.cli.columns import sentence_lines, terminal_width
from slurmtrain.cli.json_output import emit
from slurmtrain.cli.submit import compose_and_validate
from slurmtrain.config.rules import validate
from slurmtrain.config.schema import Config
from slurmtrain.errors import UsageError
from slurmtrain.launch.checks import check
from slurmtrain.launch.script import dry_manifest, dry_run, explained
from slurmtrain.launch.submit import preparing
from slurmtrain.runs.reasons import Event
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system.paths import current_folder

log = logging.getLogger(__name__)

START_WITH = {**dict.fromkeys(Target, "kubectl create -f"), Target.SKYPILOT: "sky jobs launch"}


def main(arguments: argparse.Namespace) -> int:
    """Run the verb and return its exit code."""
    config, dims = compose_and_validate(arguments)
    check(config, dims, current_folder())
    target = arguments.output
    if arguments.target is not None or config.cluster.backend == Backend.KUBERNETES:
        return _manifest(arguments, config)
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
    with _prepared_for(target, config, arguments) as run_dir:
        shutil.copyfile(run_dir.script, target)
    print(f"wrote {target} for run {run_dir.id} in {run_dir.path}\n  start it with: sbatch {target}")
    return 0


def _manifest(arguments: argparse.Namespace, config: Config) -> int:
    """Print the manifest of another engine, or write it with a run directory for it."""
    from slurmtrain.launch.targets import on_engine

    if arguments.explain or arguments.json:
        raise UsageError("--explain explains the lines of an sbatch script only", hint="leave it out")
    pods, output = config.cluster.pods, arguments.output
    there = on_engine(config, Target(arguments.target or pods.target))
    validate(there)
    if output is not None:
        with _prepared_for(output, there, arguments) as run_dir:
            shutil.copyfile(run_dir.manifest, output)
        start = START_WITH[there.cluster.pods.target]
        print(f"wrote {output} for run {run_dir.id} in {run_dir.path}\n  start it with: {start} {output}")
        return 0
    shown = config.cluster.backend != Backend.KUBERNETES
    print(dry_manifest(there, current_folder(), placeholders=shown), end="")
    if shown and (pods.image is None or not pods.volumes):
        log.warning("cluster.pods.image and cluster.pods.volumes take the place of IMAGE and CLAIM")
    return 0


@contextlib.contextmanager
def _prepared_for(target: str, config: Config, arguments: argparse.Namespace) -> Iterator[RunDir]:
    """Make a run directory for a script or a manifest, which the block writes."""
    output = Path(target)
    if output.is_dir() or not output.resolve().parent.is_dir():
        raise UsageError(f"cannot write {output}: it is a folder, or its folder does not exist", hint="-o job.sbatch")
    with preparing(config, arguments.overrides, current_folder()) as run_dir:
        yield run_dir
    run_dir.event(Event.RENDERED, file=str(output.resolve()))
