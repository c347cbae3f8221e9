"""The command line of a launcher, its environment, and what the ends of its processes mean, as pure functions."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from slurmtrain.config.launched_program import launched_program
from slurmtrain.runtime.addresses import HeldPort
from slurmtrain.runtime.jobs.launched_process import code_for_launcher
from slurmtrain.runtime.jobs.launchers import (
    PROCESS,
    Launch,
    ProcessEnd,
    accelerate_config_file,
    end_of_node,
    hostfile_text,
    launcher_words,
    needs_kind,
    process_words,
    task_variables,
)
from slurmtrain.runtime.jobs.program_start import DIED_OF_A_STOP, ProgramStart
from slurmtrain.slurm.environment import Environment

LAUNCH = Launch("torchrun", "/v/python", 1, ("n3", "n7"), 4, ("n3", 4242))


def words_of(launcher: str, command: str, **more: object) -> str:
    launch, program = replace(LAUNCH, launcher=launcher), launched_program(launcher, command)
    process = process_words(
        launch, program, python="/our/python", folder=Path("/f"), heard=["SIGTERM"], finished_code=9
    )
    words = launcher_words(launch, program, process, hostfile=Path("/f/hosts"), **more)  # type: ignore[arg-type]
    return " ".join(words).replace(f"/our/python -I -S {PROCESS} /f SIGTERM 75,9", "PROCESS")


def test_torchrun_gets_nodes_processes_rank_and_address_and_never_restarts() -> None:
    assert words_of("torchrun", "train.py --lr 1") == (
        "/v/python -u -m torch.distributed.run --nnodes=2 --nproc-per-node=4 --node-rank=1 --master-addr=n3 "
        "--master-port=4242 --max-restarts=0 --no-python PROCESS 0 /v/python -u train.py --lr 1"
    )
    assert "--tee 3 --no-python PROCESS 0 /v/python -u -m a.b" in words_of("torchrun", "torchrun --tee 3 -m a.b")
    assert words_of("torchrun", "./train --x").endswith("--no-python PROCESS 0 ./train --x")


def test_accelerate_needs_no_config_and_keeps_to_one_that_is_given() -> None:
    plain = words_of("accelerate", "train.py")
    assert plain == (
        "/v/python -u -m accelerate.commands.launch --num_machines=2 --num_processes=8 --machine_rank=1 "
        "--main_process_ip=n3 --main_process_port=4242 --rdzv_backend=static --max_restarts=0 "
        "--deepspeed_multinode_launcher=standard --multi_gpu --no_python PROCESS 0 /v/python -u train.py"
    )
    own = words_of(
        "accelerate", "accelerate launch --config_file c.yaml t.py", accelerate_config={"distributed_type": "FSDP"}
    )
    assert "--multi_gpu" not in own and "--config_file c.yaml --no_python" in own
    # A config of one process, made on somebody's laptop, would start one on each node.
    assert "--multi_gpu" in words_of("accelerate", "t.py", accelerate_config={"distributed_type": "NO"})
    assert "--cpu " not in words_of("accelerate", "accelerate launch --cpu t.py")


@pytest.mark.parametrize("option", ["--use_fsdp", "--use_deepspeed", "--multi_gpu"])
def test_a_kind_that_the_command_names_is_the_only_one(option: str) -> None:
    assert not needs_kind([option], None)


def test_deepspeed_connects_to_no_other_node_and_gives_scripts_their_local_rank() -> None:
    assert words_of("deepspeed", "python train.py --lr 1") == (
        "python -u -m deepspeed.launcher.runner --hostfile=/f/hosts --no_ssh --node_rank=1 --master_addr=n3 "
        "--master_port=4242 --no_local_rank --no_python PROCESS 3 python -u train.py --lr 1"
    ).replace("python -u -m deepspeed", "/v/python -u -m deepspeed").replace("3 python -u", "3 /v/python -u")
    assert "PROCESS 4 /v/python -u -m a.b" in words_of("deepspeed", "deepspeed -m a.b")
    assert "PROCESS 0 " in words_of("deepspeed", "deepspeed --no_local_rank train.py")
    assert hostfile_text(LAUNCH) == "n3 slots=4\nn7 slots=4\n"


def test_processes_of_a_launcher_do_not_see_the_ranks_of_the_task_that_starts_it() -> None:
    leaked = dict.fromkeys(
        ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NODELIST", "SLURM_STEPID"), "1"
    )
    leaked |= dict.fromkeys(("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS"), "1")
    leaked |= dict.fromkeys(("PMI_RANK", "PMI_SIZE", "PMIX_RANK", "RANK", "LOCAL_RANK", "GROUP_RANK"), "1")
    leaked |= dict.fromkeys(("OMPI_COMM_WORLD_RANK", "OMPI_UNIVERSE_SIZE", "OMPI_MCA_orte_ess_vpid"), "1")
    leaked |= dict.fromkeys(("MV2_COMM_WORLD_RANK", "OMPI_MCA_ess_base_vpid"), "1")
    kept = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[3,7]", "SLURM_JOB_NUM_NODES": "2", "SLURM_CPUS_ON_NODE": "8"}
    kept |= {"OMPI_MCA_btl_tcp_if_include": "ib0", "PMIX_MCA_gds": "hash", "MV2_USE_CUDA": "1"}  # people's settings
    kept |= {"SLURM_RESTART_COUNT": "1", "OMP_NUM_THREADS": "2", "HOME": "/h", "CUDA_VISIBLE_DEVICES": "4,5"}
    found = task_variables(LAUNCH, leaked | kept)
    assert found == kept | {
        "SLURMTRAIN_LAUNCHER": "torchrun",
        "SLURMTRAIN_NODES": "n3,n7",
        "SLURMTRAIN_VISIBLE_DEVICES": "4,5",
        "MASTER_ADDR": "n3",
        "MASTER_PORT": "4242",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "4",
        "NODE_RANK": "1",
    }
    # As DeepSpeed's launcher completes it: slurmtrain.init() then finds the program's rank.
    environment = Environment.detect(found | {"RANK": "6", "LOCAL_RANK": "2"})
    assert (environment.rank, environment.world_size, environment.local_rank, environment.node_rank) == (6, 8, 2, 1)
    assert environment.nodes == ("n3", "n7")  # as SLURM has them: a hang names and blames one of them


def test_the_config_of_accelerate_is_found_where_it_is_looked_for() -> None:
    assert accelerate_config_file(["--config_file", "a.yaml"], {}) == Path("a.yaml")
    assert accelerate_config_file(["--config_file=b.yaml"], {}) == Path("b.yaml")
    home = Path("accelerate/default_config.yaml")
    assert accelerate_config_file([], {"HOME": "/h"}) == "/h/.cache/huggingface" / home
    assert accelerate_config_file([], {"HOME": "/h", "HF_HOME": "/hf"}) == "/hf" / home
    assert accelerate_config_file([], {"HOME": "/h", "XDG_CACHE_HOME": "/c"}) == "/c/huggingface" / home


@pytest.mark.parametrize(
    ("launcher_code", "ends", "told", "rank", "code"),
    [
        (0, [], False, -1, 0),
        (1, [], False, -1, 1),  # the launcher itself has failed
        (1, [(2, 3, 5.0), (0, -15, 6.0), (1, -15, 6.0)], False, 2, 3),  # it ended the others after the first one failed
        (1, [(0, -15, 6.0), (2, 3, 5.0)], False, 2, 3),
        (0, [(0, 75, 5.0), (1, 75, 6.0)], True, 0, 75),
        (0, [(0, 75, 5.0), (1, -15, 4.0)], True, 0, 75),
        (0, [(1, -15, 4.0), (0, -15, 4.5)], True, 1, -15),
        (1, [(0, 1, 4.0), (1, 78, 5.0)], False, 1, 78),  # a wrong config is no crash
        (1, [(0, -9, 4.0), (1, 75, 3.0)], False, 0, -9),
    ],
)
def test_the_end_of_all_processes_of_a_node_is_that_of_the_one_that_counts(
    launcher_code: int, ends: list[tuple[int, int, float]], told: bool, rank: int, code: int
) -> None:
    end = end_of_node(launcher_code, [ProcessEnd(*each) for each in ends], DIED_OF_A_STOP, told=told)
    assert (end.rank, end.code) == (rank, code)


def test_a_crash_or_a_stop_of_one_process_outweighs_the_word_of_another_that_it_has_finished() -> None:
    finished, crashed, stopped = ProcessEnd(0, 9, 4.0), ProcessEnd(1, 1, 5.0), ProcessEnd(1, 75, 5.0)
    for ends, end in (([finished, crashed], crashed), ([finished, stopped], stopped), ([finished], finished)):
        assert end_of_node(0, ends, DIED_OF_A_STOP, told=False, finished_code=9) == end


def test_where_a_process_could_not_say_how_it_has_ended_the_launcher_says_it(tmp_path: Path) -> None:
    folder = tmp_path / "launched"
    folder.mkdir()
    (folder / "17.json").write_text("")  # the disk was full
    start = ProgramStart([], {}, lambda: None, folder, "train.py (torchrun)", HeldPort())
    assert start.end(3, told=False) == ProcessEnd(-1, 3, 0.0) and not folder.exists()


def test_a_program_does_not_ignore_a_closed_pipe_because_the_process_around_it_is_python(tmp_path: Path) -> None:
    words = [sys.executable, "-I", "-S", str(PROCESS), str(tmp_path), "SIGTERM", "75", "0"]
    done = subprocess.run([*words, "grep", "SigIgn", "/proc/self/status"], capture_output=True, text=True, timeout=60)
    assert not int(done.stdout.split()[1], 16) >> (signal.SIGPIPE - 1) & 1


@pytest.mark.parametrize(
    ("code", "told", "seen"),
    [(0, False, 0), (75, False, 0), (9, False, 0), (3, False, 3), (-9, False, 137), (-15, True, 0), (1, True, 0)],
)
def test_a_launcher_sees_crashes_only(code: int, told: bool, seen: int) -> None:
    assert code_for_launcher(code, told=told, quiet=[75, 9]) == seen


def launched(folder: Path, code: str, heard: str = "SIGTERM", at: int = 0) -> subprocess.Popen[str]:
    """Start a process as a launcher does, which this test is."""
    words = [sys.executable, "-I", "-S", str(PROCESS), str(folder), heard, "75,9", str(at), sys.executable, "-c", code]
    return subprocess.Popen(
        words, env={**os.environ, "RANK": "5", "LOCAL_RANK": "1"}, stdout=subprocess.PIPE, text=True
    )


def ends_of(folder: Path) -> list[tuple[int, int]]:
    return [(end["rank"], end["code"]) for end in map(json.loads, (path.read_text() for path in folder.glob("*.json")))]


@pytest.mark.parametrize(("code", "seen"), [(0, 0), (75, 0), (9, 0), (3, 3)])
def test_the_code_of_a_process_is_told_in_a_file_whatever_the_launcher_sees(
    tmp_path: Path, code: int, seen: int
) -> None:
    process = launched(tmp_path, f"raise SystemExit({code})")
    assert process.wait(60) == seen
    assert ends_of(tmp_path) == ([(5, code)] if code else [])


def test_a_code_that_cannot_be_told_in_a_file_is_left_to_the_launcher(tmp_path: Path) -> None:
    """As when /tmp is full: 0 would be taken for finished."""
    folder = tmp_path / "launched"
    folder.mkdir()
    process = launched(folder, f"import shutil; shutil.rmtree({str(folder)!r}); raise SystemExit(75)")
    assert process.wait(60) == 75


def test_a_process_that_cannot_start_is_a_crash(tmp_path: Path) -> None:
    words = [sys.executable, "-I", "-S", str(PROCESS), str(tmp_path), "SIGTERM", "75", "0", "/no/such/program"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 127 and "cannot start '/no/such/program': No such file or directory" in done.stderr


def test_a_script_for_deepspeed_gets_its_local_rank_behind_its_name(tmp_path: Path) -> None:
    process = launched(tmp_path, "import sys; print(sys.argv[1:])", at=3)
    assert process.communicate(timeout=60)[0] == "['--local_rank=1']\n"


def test_a_launcher_that_ends_a_process_ends_the_program(tmp_path: Path) -> None:
    process = launched(tmp_path, "import time; print('up', flush=True); time.sleep(600)")
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM and ends_of(tmp_path) == [(5, -signal.SIGTERM)]


SAVES = """
import pathlib, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: (time.sleep(0.3), sys.exit(1)))
print("up", flush=True)
while True: time.sleep(0.05)
"""


def test_a_program_that_is_told_to_stop_saves_as_long_as_it_likes_and_no_other_process_is_ended(tmp_path: Path) -> None:
    """SLURM signals all: what the program does not want to hear it ignores, and the process around it does not pass it on."""
    process = launched(tmp_path, SAVES, heard="SIGUSR1")
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for number, pids in (("TERM", [str(process.pid), *children]), ("USR2", children), ("USR1", children)):
        subprocess.run(["kill", f"-{number}", *pids], check=True)  # from a process that is not the launcher
    assert process.wait(60) == 0 and ends_of(tmp_path) == [(5, 1)]
