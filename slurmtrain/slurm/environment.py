"""The identity of this rank: rank, world size and nodes, from SLURM's step, from torchrun, or as a single process.

It is the first thing that a rank finds out, and this module is the only source of these facts.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slurmtrain.errors import EnvironmentMismatchError
from slurmtrain.slurm.nodelist import expand_counts, expand_nodelist

# "local" for the ranks that cluster=local starts, "pods" for those of a pod.
LAUNCHER_VARIABLE = "SLURMTRAIN_LAUNCHER"
NODES_VARIABLE = "SLURMTRAIN_NODES"  # in a pod: the names of all nodes, with commas
NODE_VARIABLE = "SLURMTRAIN_NODE"  # in a pod: the name of its node
RESTART_VARIABLE = "SLURMTRAIN_RESTART"  # in a pod: how many attempts that object has begun before
JOB_VARIABLE = "SLURMTRAIN_JOB"  # in a pod: the name of the object that it belongs to, as a job of SLURM has an id
SPECIAL_STEPS = 0xFFFFFFF0  # step ids above are the batch script, the extern step and salloc's interactive shell


@dataclass(frozen=True)
class Environment:
    """The place of this process among the ranks of its job.

    Attributes:
        source: "slurm", "torchrun", "local", "pods" or "single".
        rank, world_size: among all ranks.
        local_rank, local_world_size: among the ranks of this node.
        node_rank: index of this node in `nodes`.
        nodes: names of all nodes, as SLURM has them.
        tasks_per_node: ranks on each of `nodes`.
        job_id: SLURM's job id, or None. For an array task, its own raw id.
        step_id: SLURM's step id, or None: ranks of two steps of one job do not meet.
        restart_count: how often SLURM has requeued this job.
    """

    source: str
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    nodes: tuple[str, ...] = ("localhost",)
    tasks_per_node: tuple[int, ...] = (1,)
    job_id: str | None = None
    step_id: str | None = None
    restart_count: int = 0

    @property
    def node(self) -> str:
        return self.nodes[self.node_rank]

    def expected_node(self, rank: int) -> str:
        """Return the node on which SLURM's default (block) distribution puts `rank`."""
        first = 0
        for node, tasks in zip(self.nodes, self.tasks_per_node, strict=True):
            if rank < first + tasks:
                return node
            first += tasks
        return "an unknown node"

    @classmethod
    def detect(cls, variables: Mapping[str, str] = os.environ, *, terminal: bool | None = None) -> Environment:
        """Read the environment.

        torchrun's variables have precedence, since it may itself run under srun. SLURM counts only inside a step that
        srun started: a shell of salloc, a batch script or `srun --pty` has job variables, too, and is one process.

        Raises:
            EnvironmentMismatchError: variables contradict each other or cannot be read.
        """
        if "TORCHELASTIC_RUN_ID" in variables or (LAUNCHER_VARIABLE in variables and "RANK" in variables):
            return cls._from_torchrun(variables)
        if in_slurm_step(variables, terminal=terminal):
            return cls._from_slurm(variables)
        return cls(source="single", nodes=(socket.gethostname(),), job_id=variables.get("SLURM_JOB_ID"))

    @classmethod
    def _from_torchrun(cls, variables: Mapping[str, str]) -> Environment:
        rank, world_size = _number(variables, "RANK"), _number(variables, "WORLD_SIZE")
        local_rank, local_world_size = _number(variables, "LOCAL_RANK"), _number(variables, "LOCAL_WORLD_SIZE")
        if local_world_size < 1:
            raise EnvironmentMismatchError(f"LOCAL_WORLD_SIZE is {local_world_size}", hint="start ranks with torchrun")
        nodes = max(1, world_size // local_world_size)
        node_rank = _number(variables, "GROUP_RANK") if "GROUP_RANK" in variables else rank // local_world_size
        launcher = variables.get(LAUNCHER_VARIABLE)
        pods = launcher == "pods"
        # torchrun gives the number of the other nodes, not their names.
        given = variables[NODES_VARIABLE].split(",") if NODES_VARIABLE in variables else []
        names = (
            given
            if len(given) == nodes
            else [socket.gethostname() if index == node_rank else f"node{index}" for index in range(nodes)]
        )
        return cls(
            source=launcher if launcher in ("local", "pods") else "torchrun",
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            local_world_size=local_world_size,
            node_rank=node_rank,
            nodes=tuple(names),
            tasks_per_node=(local_world_size,) * nodes,
            job_id=variables.get(JOB_VARIABLE if pods else "SLURM_JOB_ID"),
            restart_count=int(variables.get(RESTART_VARIABLE if pods else "TORCHELASTIC_RESTART_COUNT", "0")),
        )._checked()

    @classmethod
    def _from_slurm(cls, variables: Mapping[str, str]) -> Environment:
        nodelist = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST", "")
        counts = variables.get("SLURM_STEP_TASKS_PER_NODE") or variables.get("SLURM_TASKS_PER_NODE", "")
        nodes, tasks = tuple(expand_nodelist(nodelist)), tuple(expand_counts(counts))
        node_rank = _number(variables, "SLURM_NODEID")
        return cls(
            source="slurm",
            rank=_number(variables, "SLURM_PROCID"),
            world_size=_number(
                variables, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in variables else "SLURM_NTASKS"
            ),
            local_rank=_number(variables, "SLURM_LOCALID"),
            local_world_size=tasks[node_rank] if node_rank < len(tasks) else 1,
            node_rank=node_rank,
            nodes=nodes,
            tasks_per_node=tasks,
            job_id=variables["SLURM_JOB_ID"],
            step_id=variables["SLURM_STEP_ID"],
            restart_count=int(variables.get("SLURM_RESTART_COUNT", "0")),
        )._checked()

    def _checked(self) -> Environment:
        if len(self.nodes) != len(self.tasks_per_node) or sum(self.tasks_per_node) != self.world_size:
            raise EnvironmentMismatchError(
                f"{self.source} speaks of {self.world_size} ranks, but of {len(self.nodes)} nodes with "
                f"{', '.join(map(str, self.tasks_per_node))} ranks each",
                hint="variables of another job may be left over in this shell",
            )
        if not 0 <= self.rank < self.world_size or not 0 <= self.node_rank < len(self.nodes):
            raise EnvironmentMismatchError(
                f"{self.source} gives rank {self.rank} of {self.world_size} on node {self.node_rank}"
            )
        return self


def in_slurm_step(variables: Mapping[str, str] = os.environ, *, terminal: bool | None = None) -> bool:
    """Return whether this is a task that srun started to run a program, not a shell for a person.

    Args:
        terminal: whether standard input is a terminal; None: find out.
    """
    if terminal is None:
        terminal = sys.stdin is not None and sys.stdin.isatty()
    step = variables.get("SLURM_STEP_ID", "")
    # The shell of `srun --pty` is one process for a person. What srun starts from within it inherits the variable, but
    # has no terminal.
    interactive = "SLURM_PTY_PORT" in variables and terminal
    return step.isdigit() and int(step) < SPECIAL_STEPS and "SLURM_PROCID" in variables and not interactive


def own_job_id() -> str | None:
    """Return the id by which SLURM knows this very job or array task; in a pod, the name of the object it belongs to."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    if JOB_VARIABLE in os.environ:
        return os.environ[JOB_VARIABLE]
    return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ.get("SLURM_JOB_ID")


def own_step_id() -> str | None:
    """Return the step that this process belongs to, as in "17.0"; None in the batch script and outside of SLURM."""
    job, step = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_STEP_ID")
    return f"{job}.{step}" if job and step else None


def own_node_name() -> str | None:
    """Return the name by which SLURM, or Kubernetes, knows the node of this process; None where nobody has named it."""
    return os.environ.get("SLURMD_NODENAME") or os.environ.get(NODE_VARIABLE) or None


def own_restart_count() -> int:
    """Return how often this very job has been started before."""
    return int(os.environ.get(RESTART_VARIABLE) or os.environ.get("SLURM_RESTART_COUNT", "0"))


def rank_or_zero() -> int:
    """Return this process's rank as far as the environment tells it; 0 for a single process.

    It is for what has to work even where `Environment.detect` refuses the variables.
    """
    for name in ("RANK", "SLURM_PROCID"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return 0


def check_world_size(environment: Environment, *, nodes: int, tasks_per_node: int) -> None:
    """Compare the ranks that run with those that were configured.

    Raises:
        EnvironmentMismatchError: they differ; the message names both.
    """
    expected = nodes * tasks_per_node
    if environment.world_size != expected:
        raise EnvironmentMismatchError(
            f"{environment.source} started {environment.world_size} ranks on {len(environment.nodes)} nodes, but the config "
            f"says cluster.nodes={nodes} x cluster.tasks_per_node={tasks_per_node} = {expected}",
            hint="start it with the same numbers: --nodes, --ntasks-per-node of srun, --nnodes, --nproc-per-node of torchrun",
        )


def no_gpu(environment: Environment, asked: str, why: str = "", driver: str | None = None) -> EnvironmentMismatchError:
    """Return the error of a rank that sees no GPU although the job has `asked` for some.

    Without this error, training would run very slowly on the CPU and end well. The node is at fault, unless a variable hides
    its GPUs.

    Args:
        why: a reason that is no node's fault: a torch that is built for CPUs.
        driver: what the driver says of it.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    because = f", with CUDA_VISIBLE_DEVICES={hidden!r}" if hidden is not None else ""
    said = f"; the driver says: {driver}" if driver else ""
    at_fault = not why and environment.source == "slurm" and not (hidden is not None and _hides_all(hidden))
    return EnvironmentMismatchError(
        f"{asked}, but rank {environment.rank} on {environment.node} sees no GPU{because}{why}{said}",
        hint=f"`nvidia-smi` on {environment.node} shows its GPUs, and cluster.exclude={environment.node} leaves that node out; "
        "cluster.gpus_per_node=0, or train.device=cpu for the built-in trainer, asks for none",
        nodes=(environment.node,) if at_fault else (),
    )


def _hides_all(visible_devices: str) -> bool:
    """Return whether this value of CUDA_VISIBLE_DEVICES hides all GPUs from a program."""
    return visible_devices.strip() in ("", "-1", "NoDevFiles")


def check_gpu_files(
    environment: Environment,
    gpus_per_node: int,
    variables: Mapping[str, str] = os.environ,
    devices: Path = Path("/dev"),
) -> None:
    """Check that this node can have a GPU at all, for a program that looks for GPUs by itself and may go on without.

    Only certain cases are refused: all GPUs hidden by CUDA_VISIBLE_DEVICES, or no device file of any kind of GPU.

    Raises:
        EnvironmentMismatchError: it cannot.
    """
    if gpus_per_node == 0:
        return
    hidden = _hides_all(variables.get("CUDA_VISIBLE_DEVICES", "0"))
    if hidden or not has_gpu_files(devices):
        raise no_gpu(environment, f"cluster.gpus_per_node={gpus_per_node}")


def has_gpu_files(devices: Path = Path("/dev")) -> bool:
    """Return whether this machine has a device file of any kind of GPU."""
    patterns = ("nvidia[0-9]*", "kfd", "dxg", "dri/renderD*", "accel*")
    return any(next(devices.glob(pattern), None) for pattern in patterns)


def _number(variables: Mapping[str, str], name: str) -> int:
    try:
        return int(variables[name])
    except (KeyError, ValueError):
        raise EnvironmentMismatchError(
            f"{name} is {variables.get(name, 'not set')!r}, expected a number", hint="start ranks with srun or torchrun"
        ) from None
