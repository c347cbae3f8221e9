"""The verb `sandbox`: a real, throwaway SLURM on this machine, to try things before the real cluster."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import time
from pathlib import Path

from slurmtrain.cli.arguments import PROGRAM
from slurmtrain.cli.json_output import print_json
from slurmtrain.errors import ClusterError
from slurmtrain.report.page.units import plural
from slurmtrain.sandbox import SandboxSpec, default_directory, find, up
from slurmtrain.sandbox.spec import CLUSTER_NAME
from slurmtrain.slurm.command_environment import programs_beside
from slurmtrain.slurm.node_ledger import ALL, NodeEvent, NodeRecord, append_to_ledger, ledger_file

PROG = f"{PROGRAM} sandbox"
OF_SPEC = ("nodes", "cpus", "gpus", "preempt_mode")  # options that are fields of `SandboxSpec`


def main(options: argparse.Namespace) -> int:
    """Run the verb and return its exit code."""
    directory = default_directory(options.name)
    # By which the next command means the same sandbox.
    other = options.name != "default"
    suffix, override = (f" --name {options.name}", f" cluster.sandbox={options.name}") if other else ("", "")
    if options.action == "up":
        _up(options, directory)
        print(f"  {PROGRAM} +cluster=sandbox{override} submit")
        print(f'  eval "$({PROG} env{suffix})"   # then sinfo, sbatch, scancel, ... mean this one')
        print(f"  {PROG} down{suffix}")
        return 0
    sandbox = find(directory)
    if options.action == "down":
        if sandbox is not None:
            sandbox.down()
        print(f"{directory} is down and removed" if sandbox is not None else f"no sandbox runs in {directory}")
        return 0
    if sandbox is None:
        raise ClusterError(f"no sandbox runs in {directory}.", hint=f"start one: {PROG} up{suffix}")
    conf = str(sandbox.slurm_conf)
    if options.action == "env":
        programs = programs_beside(conf)
        if programs is not None:
            print(f'export PATH={shlex.quote(programs)}:"$PATH"')
        print(f"export SLURM_CONF={shlex.quote(conf)}")
        return 0
    states = sandbox.node_states()
    if options.json:
        print_json({"directory": str(sandbox.directory), "slurm_conf": conf, "nodes": states})
        return 0
    print(f"{sandbox.directory}: " + (", ".join(f"{n} {s}" for n, s in states.items()) or "slurmctld does not answer"))
    print(sandbox.run(["squeue", "-h", "-o", "%i %j %P %T %N"]).stdout.rstrip() or "no jobs")
    return 0


def _up(options: argparse.Namespace, directory: Path) -> None:
    spec = SandboxSpec(**{name: getattr(options, name) for name in OF_SPEC})
    began = time.monotonic()
    sandbox = up(spec, directory)
    took_s = time.monotonic() - began
    with contextlib.suppress(OSError):  # nodes of earlier sandboxes had the same names: what they have done is forgiven
        ledger = ledger_file(CLUSTER_NAME)
        if ledger.exists():
            append_to_ledger(ledger, [NodeRecord(time.time(), ALL, NodeEvent.FORGIVEN)])
    node = plural(spec.cpus, "CPU") + (f" and {plural(spec.gpus, 'GPU')}" if spec.gpus else "")
    print(f"after {took_s:.1f} s, {plural(spec.nodes, 'node')} with {node} can be used, in {sandbox.directory}")
    print(f"partitions: low (preempted by {spec.preempt_mode}), high (preempts)")
