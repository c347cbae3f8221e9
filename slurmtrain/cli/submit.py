"""submit and render, and the code that submitting a run, a grid and a search have in common."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slurmtrain.choices import Backend, RequeueMode
from slurmtrain.cli.arguments import Arguments
from slurmtrain.cli.json_output import print_json
from slurmtrain.config.compose import compose
from slurmtrain.config.parallel_dims import ParallelDims
from slurmtrain.config.schema import Config
from slurmtrain.config.validate import validate
from slurmtrain.data.sources.config_check import check_prepared
from slurmtrain.errors import UsageError
from slurmtrain.launch.memory_check import check_memory
from slurmtrain.launch.named_paths import check_named_paths
from slurmtrain.launch.resubmit import submit_links
from slurmtrain.launch.submit import check_slurm_is_here, dry_run, interrupted, preparing, slurm_conf_of, submit
from slurmtrain.launch.submit_once import RefusedError
from slurmtrain.launch.time_limit_check import look_ahead
from slurmtrain.planner.fit import check_fits
from slurmtrain.runs import lookup
from slurmtrain.runs.attempts import write_request
from slurmtrain.runs.events import Event
from slurmtrain.runs.outcome import RunAction
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.system.paths import current_folder

if TYPE_CHECKING:
    from slurmtrain.runs.sweep_dir import Sweep

log = logging.getLogger(__name__)


def main(arguments: Arguments) -> int:
    """Run the verb and return its exit code."""
    for option in ("--array-parallelism", "--again"):
        if option in arguments.options:
            raise UsageError(f"{option} is for sweeps", hint="add -m, and choices: -m key=1,2 submit")
    config, dims = compose_and_validate(arguments)
    check_fits(config, dims)
    check_prepared(config, later="--after" in arguments.options)
    if "--dry-run" not in arguments.options:  # it queues nothing, and may be used on another machine
        check_named_paths(config, current_folder(), later="--after" in arguments.options)
    if arguments.verb == "render":
        return _render(config, arguments)
    runs = arguments.options.get("--after")
    plan = starting_after(config, runs) if runs is not None else config
    if "--dry-run" in arguments.options:
        print(dry_run(plan, current_folder()), end="")
        return 0
    for warning in check_memory(plan, dims):
        log.warning(warning)
    if plan.cluster.backend == Backend.LOCAL:
        return _run_here(plan, arguments)
    try:
        return _submit(plan, arguments)
    except RefusedError:  # one of the runs may have ended since, and SLURM may have forgotten its job
        later = starting_after(config, runs) if runs is not None else plan
        if later == plan:
            raise
        return _submit(later, arguments)


def compose_and_validate(arguments: Arguments) -> tuple[Config, ParallelDims]:
    """Return the config of a command line and its parallel dims, after all checks of its fields."""
    config = compose(
        arguments.overrides,
        config_name=arguments.options.get("--config-name", "config"),
        config_dir=arguments.options.get("--config-dir"),
        config_path=arguments.options.get("--config-path"),
    )
    return config, validate(config)


def starting_after(config: Config, runs: str) -> Config:
    """Return what `launch.dependencies.starting_after` does; raise for cluster=local."""
    from slurmtrain.launch import dependencies

    if config.cluster.backend == Backend.LOCAL:
        raise UsageError(
            "--after is for jobs of SLURM, and cluster=local has no queue", hint="submit when it has finished"
        )
    return dependencies.starting_after(config, runs, lookup.runs_root())


def awaited_runs(config: Config, options: Mapping[str, str]) -> list[RunDir]:
    """Return the runs of --after. Errors in them are raised before anything is created."""
    if "--after" not in options:
        return []
    from slurmtrain.launch import dependencies

    starting_after(config, options["--after"])
    return dependencies.find_runs(options["--after"], lookup.runs_root())


def say_unless_awaited(after: Sequence[RunDir], sweep: Sweep) -> None:
    """Log a message if --after names other runs than those that an existing sweep already waits for."""
    if after and [str(run_dir.path) for run_dir in after] != sweep.info()["after"]:
        log.info("--after does not hold for %s, which is there already", sweep.id)


def client_of(config: Config) -> SlurmClient:
    """Check that SLURM is available before anything is created, log warnings of likely problems, and return its client."""
    client = SlurmClient(slurm_conf_of(config))
    check_slurm_is_here(client.slurm_conf)
    for warning in look_ahead(config, Path(config.job.runs_dir).expanduser(), client):
        log.warning(warning)
    return client


def _check_not_in_vain(run_dir: RunDir, runs: str, client: SlurmClient) -> None:
    from slurmtrain.launch.dependencies import check_again

    try:
        check_again(runs, lookup.runs_root(), client)
    except UsageError:
        write_request(run_dir, RunAction.CANCEL)
        client.cancel(*reversed(run_dir.info()["job_ids"]))
        raise


def _submit(config: Config, arguments: Arguments) -> int:
    client = client_of(config)
    with preparing(config, arguments.overrides, current_folder()) as run_dir:
        try:
            job_id = submit([run_dir], config)
        except KeyboardInterrupt:
            log.info(interrupted(run_dir, client))
            raise
        if config.requeue.mode == RequeueMode.CHAIN:
            links = submit_links(run_dir, job_id, config.requeue.chain_length, client)
            job_id = f"{job_id}, followed by {', '.join(links[1:])}"
    if "--after" in arguments.options:
        _check_not_in_vain(run_dir, arguments.options["--after"], client)
    if "--json" in arguments.options:
        print_json({"run": run_dir.id, "path": str(run_dir.path), "job_ids": run_dir.info()["job_ids"]})
        return 0
    print(f"submitted run {run_dir.id} as job {job_id}\n  {run_dir.path}")
    run = lookup.reference(run_dir)
    print(f"  status {run}   logs {run} -f   cancel {run}" + ("   (or: last)" if run == run_dir.id else ""))
    if "--follow" not in arguments.options:
        return 0
    from slurmtrain.cli.logs import follow_to_the_end

    return follow_to_the_end(run_dir)


def _run_here(config: Config, arguments: Arguments) -> int:
    from slurmtrain.launch.local import run_local

    with preparing(config, arguments.overrides, current_folder()) as run_dir:
        pass
    print(f"run {run_dir.id} in {run_dir.path}", flush=True)
    return run_local(run_dir)


def _render(config: Config, arguments: Arguments) -> int:
    target = arguments.options.get("--output")
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
