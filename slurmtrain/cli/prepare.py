"""prepare: make tokenised shards from raw text, in this process; `prepare verify` checks the result."""

from __future__ import annotations

from pathlib import Path

from slurmtrain.cli.arguments import Arguments
from slurmtrain.config.schema import Config
from slurmtrain.errors import EXIT_REQUEUE, UsageError
from slurmtrain.system import signals
from slurmtrain.system.paths import current_folder


def main(arguments: Arguments) -> int:
    """Run the verb and return its exit code."""
    if arguments.positionals:
        return _verify(arguments)
    stop = signals.install_signal_handlers()
    from slurmtrain.cli.submit import compose_and_validate
    from slurmtrain.launch.named_paths import with_absolute_paths

    arguments.overrides.insert(0, "job=prepare")
    config, _ = compose_and_validate(arguments)
    return _prepare(with_absolute_paths(config, current_folder()), stop)


def _prepare(config: Config, stop: signals.StopFlag) -> int:
    from slurmtrain.data.prepare.finish import finish
    from slurmtrain.data.prepare.unit_plan import agree_on, make_plan
    from slurmtrain.data.prepare.worker_pool import work
    from slurmtrain.observe.prepare_progress import Preparing
    from slurmtrain.runtime.jobs.prepare import share_of, summary, workers_of
    from slurmtrain.slurm.environment import Environment

    environment = Environment.detect()
    plan = make_plan(config.prepare)
    agree_on(plan)
    progress = Preparing()
    try:
        finished = work(
            plan,
            share_of(plan, config, environment),
            workers_of(config, environment),
            stop,
            progress.show,
            max_bad_share=config.prepare.max_bad_share,
        )
        manifest = finish(plan, config.prepare.max_bad_share) if finished else None
    finally:
        progress.close()
    if not finished:
        print("slurmtrain: stopped; finished units are kept, and the same command continues from there", flush=True)
        return EXIT_REQUEUE
    print(f"slurmtrain: {summary(plan, manifest)}", flush=True)
    return 0


def _verify(arguments: Arguments) -> int:
    from slurmtrain.data.format.manifest import read_manifest
    from slurmtrain.data.prepare.verify import verify

    word, *folders = arguments.positionals
    if word != "verify" or len(folders) != 1 or arguments.overrides:
        raise UsageError(
            f"cannot read {' '.join(['prepare', *arguments.positionals])!r}",
            hint="prepare verify DATA_SET, or: prepare prepare.inputs=... prepare.output=...",
        )
    folder = Path(folders[0])
    manifest = read_manifest(folder)
    problems = 0
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
