"""train: the program of every rank. Signal handlers are installed first, before anything heavy is imported."""

from __future__ import annotations

import argparse
from pathlib import Path

from slurmtrain.errors import UsageError
from slurmtrain.slurm.environment import Environment
from slurmtrain.system import signals


def main(arguments: argparse.Namespace) -> int:
    """Run this process as a rank of a training job; it does not return."""
    stop_flag = signals.install_signal_handlers()

    from slurmtrain.runs.run_dir import RunDir
    from slurmtrain.runtime import main as runtime
    from slurmtrain.system.paths import located

    if arguments.run_directory is not None:
        if arguments.overrides:
            raise UsageError(
                f"`train {arguments.run_directory}` takes its config only from the run directory",
                hint="without a run directory, it accepts overrides: key=value train",
            )
        run_dir = RunDir(located(Path(arguments.run_directory)))
        run_dir.info()
        began = None
        if arguments.standby:
            from slurmtrain.runtime.standby import await_attempt

            began = await_attempt(run_dir, stop_flag)
        runtime.run_submitted(run_dir, began)

    from slurmtrain.cli.submit import compose_and_validate
    from slurmtrain.launch.submit import preparing
    from slurmtrain.system.paths import current_folder

    explicit = any(word.split("=")[0] in ("cluster.nodes", "cluster.tasks_per_node") for word in arguments.overrides)
    if not explicit:
        arguments.overrides.extend(_overrides_from(Environment.detect(), arguments.overrides))
    config, _ = compose_and_validate(arguments)

    def create() -> RunDir:
        with preparing(config, arguments.overrides, current_folder()) as run_dir:
            return run_dir

    runtime.run_by_hand(config, create, strict=explicit)


def _overrides_from(environment: Environment, given: list[str]) -> list[str]:
    """Return the overrides that describe the running ranks: by hand, srun or torchrun decides their number."""
    even = len(set(environment.tasks_per_node)) == 1
    found = [
        f"cluster.nodes={len(environment.nodes) if even else 1}",
        f"cluster.tasks_per_node={environment.tasks_per_node[0] if even else environment.world_size}",
    ]
    if environment.world_size > 1 and not any(word.startswith("cluster=") for word in given):
        found += ["cluster.backend=slurm", "cluster.network_interface=auto"]
    return found
