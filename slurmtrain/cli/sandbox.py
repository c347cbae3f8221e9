"""The verb `sandbox`: a real, throwaway SLURM on this machine, to try things before the real cluster."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import time
from pathlib import Path

from slurmtrain.cli.arguments import Parser
from slurmtrain.cli.json_output import print_json
from slurmtrain.errors import ClusterError
from slurmtrain.sandbox import Sandbox, SandboxSpec, default_directory, find, up
from slurmtrain.sandbox.accounting import ACCOUNT, HIGH, LOW
from slurmtrain.sandbox.spec import CLUSTER_NAME, PREEMPT_MODES
from slurmtrain.slurm.command_environment import programs_beside
from slurmtrain.slurm.node_ledger import ALL, NodeEvent, NodeRecord, append_to_ledger, ledger_file

PROG = "python -m slurmtrain sandbox"


def main(verb: str, words: list[str]) -> int:
    """Run the verb and return its exit code."""
    options = _parser().parse_args(words)
    exit_code: int = options.action(options)
    return exit_code


def _parser() -> argparse.ArgumentParser:
    default = SandboxSpec()
    parser = Parser.of("sandbox")
    actions = parser.add_subparsers(required=True, metavar="up | down | status | env")
    for name, action, what in (
        ("up", _up, "start one; returns when all nodes are idle"),
        ("down", _down, "end it: its jobs, its daemons, its directory"),
        ("status", _status, "say whether it runs, and in which state its nodes are"),
        ("env", _env, "print the line that points SLURM's commands at it"),
    ):
        sub = actions.add_parser(name, help=what, description=what[0].upper() + what[1:] + ".")
        sub.set_defaults(action=action)
        sub.add_argument(
            "--name", default="default", help="name, to run several at the same time (default: %(default)s)"
        )
        sub.add_argument(
            "--dir", type=Path, help="directory of the sandbox (default: in the system's temporary directory)"
        )
        if name == "status":
            sub.add_argument("--json", action="store_true", help="the same for a program: an object")
        if name == "up":
            _add_spec_options(sub, default)
    return parser


def _add_spec_options(parser: argparse.ArgumentParser, default: SandboxSpec) -> None:
    for option, what in (
        ("nodes", "number of nodes"),
        ("cpus", "CPUs per node, not necessarily there"),
        ("gpus", "GPUs per node, for SLURM's eyes only"),
        ("memory-mb", "memory per node, not enforced"),
        ("grace-s", "GraceTime of partition low"),
        ("kill-wait-s", "from SIGTERM to SIGKILL"),
        ("slurmd-timeout-s", "silence after which a node counts as down"),
        ("cred-expire-s", "a requeued job waits this long, and 1 s"),
    ):
        value = getattr(default, option.replace("-", "_"))
        parser.add_argument(f"--{option}", type=int, default=value, metavar="N", help=f"{what} (default: %(default)s)")
    parser.add_argument(
        "--preempt-mode",
        choices=list(PREEMPT_MODES),
        default=default.preempt_mode,
        help="what happens to a preempted job in partition low (default: %(default)s)",
    )
    parser.add_argument(
        "--slurm-prefix", type=Path, metavar="DIR", help="take SLURM from DIR/bin and DIR/sbin (default: from PATH)"
    )
    parser.add_argument(
        "--accounting",
        action="store_true",
        help="with slurmdbd and MariaDB: an account, limits, and QOS that preempt each other instead of partitions",
    )
    parser.add_argument("--user-signal", action="store_true", help="preemption sends a job's own --signal, not SIGTERM")


def _directory(options: argparse.Namespace) -> Path:
    return options.dir.absolute() if options.dir else default_directory(options.name)


def _suffix(options: argparse.Namespace) -> str:
    """Return the options by which the next command means the same sandbox."""
    if options.dir:
        return f" --dir {shlex.quote(str(options.dir))}"
    return "" if options.name == "default" else f" --name {options.name}"


def _as_override(options: argparse.Namespace) -> str:
    """Return the overrides by which a command with +cluster=sandbox means the same sandbox."""
    if options.dir:
        return f" cluster.sandbox=null cluster.slurm_conf={shlex.quote(str(options.dir / 'slurm.conf'))}"
    return "" if options.name == "default" else f" cluster.sandbox={options.name}"


def _running(options: argparse.Namespace) -> Sandbox:
    sandbox = find(_directory(options))
    if sandbox is None:
        raise ClusterError(f"no sandbox runs in {_directory(options)}.", hint=f"start one: {PROG} up{_suffix(options)}")
    return sandbox


def _up(options: argparse.Namespace) -> int:
    fields = SandboxSpec.__dataclass_fields__
    spec = SandboxSpec(**{name: getattr(options, name) for name in fields})
    began = time.monotonic()
    sandbox = up(spec, _directory(options), options.slurm_prefix)
    _forgive_former_nodes()
    node = f"{spec.cpus} CPUs" + (f" and {spec.gpus} GPUs" if spec.gpus else "")
    took = time.monotonic() - began
    suffix = _suffix(options)
    print(f"{spec.nodes} nodes with {node} each are idle after {took:.1f} s, in {sandbox.directory}")
    if spec.accounting:
        print(
            f"account {ACCOUNT}; QOS: {LOW} (the default one, preempted by {spec.preempt_mode}), {HIGH} (preempts), normal"
        )
    else:
        print(f"partitions: low (preempted by {spec.preempt_mode}), high (preempts)")
    print(f"  python -m slurmtrain +cluster=sandbox{_as_override(options)} submit")
    print(f'  eval "$({PROG} env{suffix})"   # then sinfo, sbatch, scancel, ... mean this one')
    print(f"  {PROG} down{suffix}")
    return 0


def _forgive_former_nodes() -> None:
    """Forgive what nodes of earlier sandboxes have done: those of this one have the same names."""
    with contextlib.suppress(OSError):  # nowhere to keep a ledger, so nothing is on record
        ledger = ledger_file(CLUSTER_NAME)
        if ledger.exists():
            append_to_ledger(ledger, [NodeRecord(time.time(), ALL, NodeEvent.FORGIVEN)])


def _down(options: argparse.Namespace) -> int:
    sandbox = find(_directory(options))
    if sandbox is None:
        print(f"no sandbox runs in {_directory(options)}")
        return 0
    sandbox.down()
    print(f"{sandbox.directory} is down and removed")
    return 0


def _status(options: argparse.Namespace) -> int:
    sandbox = _running(options)
    states = sandbox.node_states()
    if options.json:
        print_json({"directory": str(sandbox.directory), "slurm_conf": str(sandbox.slurm_conf), "nodes": states})
        return 0
    print(f"{sandbox.directory}: " + (", ".join(f"{n} {s}" for n, s in states.items()) or "slurmctld does not answer"))
    jobs = sandbox.run(["squeue", "-h", "-o", "%i %j %P %T %N"]).stdout
    print(jobs.rstrip() or "no jobs")
    return 0


def _env(options: argparse.Namespace) -> int:
    conf = _running(options).slurm_conf
    programs = programs_beside(str(conf))
    if programs is not None:
        print(f'export PATH={shlex.quote(programs)}:"$PATH"')
    print(f"export SLURM_CONF={shlex.quote(str(conf))}")
    return 0
