"""Who am I, and on which nodes: what the variables of real launches (SLURM 22.05, torchrun) are read as."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from slurmtrain.errors import EXIT_CONFIG, EnvironmentMismatchError
from slurmtrain.slurm.environment import Environment, check_world_size, in_slurm_step
from slurmtrain.slurm.nodelist import expand_counts, expand_nodelist

HOST = socket.gethostname()


def variables(*lines: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in " ".join(lines).split())


BATCH_SHELL = variables(
    "SLURM_JOB_ID=1234 SLURM_JOB_NODELIST=n[0-1] SLURM_NNODES=2 SLURM_NTASKS=4 SLURM_TASKS_PER_NODE=2(x2)",
    "SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0",
)
STEP = BATCH_SHELL | variables(
    "SLURM_STEP_ID=0 SLURM_STEP_NODELIST=n[0-1] SLURM_STEP_NUM_TASKS=4 SLURM_STEP_TASKS_PER_NODE=2(x2)",
    "SLURM_PROCID=3 SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_RESTART_COUNT=2",
)
TORCHRUN = variables(
    "TORCHELASTIC_RUN_ID=none TORCHELASTIC_RESTART_COUNT=0 RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4",
    "GROUP_RANK=1 MASTER_ADDR=n0 MASTER_PORT=29500",
)


def test_a_task_of_srun_is_a_rank_of_its_step() -> None:
    place: dict[str, Any] = {"rank": 3, "world_size": 4, "local_rank": 1, "local_world_size": 2, "node_rank": 1}
    job: dict[str, Any] = {"job_id": "1234", "step_id": "0", "restart_count": 2}
    assert Environment.detect(STEP) == Environment("slurm", **place, nodes=("n0", "n1"), tasks_per_node=(2, 2), **job)


SHELLS = {
    "batch shell": BATCH_SHELL,
    "batch shell with the batch step's id": BATCH_SHELL | {"SLURM_STEP_ID": "4294967291"},
    "shell of salloc": {name: value for name, value in BATCH_SHELL.items() if "ID" not in name[6:]},
    "salloc with use_interactive_step": STEP | {"SLURM_STEP_ID": "4294967290"},
    "srun --pty bash": STEP | {"SLURM_PTY_PORT": "40001", "SLURM_PTY_WIN_COL": "80"},
    "extern step of ssh": STEP | {"SLURM_STEP_ID": "4294967292"},
    "plain login shell": {},
    "step id that is no number": STEP | {"SLURM_STEP_ID": "batch"},
}


def test_a_shell_in_a_job_is_one_process_and_not_a_rank() -> None:
    for kind, shell in SHELLS.items():
        assert not in_slurm_step(shell, terminal=True), kind
        found = Environment.detect(shell, terminal=True)
        assert (found.source, found.rank, found.world_size, found.nodes) == ("single", 0, 1, (HOST,)), kind
    # What srun starts from a pty shell inherits the shell's SLURM_PTY_PORT, but has no terminal.
    assert in_slurm_step(STEP | {"SLURM_PTY_PORT": "40001"}, terminal=False)


def test_torchrun_gives_the_ranks() -> None:
    found = Environment.detect(TORCHRUN)
    assert (found.source, found.rank, found.world_size, found.local_rank) == ("torchrun", 5, 8, 1)
    assert (found.local_world_size, found.node_rank, len(found.nodes)) == (4, 1, 2)
    assert found.node == HOST and len(found.nodes) > 1


def test_cluster_local_starts_ranks_on_one_node() -> None:
    local = {"SLURMTRAIN_LAUNCHER": "local", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    found = Environment.detect(local)
    assert (found.source, found.rank, found.world_size, len(found.nodes)) == ("local", 1, 2, 1)


CONTRADICTIONS = [
    (STEP, "SLURM_STEP_NUM_TASKS=8", "8 ranks, but of 2 nodes with 2, 2 ranks each"),
    (STEP, "SLURM_STEP_NODELIST=n[0-2]", "4 ranks, but of 3 nodes"),
    (STEP, "SLURM_PROCID=4", "rank 4 of 4"),
    (STEP, "SLURM_NODEID=2", "on node 2"),
    (STEP, "SLURM_LOCALID=", "SLURM_LOCALID is ''"),
    (STEP, "SLURM_STEP_TASKS_PER_NODE=two", "cannot read the task counts 'two'"),
    (STEP, "SLURM_STEP_NODELIST=n[0-", "cannot read the node list 'n\\[0-'"),
    (TORCHRUN, "RANK=8", "rank 8 of 8"),
    (TORCHRUN, "WORLD_SIZE=7", "7 ranks, but of 1 nodes with 4 ranks each"),
    (TORCHRUN, "WORLD_SIZE=many", "WORLD_SIZE is 'many'"),
    (TORCHRUN, "LOCAL_WORLD_SIZE=0", "LOCAL_WORLD_SIZE is 0"),
    (TORCHRUN, "GROUP_RANK=2", "on node 2"),
]


def test_leftovers_that_contradict_each_other_are_an_error_of_the_environment() -> None:
    for launcher, change, sentence in CONTRADICTIONS:
        with pytest.raises(EnvironmentMismatchError, match=sentence) as caught:
            Environment.detect(launcher | variables(change))
        assert caught.value.exit_code == EXIT_CONFIG


def test_another_number_of_ranks_than_configured_names_both() -> None:
    found = Environment.detect(STEP)
    check_world_size(found, nodes=2, tasks_per_node=2)
    check_world_size(found, nodes=1, tasks_per_node=4)
    said = r"slurm started 4 ranks on 2 nodes.*nodes=2 x .*tasks_per_node=4 = 8"
    with pytest.raises(EnvironmentMismatchError, match=said):
        check_world_size(found, nodes=2, tasks_per_node=4)


EXPANDED = {
    "n0": "n0",
    "localhost": "localhost",
    "n[0-2]": "n0 n1 n2",
    "n[3]": "n3",
    "node[08-11]": "node08 node09 node10 node11",
    "node[001,003,10-11]": "node001 node003 node10 node11",
    "node[99-101]": "node99 node100 node101",
    "rack[1-2]-node[01-02]": "rack1-node01 rack1-node02 rack2-node01 rack2-node02",
    "a[1],b[2-3]": "a1 b2 b3",
    "a,b[1,3]x,c": "a b1x b3x c",
    "gpu-[1-2].cluster.local": "gpu-1.cluster.local gpu-2.cluster.local",
    "n[1-2],n[1-2]": "n1 n2 n1 n2",
    "dgx-b200-[000-001]": "dgx-b200-000 dgx-b200-001",
    "x[1-2][3-4]": "x13 x14 x23 x24",
    "[1-2]n": "1n 2n",
}


def test_the_odd_forms_too_are_expanded_in_order_and_what_is_no_node_list_is_refused_and_shown() -> None:
    assert {text: " ".join(expand_nodelist(text)) for text in EXPANDED} == EXPANDED
    refused = (
        *("", ",", "n[", "n]", "n[1-", "n[1-2", "n[2-1]", "n[a-b]", "n[1,]", "n[]", "n[[1]]", "a,,b", "n[1]]"),
        "n[-1]",
    )
    for text in refused:
        with pytest.raises(EnvironmentMismatchError, match="cannot read the node list") as caught:
            expand_nodelist(text)
        assert repr(text) in caught.value.message


def test_task_counts_are_read_or_refused() -> None:
    counts = {"2(x3),1": [2, 2, 2, 1], "4": [4], "1,2(x2),1": [1, 2, 2, 1]}
    assert {text: expand_counts(text) for text in counts} == counts
    for text in ("", "x", "2(x", "2(xa)", "2,,1"):
        with pytest.raises(EnvironmentMismatchError, match="cannot read the task counts"):
            expand_counts(text)
