"""supervise: what a batch script runs, and the roles of the processes that it starts beside the ranks."""

from __future__ import annotations

import argparse
import os
from base64 import b64decode
from collections.abc import Mapping
from pathlib import Path

from slurmtrain.choices import RequeueMode
from slurmtrain.config.frozen import load_frozen
from slurmtrain.runs.ownership import require_own
from slurmtrain.runs.run_dir import RunDir


def main(options: argparse.Namespace) -> int:
    """Run the verb and return its exit code."""
    run_dirs = [RunDir(Path(path)) for path in options.run_dir]
    if options.hook is not None:
        from slurmtrain.supervise.hooks import run_hook

        run_hook(run_dirs[0], options.hook)
        return 0
    if options.watch is not None:
        from slurmtrain.supervise.node_watch import watch_over

        requeue = load_frozen(run_dirs[0].config_file, with_secrets=False).requeue
        watch_over(options.job, options.watch, requeues=requeue.mode == RequeueMode.REQUEUE)
        return 0
    submitted = _read_environment(options.environment) if options.environment is not None else None
    if len(run_dirs) > 1:
        from slurmtrain.supervise.packed import supervise_together

        return supervise_together(run_dirs, submitted, options.set_up_failed)
    require_own(run_dirs[0])
    from slurmtrain.supervise.loop import supervise
    from slurmtrain.supervise.platforms.slurm import SlurmJob

    return supervise(run_dirs[0], SlurmJob(run_dirs[0], submitted), options.set_up_failed)


def _read_environment(descriptor: int) -> Mapping[str, str]:
    """Return the variables of `env -0`, in base64. They are kept in memory only: there may be secrets among them."""
    with os.fdopen(descriptor, "rb") as file:
        pairs = [entry.partition(b"=") for entry in b64decode(file.read(), validate=True).split(b"\0") if entry]
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}
