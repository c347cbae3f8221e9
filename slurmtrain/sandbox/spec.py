"""The size and behaviour of a sandbox: a frozen description, and the text of its configuration files, as pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmtrain.errors import UsageError

CLUSTER_NAME = "sandbox"  # SLURM's name of every sandbox
MAX_NODES = 64  # all on one machine; a block of ports, see directory.py, has one for each and more
PREEMPT_MODES = {"requeue": "REQUEUE", "cancel": "CANCEL", "suspend": "SUSPEND,GANG"}  # their spelling in slurm.conf
GPU_DEVICES = tuple(f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty", "ptmx", "kmsg"))
"""Stand-ins for GPUs. SLURM wants character devices that exist (for plain files it never sets CUDA_VISIBLE_DEVICES); it
does not open them, and without a task/cgroup plugin it does not fence them off either."""


EPILOG = "epilog"  # in the sandbox's directory
MEMORY_MB = 4000  # of a node; only book-keeping, nothing enforces it
SLURMD_TIMEOUT_S = 10  # without a sign of a node it counts as down, and its jobs are requeued (real clusters: 300)
# A requeued job starts again after this plus 1 s (real clusters: 120). Below 5 slurmctld takes its default without a word.
CRED_EXPIRE_S = 5


@dataclass(frozen=True)
class SandboxSpec:
    """The size and behaviour of a sandbox.

    Attributes:
        gpus: GPUs per node; devices that exist only for SLURM, no program can compute on them.
        grace_s: GraceTime of partition `low`: from the first signal of a preemption to the second.
        kill_wait_s: KillWait: from SIGTERM to SIGKILL. SLURM's default, and that of most clusters, is 30.
        preempt_mode: what happens to a job of partition `low` when its grace time is over: "requeue", "cancel" or
            "suspend".
    """

    nodes: int = 4
    cpus: int = 4
    gpus: int = 0
    grace_s: int = 10
    kill_wait_s: int = 30
    preempt_mode: str = "requeue"

    def __post_init__(self) -> None:
        limits = {"nodes": (1, MAX_NODES), "cpus": (1, 1024), "gpus": (0, len(GPU_DEVICES))}
        for field, (low, high) in limits.items():
            value = getattr(self, field)
            if not low <= value <= high:
                raise UsageError(f"a sandbox cannot have {field}={value}.", hint=f"give a value from {low} to {high}")

        if self.preempt_mode not in PREEMPT_MODES:
            raise UsageError(
                f"a sandbox cannot have preempt_mode={self.preempt_mode!r}.", hint=f"give {', '.join(PREEMPT_MODES)}"
            )

    @property
    def node_names(self) -> tuple[str, ...]:
        return tuple(f"n{i}" for i in range(self.nodes))


@dataclass(frozen=True)
class Site:
    """The machine-specific facts that a sandbox's configuration needs besides the spec."""

    directory: Path
    user: str
    host: str
    first_port: int  # port of slurmctld; the nodes' ports follow
    task_prolog: Path | None = None  # tells each task where SLURM's commands are


def slurm_conf(spec: SandboxSpec, site: Site) -> str:
    """Return the text of slurm.conf for a plain cluster: two partitions, of which one preempts the other."""
    d = site.directory
    last = spec.nodes - 1
    nodes = "n0" if last == 0 else f"n[0-{last}]"
    ports = f"{site.first_port + 1}" if last == 0 else f"[{site.first_port + 1}-{site.first_port + 1 + last}]"
    low = f"PriorityTier=1 PreemptMode={spec.preempt_mode.upper()} GraceTime={spec.grace_s}"
    gres = f" Gres=gpu:{spec.gpus}" if spec.gpus else ""
    return f"""\
ClusterName={CLUSTER_NAME}
SlurmctldHost={site.host}(127.0.0.1)
SlurmctldPort={site.first_port}
SlurmUser={site.user}
SlurmdUser={site.user}
AuthType=auth/munge
AuthInfo=socket={d}/munge.sock,cred_expire={CRED_EXPIRE_S}
StateSaveLocation={d}/state
SlurmdSpoolDir={d}/spool/%n
SlurmctldPidFile={d}/state/slurmctld.pid
SlurmdPidFile={d}/state/%n.pid
SlurmctldLogFile={d}/log/slurmctld.log
SlurmdLogFile={d}/log/%n.log
SlurmctldDebug=info
SlurmdDebug=info
MailProg=/bin/true

# One machine plays all nodes: its real size does not matter, and there are no cgroups to own without root.
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
Epilog={d}/{EPILOG}
TaskPlugin=task/none
{f"TaskProlog={site.task_prolog}" if site.task_prolog else ""}
MpiDefault=none

# Preemption as clusters do it.
PreemptType=preempt/partition_prio
PreemptMode={PREEMPT_MODES[spec.preempt_mode]}
JobRequeue=1
KillWait={spec.kill_wait_s}
SlurmdTimeout={SLURMD_TIMEOUT_S}
ReturnToService=2
EnforcePartLimits=ANY
MinJobAge=3600
MaxJobCount=50000

# Nobody waits for a scheduler that has four nodes to look at.
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
# Without a default a job that names no memory takes all of the node's, and nothing else fits beside it.
DefMemPerCPU={MEMORY_MB // spec.cpus}
{"GresTypes=gpu" if spec.gpus else ""}
NodeName={nodes} NodeHostname={site.host} NodeAddr=127.0.0.1 Port={ports} Sockets=1 CoresPerSocket={spec.cpus} \
ThreadsPerCore=1 RealMemory={MEMORY_MB}{gres} State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES {low} MaxTime=INFINITE
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE
"""


def epilog(site: Site) -> str:
    """Return the text of the script that each node runs at the end of a job: it kills processes that the job has left there.

    On real clusters, cgroups do that. Without them a process that has left the tree of its step would live on, and the
    sandbox would hide that it is killed on a real cluster.
    """
    return f"""\
#!/bin/bash
# A job's processes are known by their environment; this script and its own by SLURM_SCRIPT_CONTEXT, which newer versions
# leave in a job's own environment, too, as prolog_task.
of_this_job="^SLURM_JOB_ID=$SLURM_JOB_ID\\$"
for file in $(grep -lz "$of_this_job" /proc/[0-9]*/environ 2>/dev/null); do
  grep -qz "^SLURM_SCRIPT_CONTEXT=epilog" "$file" 2>/dev/null && continue
  grep -qz "^SLURMD_NODENAME=$SLURMD_NODENAME\\$" "$file" 2>/dev/null || continue
  grep -qz "^SLURM_CONF={site.directory}/slurm.conf\\$" "$file" 2>/dev/null || continue
  pid=${{file#/proc/}}
  kill -KILL "${{pid%/environ}}" 2>/dev/null
done
exit 0 # anything else would drain the node
"""


def gres_conf(spec: SandboxSpec, devices: Sequence[str]) -> str:
    """Return the text of gres.conf, the same for every node.

    Args:
        devices: the character devices to use, at least `spec.gpus` of them.
    """
    names = ",".join(spec.node_names)
    return "AutoDetect=off\n" + "".join(f"NodeName={names} Name=gpu File={device}\n" for device in devices[: spec.gpus])
