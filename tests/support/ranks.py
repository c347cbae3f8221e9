"""The processes of a run's ranks on this machine, below a sandbox's slurmd or a launcher of cluster=local."""

from __future__ import annotations

import sys
from pathlib import Path

from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system import process


def rank_pids(run_dir: RunDir) -> dict[int, int]:
    """Return the processes by rank, in order, told by their command line. Data workers, which are later children, are none."""
    found: dict[int, tuple[int, int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if b"train" not in words or str(run_dir.path).encode() not in words or b"python" not in words[0]:
                continue
            variables = dict(v.split(b"=", 1) for v in (entry / "environ").read_bytes().split(b"\0") if b"=" in v)
        except OSError:
            continue
        rank, known = variables.get(b"RANK", variables.get(b"SLURM_PROCID")), process.stat(entry.name)
        if rank is not None and known is not None:  # told by their start: the kernel may begin again with small numbers
            found[int(rank)] = min(found.get(int(rank), (sys.maxsize, 0)), (known.start, int(entry.name)))
    return {rank: found[rank][1] for rank in sorted(found)}
