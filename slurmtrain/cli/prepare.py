"""prepare: make tokenised shards from raw text, in this process; `prepare verify` checks the result."""

from __future__ import annotations

import argparse
from pathlib import Path

from slurmtrain.errors import EXIT_REQUEUE, UsageError
from slurmtrain.system import signals
from slurmtrain.system.paths import current_folder


def main(arguments: argparse.Namespace) -> int:
    """Run the verb and return its exit code."""
    if arguments.action == "verify":
        return _verify(arguments)
    stop = signals.install_signal_handlers()
    from slurmtrain.cli.submit import compose_and_validate
    from slurmtrain.data.prepare.finish import finish
    from slurmtrain.data.prepare.unit_plan import agree_on, make_plan
    from slurmtrain.data.prepare.worker_pool import work
    from slurmtrain.launch.named_paths import with_absolute_paths
    from slurmtrain.observe.prepare_progress import Preparing
    from slurmtrain.runtime.jobs.prepare import share_of, summary, workers_of
    from slurmtrain.slurm.environment import Environment

    arguments.overrides.insert(0, "job=prepare")
    config = with_absolute_paths(compose_and_validate(arguments)[0], current_folder())
    environment, plan, most_bad = Environment.detect(), make_plan(config.prepare), config.prepare.max_bad_share
    agree_on(plan)
    share, workers, progress = share_of(plan, config, environment), workers_of(config, environment), Preparing()
    try:
        finished = work(plan, share, workers, stop, progress.show, max_bad_share=most_bad)
        manifest = finish(plan, most_bad) if finished else None
    finally:
        progress.close()
    if not finished:
        print("slurmtrain: stopped; finished units are kept, and the same command continues from there", flush=True)
        return EXIT_REQUEUE
    print(f"slurmtrain: {summary(plan, manifest)}", flush=True)
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from slurmtrain.data.format.manifest import read_manifest
    from slurmtrain.data.prepare.verify import verify

    if arguments.folder is None or arguments.overrides:
        raise UsageError(
            "prepare verify takes the folder of a data set, and nothing else",
            hint="prepare verify DATA_SET, or: prepare prepare.inputs=... prepare.output=...",
        )
    folder, problems = Path(arguments.folder), 0
    manifest = read_manifest(folder)
    for problem in verify(folder, manifest):
        print(problem, flush=True)
        problems += 1
    if problems:
        print(
            f"{problems} damaged or missing: remove the damaged files and repeat the prepare command to recreate them"
        )
        return 1
    counts = ", ".join(f"{name}: {split.tokens} tokens" for name, split in manifest.splits.items())
    print(f"{folder} is unchanged ({counts}); fingerprint {manifest.fingerprint}")
    return 0
