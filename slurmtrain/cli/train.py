"""train: what every rank runs. The signals are armed first of all, before anything heavy is imported."""

from __future__ import annotations

from pathlib import Path

from slurmtrain.cli.arguments import Arguments
from slurmtrain.errors import UsageError
from slurmtrain.runtime import signals


def main(arguments: Arguments) -> int:
    signals.arm()
    from slurmtrain import rundir
    from slurmtrain.runtime import main as runtime

    if arguments.positionals:
        if len(arguments.positionals) > 1 or arguments.overrides:
            raise UsageError(
                f"`train {arguments.positionals[0]}` takes its config from the run directory and nothing else",
                hint="without a run directory, overrides are welcome: key=value train",
            )
        path = Path(arguments.positionals[0])
        run_dir = rundir.RunDir(path.resolve())
        run_dir.info()
        runtime.run_submitted(run_dir)

    from slurmtrain.cli.submit import compose_and_validate
    from slurmtrain.launch.submit import preparing
    from slurmtrain.runtime.environment import Environment

    cluster_given = [word for word in arguments.overrides if word.split("=")[0] in ("cluster.nodes", "cluster.tasks_per_node")]
    if not cluster_given:
        environment = Environment.detect()
        counts = set(environment.tasks_per_node)
        arguments.overrides.append(f"cluster.nodes={len(environment.nodes) if len(counts) == 1 else 1}")
        tasks = environment.tasks_per_node[0] if len(counts) == 1 else environment.world_size
        arguments.overrides.append(f"cluster.tasks_per_node={tasks}")
        if environment.world_size > 1 and not any(word.startswith("cluster=") for word in arguments.overrides):
            arguments.overrides += ["cluster.backend=slurm", "cluster.network_interface=auto"]
    config = compose_and_validate(arguments)

    def create() -> rundir.RunDir:
        with preparing(config, arguments.overrides, Path.cwd()) as run_dir:
            return run_dir

    runtime.run_by_hand(config, create, strict=bool(cluster_given))
