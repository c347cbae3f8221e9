"""job.launcher before the queue: what is started on each node, and which words of a command are the program."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from slurmtrain.config.compose import compose
from slurmtrain.config.launched_program import NodeShape, launched_program, node_shape, program_of, repeated_launcher
from slurmtrain.config.schema import Config
from slurmtrain.config.validate import validate
from slurmtrain.errors import ConfigError
from slurmtrain.launch.script import JobPaths, render_script
from slurmtrain.launch.srun import explained_srun


def config_of(*words: str, command: str = "train.py", launcher: str = "torchrun") -> Config:
    return compose(["cluster=a100x4", "job=command", f"job.command='{command}'", f"job.launcher={launcher}", *words])


@pytest.mark.parametrize(
    ("words", "shape"),
    [
        # what the cluster's config says -> tasks of srun, CPUs of each, processes, CPUs of each of these
        (["cluster.gpus_per_node=4", "cluster.tasks_per_node=4", "cluster.cpus_per_task=8"], (1, 32, 4, 8)),
        (["cluster.gpus_per_node=8", "cluster.tasks_per_node=1", "cluster.cpus_per_task=64"], (1, 64, 8, 8)),
        (["cluster.gpus_per_node=8", "cluster.tasks_per_node=4", "cluster.cpus_per_task=8"], (1, 32, 4, 8)),
        (["cluster.gpus_per_node=0", "cluster.tasks_per_node=2", "cluster.cpus_per_task=3"], (1, 6, 2, 3)),
        (["cluster.gpus_per_node=0", "cluster.tasks_per_node=1", "cluster.cpus_per_task=3"], (1, 3, 1, 3)),
        (["cluster.gpus_per_node=8", "cluster.tasks_per_node=1", "cluster.cpus_per_task=2"], (1, 2, 8, 1)),
    ],
)
def test_processes_of_a_node_are_derived_from_the_cluster(words: list[str], shape: tuple[int, ...]) -> None:
    assert node_shape(config_of(*words)) == NodeShape(*shape)
    alone = node_shape(config_of(*words, launcher="none"))
    assert alone.tasks == alone.processes and alone.cpus_per_task == alone.threads


@pytest.mark.parametrize("nodes", ["2", "2-4"])
def test_a_launcher_is_one_task_of_each_node_with_all_of_its_cpus(nodes: str) -> None:
    sizes = ["cluster.nodes=" + nodes, "cluster.tasks_per_node=4", "cluster.cpus_per_task=8"]
    config, run = config_of(*sizes), Path("/runs/train/RUN")
    lines = render_script(config, JobPaths([run], "code", "python")).splitlines()
    assert "#SBATCH --cpus-per-task=32" in lines and ("#SBATCH --ntasks-per-node=1" in lines) == (nodes == "2")
    started = [word for each in explained_srun(config, run, run / "attempts/0001", run / "code") for word in each.words]
    assert "--cpus-per-task=32" in started


@pytest.mark.parametrize(
    ("command", "interpreter", "options", "words", "script_end"),
    [
        ("train.py --lr 1", None, (), ("train.py", "--lr", "1"), 1),
        ("python train.py --lr 1", "python", (), ("train.py", "--lr", "1"), 1),
        ("/v/bin/python3.11 -X dev -m a.b --c", "/v/bin/python3.11", (), ("-X", "dev", "-m", "a.b", "--c"), 4),
        ("python -c 'import x.py' a.py", "python", (), ("-c", "import x.py", "a.py"), 0),
        ("torchrun --tee 3 train.py --nnodes 2", None, ("--tee", "3"), ("train.py", "--nnodes", "2"), 1),
        ("python -m torch.distributed.run -m a.b -x", "python", (), ("-m", "a.b", "-x"), 2),
        ("torchrun --no-python ./run.sh 1", None, (), ("./run.sh", "1"), 0),
        ("bash run.sh", None, (), ("bash", "run.sh"), 0),
    ],
)
def test_a_command_is_taken_apart(
    command: str, interpreter: str | None, options: tuple[str, ...], words: tuple[str, ...], script_end: int
) -> None:
    found = launched_program(command)
    assert (found.interpreter, found.options, found.script_end) == (interpreter, options, script_end)
    assert found.words == words
    assert found.python == (found.words[0] not in ("bash", "./run.sh"))


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("torchrun --nproc_per_node=8 train.py", "--nproc_per_node is derived with job.launcher=torchrun"),
        ("torchrun --standalone train.py", "--standalone is derived"),
        ("torchrun ./train", "which word of"),
        ("python", "contains no program"),
        ("train.py --log $RANK.log", "$RANK cannot be replaced"),
        (r"train.py --log a\${LOCAL_RANK}", "${LOCAL_RANK} cannot be replaced"),
    ],
)
def test_a_command_that_does_not_suit_its_launcher_is_refused(command: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        validate(config_of(command=command))
    assert sentence in refused.value.message


def test_a_shell_reads_the_rank_by_itself_and_other_words_are_free() -> None:
    for command in ('bash -c "echo $RANK"', "train.py --node $NODE_RANK --ranks $RANKS"):
        config = config_of(command=command)
        validate(config)
        words = shlex.split(command)
        assert shlex.split(program_of(config))[-len(words) :] == words


def test_what_is_checked_before_the_queue_is_the_program_and_not_its_launcher() -> None:
    assert program_of(config_of(command="train.py -x")) == "python train.py -x"
    assert program_of(config_of(command="python -m a.b -x")) == "python -m a.b -x"
    assert program_of(config_of(command="torchrun --tee 3 train.py -x")) == "torchrun train.py -x"
    assert program_of(config_of(command="bash run.sh")) == "bash run.sh"


@pytest.mark.parametrize(
    ("words", "command", "several"),
    [
        (["cluster.tasks_per_node=4"], "torchrun --nproc-per-node 4 train.py", "each of the 4 ranks starts torchrun"),
        (["cluster.nodes=2"], "python -m torch.distributed.run --nproc-per-node 4 train.py", "each of the 2 ranks"),
        (["cluster.tasks_per_node=4"], "/v/bin/accelerate launch train.py", "ranks starts accelerate"),
        (["cluster.tasks_per_node=4"], "deepspeed train.py", "ranks starts deepspeed"),
        ([], "torchrun --nproc-per-node 4 train.py", None),
        (["cluster.nodes=2"], "torchrun --nnodes=2 --rdzv-endpoint=$MASTER_ADDR:29500 train.py", None),
        (["cluster.tasks_per_node=4", "job.launcher=torchrun"], "torchrun train.py", None),
        (["cluster.tasks_per_node=4"], "accelerate env", None),
    ],
)
def test_a_launcher_that_every_rank_would_start_is_named(words: list[str], command: str, several: str | None) -> None:
    one = ["cluster.nodes=1", "cluster.tasks_per_node=1", *words]
    sentence = repeated_launcher(config_of(*one, command=command, launcher="none"))
    assert sentence is None if several is None else several in (sentence or "")


def test_a_launcher_is_for_programs_only() -> None:
    with pytest.raises(ConfigError, match=r"job\.launcher=torchrun needs job=command"):
        validate(compose(["cluster=a100x4", "job.launcher=torchrun"]))
    with pytest.raises(ConfigError, match=r"job\.stop_signal=SIGUSR1 needs job=command"):
        validate(compose(["cluster=a100x4", "job.stop_signal=SIGUSR1"]))
