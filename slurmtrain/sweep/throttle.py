"""--array-parallelism for an existing sweep: its arrays in the queue get the limit, and those still to be submitted."""

from __future__ import annotations

from slurmtrain.errors import UsageError
from slurmtrain.launch.arrays import limits_of
from slurmtrain.report.status.state import RunStatus
from slurmtrain.runs.sweep_dir import Sweep, tasks_of
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.sweep.folder import states_of
from slurmtrain.system.files import read_json, write_json


def throttle(sweep: Sweep, parallelism: int, client: SlurmClient | None) -> None:
    """Let this many points run at the same time from now on. Runs that are running go on.

    Args:
        client: None for a sweep that is run on this machine, which has no arrays.

    Raises:
        UsageError: it is less than one for each array that is in the queue beside others.
        ClusterError: SLURM refused, or does not answer.
    """
    now = states_of(sweep)
    plans = {number: read_json(sweep.array(number) / "plan.json") or {} for number in sweep.array_numbers()}
    left = {
        number: plan
        for number, plan in plans.items()
        if sweep.job_id(number) is None or any(now[run_id].alive for run_id in plan["members"])
    }
    beside = [number for number, plan in left.items() if plan["after"] not in left]
    pack = sweep.pack
    least = len(beside) * pack
    if parallelism < least:
        raise UsageError(
            f"--array-parallelism {parallelism}: {sweep.id} has {len(beside)} arrays beside each other, "
            f"and each runs at least {pack} points",
            hint=f"--array-parallelism {least}, or sweep cancel {sweep.id} and the command with --again",
        )
    shares = dict(
        zip(beside, limits_of([len(left[each]["members"]) for each in beside], parallelism, pack=pack), strict=True)
    )
    for number, plan in left.items():
        tasks = tasks_of(len(plan["members"]), pack)
        limit = shares.get(number) or min(tasks, parallelism // pack)  # the others wait for one of these
        job_id = sweep.job_id(number)
        waits = any(now[run_id].status == RunStatus.WAITING for run_id in plan["members"])
        if client is not None and job_id is not None and waits and tasks > 1:
            client.limit_array(job_id, limit)
        write_json(sweep.array(number) / "plan.json", {**plan, "parallelism": limit})
    write_json(sweep.info_file, {**sweep.info(), "parallelism": parallelism})
