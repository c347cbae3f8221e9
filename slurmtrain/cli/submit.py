"""submit and render, and the code that submitting a run, a grid and a search have in common."""

from __future__ import annotations

import contextlib
import logging
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slurmtrain.choices import Backend
from slurmtrain.cli.arguments import Arguments
from slurmtrain.cli.columns import LONGEST_RULE, terminal_width
from slurmtrain.cli.json_output import print_json
from slurmtrain.config.compose import compose
from slurmtrain.config.parallel_dims import ParallelDims
from slurmtrain.config.schema import Config
from slurmtrain.config.validate import validate
from slurmtrain.control.access import claimed_alone
from slurmtrain.control.submitting import check, starting_after, submit_run, warn_of_memory
from slurmtrain.errors import ClusterError, ConfigError, UsageError
from slurmtrain.launch.script_parts import Line
from slurmtrain.launch.snapshot import CodeSource
from slurmtrain.launch.submit import dry_run, explained, preparing, slurm_conf_of
from slurmtrain.runs import lookup
from slurmtrain.runs.events import Event
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.slurm.topology import order_of_ranks
from slurmtrain.slurm.versions import parse_version
from slurmtrain.system.paths import current_folder

if TYPE_CHECKING:
    from slurmtrain.runs.sweep_dir import Sweep

log = logging.getLogger(__name__)

COLUMN = 72  # where the reasons of `render --explain` begin, at most


def main(arguments: Arguments) -> int:
    """Run the verb and return its exit code."""
    for option in ("--array-parallelism", "--again"):
        if option in arguments.options:
            raise UsageError(f"{option} is for sweeps", hint="add -m, and choices: -m key=1,2 submit")
    if "--from" in arguments.options:
        with contextlib.ExitStack() as unpacked:
            return _submit_or_show(_of_bundle(arguments, unpacked), arguments, unpacked)
    config = _as_typed(arguments)
    job = _Experiment(config, validate(config), arguments.overrides, None, current_folder())
    return _submit_or_show(job, arguments, contextlib.ExitStack())


@dataclass(frozen=True)
class _Experiment:
    """What is submitted.

    Attributes:
        overrides: for the record.
        source: the code, out of a bundle; None: that of the current folder.
        folder: the folder to which the words of a program are relative.
    """

    config: Config
    dims: ParallelDims
    overrides: Sequence[str]
    source: CodeSource | None
    folder: Path


def _of_bundle(arguments: Arguments, unpacked: contextlib.ExitStack) -> _Experiment:
    """Return what a bundle holds, with the overrides of the command line. It is unpacked until `unpacked` is closed."""
    from slurmtrain.launch import bundle as bundles

    for option in ("--config-name", "--config-path"):
        if option in arguments.options:
            raise UsageError(f"--from contains a whole config, so there is nothing to compose from {option}")
    bundle = unpacked.enter_context(bundles.opened(Path(arguments.options["--from"]).expanduser()))
    config_dir = arguments.options.get("--config-dir")
    config, dims = bundles.config_of(bundle, arguments.overrides, current_folder(), config_dir=config_dir)
    bundles.tell_differences(bundle)
    overrides = [*bundle.manifest["overrides"], *arguments.overrides]
    return _Experiment(config, dims, overrides, bundle.code, bundle.workdir or current_folder())


def _submit_or_show(job: _Experiment, arguments: Arguments, unpacked: contextlib.ExitStack) -> int:
    config, dims = job.config, job.dims
    after, dry = arguments.options.get("--after"), "--dry-run" in arguments.options
    # A dry run queues nothing, and may be used on another machine.
    check(config, dims, job.folder, later=after is not None, look_at_files=not dry)
    if arguments.verb == "render":
        return _render(config, arguments)
    if dry:
        shown = config if after is None else starting_after(config, after)
        print(dry_run(shown, current_folder(), job.source), end="")
        return 0
    if config.cluster.backend == Backend.LOCAL:
        if after is not None:
            starting_after(config, after)
        warn_of_memory(config, dims)
        return _run_here(job, unpacked)
    return _submit(job, arguments, unpacked)


def compose_and_validate(arguments: Arguments) -> tuple[Config, ParallelDims]:
    """Return the config of a command line and its parallel dims, after all checks of its fields."""
    config = _as_typed(arguments)
    return config, validate(config)


def _as_typed(arguments: Arguments) -> Config:
    return compose(
        arguments.overrides,
        config_name=arguments.options.get("--config-name", "config"),
        config_dir=arguments.options.get("--config-dir"),
        config_path=arguments.options.get("--config-path"),
    )


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
        log.info("--after does not apply to %s, which already exists", sweep.id)


def _submit(job: _Experiment, arguments: Arguments, unpacked: contextlib.ExitStack) -> int:
    run_dir, job_id = submit_run(
        job.config,
        job.dims,
        job.overrides,
        current_folder(),
        after=arguments.options.get("--after"),
        source=job.source,
    )
    unpacked.close()  # before a wait for the end of the run
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


def _run_here(job: _Experiment, unpacked: contextlib.ExitStack) -> int:
    from slurmtrain.supervise.platforms.local import run_local

    with preparing(job.config, job.overrides, current_folder(), job.source) as run_dir:
        pass
    unpacked.close()
    print(f"run {run_dir.id} in {run_dir.path}", flush=True)
    # Without the claim, `resume` in another shell could take a slow start, or a hook between two attempts, for the run's end.
    with claimed_alone(run_dir):
        return run_local(run_dir)


def _explain(config: Config, arguments: Arguments, target: str | None) -> int:
    if target is not None:
        raise UsageError("--explain prints, but -o writes a script", hint="leave one of them out")
    slurm = _slurm_here(config)
    version = parse_version(slurm.get("SLURM_VERSION", ""))
    lines = explained(config, current_folder(), version, order_of_ranks(slurm))
    if "--json" in arguments.options:
        print_json([{"line": line.text, "why": line.why} for line in lines])
    else:
        print("\n".join(side_by_side(lines, terminal_width())))
    return 0


def _slurm_here(config: Config) -> dict[str, str]:
    """Return the configuration of SLURM on the config's cluster; empty if it cannot be asked from this machine."""
    try:
        client = SlurmClient(slurm_conf_of(config))
    except (ClusterError, ConfigError):  # its sandbox is not running
        return {}
    return client.configuration() if client.available else {}


def side_by_side(lines: Sequence[Line], width: int | None) -> list[str]:
    """Return the lines of a script, each with the reason why it is there beside it; below it, where the line is long.

    A reason that holds for several lines stands beside the first, and bars beside the others.

    Args:
        width: width of the terminal; None: a file or pipe.
    """
    beside = max(40, min(COLUMN, (width or LONGEST_RULE) // 2))
    room = max(30, (width or LONGEST_RULE) - beside - 3)
    shown: list[str] = []
    before = ""
    for line in lines:
        reasons = [""] if not line.why else ["|"] if line.why == before else textwrap.wrap(line.why, room)
        before = line.why
        if not line.why:
            shown.append(line.text)
            continue
        if len(line.text) > beside:
            shown.append(line.text)
            shown += [] if reasons == ["|"] else [f"{'':<{beside}} | {part}" for part in reasons]
            continue
        texts = [line.text, *[""] * (len(reasons) - 1)]
        shown += [
            f"{text:<{beside}} | {part}" if part != "|" else f"{text:<{beside}} |"
            for text, part in zip(texts, reasons, strict=True)
        ]
    return shown


def _render(config: Config, arguments: Arguments) -> int:
    target = arguments.options.get("--output")
    if "--explain" in arguments.options:
        return _explain(config, arguments, target)
    if "--json" in arguments.options:
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
