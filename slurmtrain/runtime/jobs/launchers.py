"""The command line of a launcher on one node, and the environment that it gets: pure functions.

All launchers start the same thing for each process (launched_process.py), and never start it again by themselves: when
one process fails, the attempt ends on all nodes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmtrain.choices import Launcher
from slurmtrain.config.launched_program import MODULES, LaunchedProgram
from slurmtrain.errors import EXIT_CONFIG, EXIT_REQUEUE
from slurmtrain.slurm.environment import LAUNCHER_VARIABLE, NODES_VARIABLE

PROCESS = Path(__file__).with_name("launched_process.py")
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"

# Variables of the one task that starts a launcher. In the processes that the launcher starts they would name the wrong
# rank: Lightning, mpi4py, DeepSpeed and others read them. Those of the job stay, and so do settings that people give to
# libraries of MPI: OMPI_MCA_*, PMIX_MCA_*, MV2_* other than MV2_COMM_WORLD_*.
OF_THE_TASK = re.compile(
    r"SLURM_(STEP.*|PROCID|LOCALID|NODEID|NTASKS.*|NPROCS|TASKS_PER_NODE|GTIDS|TASK_PID|SRUN_COMM_.*|LAUNCH_NODE_IPADDR"
    r"|CPU_BIND.*|DISTRIBUTION|PTY_.*|MPI_TYPE|PMI.*)|PMI_.*|PMIX_(?!MCA_).*|PMI2_.*"
    r"|OMPI_(COMM_WORLD_.*|UNIVERSE_SIZE|APP_CTX_.*|NUM_APP_CTX|FIRST_RANKS|FILE_LOCATION|ARGV|COMMAND)"
    r"|OMPI_MCA_(ess(_base_.*)?|orte_ess_.*|orte_.*_uri)|MV2_COMM_WORLD_.*"
    r"|RANK|LOCAL_RANK|GROUP_RANK|GROUP_WORLD_SIZE|ROLE_.*|CROSS_RANK|CROSS_SIZE|LOCAL_SIZE"
    r"|TORCHELASTIC_(RUN_ID|RESTART_COUNT|MAX_RESTARTS|USE_AGENT_STORE)|PET_.*|MASTER_ADDR|MASTER_PORT"
)
ACCELERATE_KINDS = ("--multi_gpu", "--use_fsdp", "--use_deepspeed", "--use_megatron_lm", "--tpu", "--use_xpu")


@dataclass(frozen=True)
class Launch:
    """The start of a launcher on this node.

    Attributes:
        launcher: a `Launcher` other than NONE.
        interpreter: the Python of the launcher and of the program.
        node_rank, nodes: index of this node, and the names of all.
        processes: processes per node.
        master: address and port at which node 0 is reached.
    """

    launcher: str
    interpreter: str
    node_rank: int
    nodes: Sequence[str]
    processes: int
    master: tuple[str, int]

    @property
    def world_size(self) -> int:
        return len(self.nodes) * self.processes


def task_variables(launch: Launch, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a launcher: without what describes the task that starts it.

    It has the variables of torch.distributed that are the same for all processes of the node. Each gets its own rank by
    the launcher.
    """
    kept = {name: value for name, value in variables.items() if not OF_THE_TASK.fullmatch(name)}
    host, port = launch.master
    return {
        **kept,
        LAUNCHER_VARIABLE: launch.launcher,
        NODES_VARIABLE: ",".join(launch.nodes),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(launch.world_size),
        "LOCAL_WORLD_SIZE": str(launch.processes),
        "NODE_RANK": str(launch.node_rank),
        **({"SLURMTRAIN_VISIBLE_DEVICES": kept[VISIBLE_DEVICES]} if VISIBLE_DEVICES in kept else {}),
    }


def launcher_words(
    launch: Launch,
    program: LaunchedProgram,
    process: Sequence[str],
    *,
    hostfile: Path,
    accelerate_config: Mapping[str, Any] | None = None,
) -> list[str]:
    """Return the command line of the launcher on this node.

    Args:
        process: what the launcher starts for each process, see `process_words`.
        hostfile: where `hostfile_text` was written, for DeepSpeed.
        accelerate_config: the contents of accelerate's config, the person's own or the one that the command names; None:
            there is none.
    """
    host, port = launch.master
    start = [launch.interpreter, "-u", "-m", MODULES[launch.launcher]]
    options = list(program.options)
    if launch.launcher == Launcher.TORCHRUN:
        derived = [
            f"--nnodes={len(launch.nodes)}",
            f"--nproc-per-node={launch.processes}",
            f"--node-rank={launch.node_rank}",
            f"--master-addr={host}",
            f"--master-port={port}",
            "--max-restarts=0",
        ]
        return [*start, *derived, *options, "--no-python", *process]
    if launch.launcher == Launcher.ACCELERATE:
        derived = [
            f"--num_machines={len(launch.nodes)}",
            f"--num_processes={launch.world_size}",
            f"--machine_rank={launch.node_rank}",
            f"--main_process_ip={host}",
            f"--main_process_port={port}",
            "--rdzv_backend=static",
            "--max_restarts=0",
            "--deepspeed_multinode_launcher=standard",
        ]
        if needs_kind(options, accelerate_config) and launch.world_size > 1:
            # So it starts several processes, also where there are no GPUs: they find out what they have.
            derived.append("--multi_gpu")
        return [*start, *derived, *(each for each in options if each != "--cpu"), "--no_python", *process]
    derived = [
        f"--hostfile={hostfile}",
        "--no_ssh",
        f"--node_rank={launch.node_rank}",
        f"--master_addr={host}",
        f"--master_port={port}",
        "--no_local_rank",  # launched_process.py adds it behind the program's script, where a program expects it
    ]
    return [*start, *derived, *(each for each in options if each != "--no_local_rank"), "--no_python", *process]


def needs_kind(options: Sequence[str], config: Mapping[str, Any] | None) -> bool:
    """Return whether `accelerate launch` would start one process only, since nobody has told it how to start several."""
    if any(each in ACCELERATE_KINDS for each in options):
        return False
    return config is None or str(config.get("distributed_type", "NO")) in ("NO", "MULTI_CPU")


def process_words(
    launch: Launch,
    program: LaunchedProgram,
    *,
    python: str,
    folder: Path,
    heard: Sequence[str],
    finished_code: int | None,
) -> list[str]:
    """Return what a launcher starts for each process: launched_process.py with the program behind it.

    Args:
        python: the interpreter of this package.
        folder: where the processes of this node write how they have ended.
        heard: names of the stop signals for which the program starts with the default.
        finished_code: job.finished_when if it is an exit code.
    """
    words, before = list(program.words), 0
    if program.python:
        # Launchers start Python without a buffer for its output. What a person has typed behind `python` is left as it is.
        words, before = [launch.interpreter, "-u", *words], 2
    adds_local_rank = launch.launcher == Launcher.DEEPSPEED and "--no_local_rank" not in program.options
    at = before + program.script_end if adds_local_rank and program.script_end else 0
    quiet = ",".join(str(code) for code in (EXIT_REQUEUE, finished_code) if code)
    return [python, "-I", "-S", str(PROCESS), str(folder), ",".join(heard), quiet or "0", str(at), *words]


def hostfile_text(launch: Launch) -> str:
    """Return a hostfile for DeepSpeed, which counts nodes and processes in it, and connects to nobody."""
    return "".join(f"{node} slots={launch.processes}\n" for node in launch.nodes)


def accelerate_config_file(options: Sequence[str], variables: Mapping[str, str]) -> Path:
    """Return the config that `accelerate launch` would read: the one among its options, or the person's own."""
    for at, word in enumerate(options):
        name, equals, value = word.partition("=")
        if name == "--config_file":
            return Path(value if equals else next(iter(options[at + 1 :]), ""))
    cache = variables.get("XDG_CACHE_HOME") or os.path.join(variables.get("HOME", "~"), ".cache")
    home = variables.get("HF_HOME") or os.path.join(cache, "huggingface")
    return Path(os.path.expanduser(home)) / "accelerate" / "default_config.yaml"


@dataclass(frozen=True)
class ProcessEnd:
    """How a process of this node has ended, if not with 0: `code` is minus the number of a signal that killed it."""

    rank: int
    code: int
    time: float


def end_of_node(
    launcher_code: int,
    ends: Sequence[ProcessEnd],
    died_of_a_stop: set[int],
    *,
    told: bool,
    finished_code: int | None = None,
) -> ProcessEnd:
    """Return the end that counts for all processes of this node; its rank is -1 where it is the launcher's own.

    A wrong config comes before a crash, a crash before a stop, a stop before the word that the program has finished. When
    several have crashed, the first one counts: the launcher has ended the others.

    Args:
        ends: those that have not ended with 0.
        died_of_a_stop: codes of a process that was killed by a stop signal.
        told: the processes were told to stop.
        finished_code: job.finished_when if it is an exit code.
    """

    def weight(end: ProcessEnd) -> tuple[int, float]:
        if end.code == EXIT_CONFIG:
            return 0, end.time
        if end.code == EXIT_REQUEUE:
            return 2, end.time
        if end.code == finished_code:
            return 4, end.time
        return (3 if told and end.code in died_of_a_stop else 1), end.time

    return min(ends, key=weight, default=ProcessEnd(-1, launcher_code, 0.0))
