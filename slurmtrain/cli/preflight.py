"""preflight: start a job that only checks its nodes, wait for it, and show what it has found. Imports no torch."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from slurmtrain.choices import Backend, JobKind
from slurmtrain.cli.arguments import Arguments
from slurmtrain.cli.columns import one_line, print_table
from slurmtrain.cli.json_output import print_json
from slurmtrain.cli.submit import compose_and_validate
from slurmtrain.config.parallel_dims import parallel_dims_of
from slurmtrain.config.preflight import preflight_config
from slurmtrain.config.schema import Config
from slurmtrain.control.submitting import check, submit_run
from slurmtrain.errors import EXIT_CONFIG, UsageError
from slurmtrain.launch.submit import preparing
from slurmtrain.report.preflight import PreflightRecord, read_preflight
from slurmtrain.report.status.look import state
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system.paths import current_folder
from slurmtrain.system.records import printable

log = logging.getLogger(__name__)

LOOK_EVERY_S = 2.0


def main(arguments: Arguments) -> int:
    """Run the verb and return its exit code: 0 nothing that ends a training, 78 something does, 1 it could not be done."""
    options, cwd = arguments.options, current_folder()
    asked, dims = compose_and_validate(arguments)
    if asked.job.kind == JobKind.PREPARE:
        raise UsageError(
            "the ranks of job=prepare do not communicate, so there is nothing to compare",
            hint="job=train, or leave job= out",
        )
    check(asked, dims, cwd)
    config = preflight_config(asked, full="--full" in options)
    quiet = "--json" in options
    if config.cluster.backend == Backend.LOCAL:
        run_dir = _run_here(config, arguments, quiet=quiet)
    else:
        run_dir, jobs = submit_run(config, parallel_dims_of(config), arguments.overrides, cwd)
        if "--no-wait" in options:
            if quiet:
                print_json({"run": run_dir.id, "path": str(run_dir.path), "job_ids": run_dir.info()["job_ids"]})
            else:
                print(f"submitted run {run_dir.id} as job {jobs}\n  logs {run_dir.id} -f   status {run_dir.id}")
            return 0
        log.info("run %s, job %s: waiting for it; cancel %s ends it", run_dir.id, jobs, run_dir.id)
        _wait(run_dir)
    return _report(run_dir, quiet=quiet)


def _run_here(config: Config, arguments: Arguments, *, quiet: bool) -> RunDir:
    import contextlib
    import os

    from slurmtrain.supervise.platforms.local import run_local

    with preparing(config, arguments.overrides, current_folder()) as run_dir:
        pass
    if not quiet:
        run_local(run_dir)
        return run_dir
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        run_local(run_dir)
    return run_dir


def _wait(run_dir: RunDir) -> None:
    """Wait until the run has ended. Ctrl-C ends the waiting, and not the job."""
    said = ""
    try:
        while (now := state(run_dir)).alive:
            words = f"{now.status}: {now.explanation}"
            if words != said:
                log.info("%s", words)
            said = words
            time.sleep(LOOK_EVERY_S)
    except KeyboardInterrupt:
        log.info("the job continues: logs %s -f shows its findings, cancel %s ends it", run_dir.id, run_dir.id)
        raise


def _report(run_dir: RunDir, *, quiet: bool) -> int:
    numbers = run_dir.attempt_numbers()
    found = read_preflight(run_dir.attempt(numbers[-1])) if numbers else None
    now = state(run_dir)
    if quiet:
        values = found.values if found is not None else None
        print_json({"run": run_dir.id, "path": str(run_dir.path), "said": now.explanation, "preflight": values})
    elif found is None:
        print(f"the checks were not completed: {now.status}: {printable(now.explanation)}")
        print(f"  logs {run_dir.id} --rank all")
    else:
        print_record(found)
    if found is None:
        return EXIT_CONFIG if _ended_by_config(run_dir) else 1
    return EXIT_CONFIG if found.fatal else 0


def _ended_by_config(run_dir: RunDir) -> bool:
    from slurmtrain.runs import attempts
    from slurmtrain.runs.reasons import Reason

    tries = attempts.all_attempts(run_dir)
    return bool(tries) and tries[-1].reason in (Reason.CONFIG, Reason.BAD_NODE)


def print_record(found: PreflightRecord) -> None:
    """Print a row for each node, and each finding with what to do."""
    header = ["node", "rank", "torch", "driver", "GPUs", "free memory", "free disk", "network", "sees files after"]
    rates = found.measured.get("tflops") if found.measured is not None else None
    rows = [_row(each) for each in found.nodes]
    if isinstance(rates, Mapping):
        header.append("TFLOP/s")
        firsts = [str(each.get("rank")) for each in found.nodes]
        rows = [[*row, _number(rates.get(rank), "")] for row, rank in zip(rows, firsts, strict=True)]
    print_table(header, rows)
    if found.measured is not None:
        _print_rates(found.measured)
    print(
        f"preflight, {found.mode}: {found.ranks} rank{'' if found.ranks == 1 else 's'} on {len(found.nodes)} "
        f"node{'' if len(found.nodes) == 1 else 's'} compared in {found.seconds:.2f} s: "
        + (
            f"{len(found.findings)} finding{'' if len(found.findings) == 1 else 's'}"
            if found.findings
            else "nothing found"
        )
    )
    for each in found.findings:
        print(f"  {'ends a training' if each.fatal else 'warning'}, {each.kind}: {each.sentence}\n    -> {each.advice}")


def _print_rates(measured: Mapping[str, Any]) -> None:
    parts = [
        f"{name} {_number(measured.get(key), ' GB/s')}"
        for name, key in (("all-reduce", "all_reduce"), ("all-gather", "all_gather"))
        if measured.get(key) is not None
    ]
    for name, key in (("between nodes", "links"), ("within nodes", "pairs")):
        links = measured.get(key)
        found = [each[2] for each in links if _is_link(each)] if isinstance(links, list) else []
        if found:
            parts.append(f"{name} {min(found):.3g} to {max(found):.3g} GB/s in {len(found)} pairs")
    if parts:
        print(f"measured: {', '.join(parts)}")


def _is_link(value: object) -> bool:
    return isinstance(value, list) and len(value) == 3 and isinstance(value[2], int | float)


def _row(node: Mapping[str, Any]) -> list[str]:
    versions, disks = node.get("versions"), node.get("disks_gb")
    known = versions if isinstance(versions, Mapping) else {}
    free = [each for each in disks.values() if isinstance(each, int | float)] if isinstance(disks, Mapping) else []
    gpus, gpu = node.get("gpus"), node.get("gpu")
    speed = node.get("interface_mbit")
    interface = one_line(printable(str(node.get("interface") or "")))
    return [
        one_line(printable(str(node.get("node")))),
        one_line(printable(str(node.get("rank")))),
        one_line(printable(str(known.get("torch", "")))),
        one_line(printable(str(known.get("driver", "")))),
        "" if gpus is None else one_line(printable(f"{gpus} x {gpu}" if gpu else str(gpus))),
        _number(node.get("memory_gb"), " GB"),
        _number(min(free, default=None), " GB"),
        f"{interface} {speed / 1000:g} Gbit/s" if isinstance(speed, int) else interface,
        _number(node.get("folder_seen_after_s"), " s"),
    ]


def _number(value: object, unit: str) -> str:
    return f"{value:.4g}{unit}" if isinstance(value, int | float) and not isinstance(value, bool) else ""
