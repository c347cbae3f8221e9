"""torchrun on one node: its command line, and the environment that it gets.

It starts launched_process.py for each process, and never starts it again by itself: when one process fails, the attempt ends
on all nodes.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from slurmtrain.choices import Launcher
from slurmtrain.config.launched_program import LaunchedProgram
from slurmtrain.errors import EXIT_REQUEUE
from slurmtrain.slurm.environment import LAUNCHER_VARIABLE, NODES_VARIABLE, Environment

PROCESS = Path(__file__).with_name("launched_process.py")

# Variables of the one task that starts torchrun. In the processes that it starts they would name the wrong
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


def torchrun_variables(environment: Environment, processes: int, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of torchrun: without what describes the task that starts it.

    It has the variables of torch.distributed that are the same for all processes of the node. Each gets its own rank by
    torchrun.

    Args:
        processes: of each node.
        variables: of this process, with MASTER_ADDR and MASTER_PORT.
    """
    kept = {name: value for name, value in variables.items() if not OF_THE_TASK.fullmatch(name)}
    return {
        **kept,
        LAUNCHER_VARIABLE: Launcher.TORCHRUN,
        NODES_VARIABLE: ",".join(environment.nodes),
        "MASTER_ADDR": variables["MASTER_ADDR"],
        "MASTER_PORT": variables["MASTER_PORT"],
        "WORLD_SIZE": str(len(environment.nodes) * processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "NODE_RANK": str(environment.node_rank),
    }


def torchrun_words(
    program: LaunchedProgram,
    variables: Mapping[str, str],
    *,
    nodes: int,
    folder: Path,
    heard: Sequence[str],
    finished_code: int | None,
) -> list[str]:
    """Return the command line of torchrun on this node.

    Args:
        variables: see `torchrun_variables`.
        folder: where the processes of this node write how they have ended.
        heard: names of the stop signals for which the program starts with the default.
        finished_code: job.finished_when if it is an exit code.
    """
    interpreter = _interpreter(program)
    quiet = ",".join(str(code) for code in (EXIT_REQUEUE, finished_code) if code)
    return [
        *(interpreter, "-u", "-m", "torch.distributed.run"),
        f"--nnodes={nodes}",
        f"--nproc-per-node={variables['LOCAL_WORLD_SIZE']}",
        f"--node-rank={variables['NODE_RANK']}",
        f"--master-addr={variables['MASTER_ADDR']}",
        f"--master-port={variables['MASTER_PORT']}",
        "--max-restarts=0",
        *program.options,
        "--no-python",
        *(sys.executable, "-I", "-S", str(PROCESS), str(folder), ",".join(heard), quiet),
        # torchrun starts Python without a buffer for its output. What a person has typed behind `python` is left as it is.
        *([interpreter, "-u", *program.words] if program.python else program.words),
    ]


def _interpreter(program: LaunchedProgram) -> str:
    """Return the Python of torchrun and the program: the command's own, that beside a torchrun which it names, or this one."""
    if program.interpreter is not None:
        return program.interpreter
    found = shutil.which(program.beside) if program.beside is not None else None
    beside = Path(found).with_name("python") if found is not None else None
    return str(beside) if beside is not None and beside.exists() else sys.executable
