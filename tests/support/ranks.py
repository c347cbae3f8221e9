"""The processes of a run's ranks on this machine, below a sandbox's slurmd or a launcher of cluster=local."""

from __future__ import annotations

import contextlib
import math

import psutil

from slurmtrain.runs.run_dir import RunDir


def rank_pids(run_dir: RunDir) -> dict[int, int]:
    """Return the processes by rank, in order, told by their command line. Data workers, which are later children, are none."""
    found: dict[int, tuple[float, int]] = {}
    for each in psutil.process_iter(["cmdline"]):
        words = each.info["cmdline"] or [""]
        if "train" not in words or str(run_dir.path) not in words or "python" not in words[0]:
            continue
        with contextlib.suppress(psutil.Error):
            variables, began = each.environ(), each.create_time()
            rank = variables.get("RANK", variables.get("SLURM_PROCID"))
            if rank is not None:  # told by their start: the kernel may begin again with small numbers
                found[int(rank)] = min(found.get(int(rank), (math.inf, 0)), (began, each.pid))
    return {rank: found[rank][1] for rank in sorted(found)}
