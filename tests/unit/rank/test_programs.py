"""job=command: how programs end, what they leave behind, how they are told to stop, and how they show that they get on."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from slurmtrain.cli import main
from slurmtrain.slurm.command_environment import belongs_to_a_job

# Traps TERM, saves, and exits with 0, as many scripts do.
POLITE = "trap 'exit 0' TERM; touch ready; while sleep 0.05; do :; done"
PROGRESS = f"{sys.executable} -m slurmtrain progress"
COUNT = "n=$(($(cat n 2>/dev/null) + 1)); echo $n >n\n"  # which attempt it is


@dataclass(frozen=True)
class Program:
    """A program, and how it is submitted.

    Attributes:
        text: of a bash script; or of a Python script, if it begins with an import.
        words: of the command line.
        told: it is told to stop when it has made the file `ready`.
        env: further variables of the command line.
    """

    text: str
    words: tuple[str, ...] = ()
    told: bool = False
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class End:
    """How its command line has ended."""

    folder: Path
    code: int
    said: str

    def status(self) -> dict[str, Any]:
        (run_json,) = self.folder.glob("runs/*/*/run.json")
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            assert main(["status", str(run_json.parent), "--json"]) == 0
        found: dict[str, Any] = json.loads(shown.getvalue())
        return found

    @property
    def endings(self) -> list[tuple[str, str]]:
        """Why each attempt has ended, and what came next."""
        return [(attempt["reason"], attempt["verdict"]) for attempt in self.status()["attempts"]]

    def events(self, name: str) -> list[dict[str, Any]]:
        (file,) = self.folder.glob("runs/*/*/events.jsonl")
        return [event for event in map(json.loads, file.read_text().splitlines()) if event["event"] == name]


TWO = "cluster.tasks_per_node=2"
OFF = "requeue=off"
ONCE = "requeue.max_attempts_without_progress=1"
TWICE = "requeue.max_attempts_without_progress=2"
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}

PROGRAMS = {
    "becomes another": Program(
        f"(yes; echo $? >pipe) | head -1 >/dev/null; exec {sys.executable} -c 'import os; os._exit(0)'", (OFF,)
    ),
    "saves and exits 0": Program(POLITE, told=True),
    "has a child that saves": Program(
        "cat >save.sh <<<\"trap 'sleep 1.5; date +%s.%N >saved; exit 0' TERM; touch ready; while sleep 0.05; do :; done\"\n"
        "bash save.sh >/dev/null 2>&1\n",
        told=True,
    ),
    "saves on rank 1": Program(
        "import os, pathlib, signal, sys, time\n"
        "pathlib.Path(f'up-{(rank := os.environ[\"RANK\"])}').touch()\n"
        "while not pathlib.Path('up-1').exists(): time.sleep(0.02)\n"
        "if rank == '0': sys.exit(75)\n"
        "signal.signal(signal.SIGTERM, lambda *_: pathlib.Path('told').touch())\n"
        "end = time.time() + 3\n"
        "while time.time() < end: time.sleep(0.05)\n"
        "pathlib.Path('saved').touch(); sys.exit(75)\n",
        (TWO, "cluster.srun_wait_s=1", OFF),
    ),
    # Rank 2 has finished and waits for the others, rank 0 fails for want of rank 1.
    "crashes on rank 1": Program(
        "case $RANK in 2) exit 0;; 1) until [ -e up ]; do sleep 0.05; done; touch gone; echo 9 of 9; kill -9 $$;; esac\n"
        "touch up; until [ -e gone ]; do sleep 0.05; done; sleep 0.3; exit 4",
        ("cluster.tasks_per_node=3", "cluster.srun_wait_s=600", OFF),
    ),
    "finishes by a file": Program(
        f'{COUNT}[ $n = 3 ] && touch "$SLURMTRAIN_RUN_DIR/done"; exit 0', ("job.finished_when=done",)
    ),
    "finishes by a code": Program(POLITE.replace("exit 0", "exit 9"), ("job.finished_when=9",), told=True),
    "hears another signal": Program(
        "import pathlib, signal, time\n"
        "signal.signal(signal.SIGUSR1, lambda *_: pathlib.Path('heard').touch())\n"
        "pathlib.Path('ready').touch()\n"
        "while True: time.sleep(0.05)\n",
        ("job.stop_signal=SIGUSR1", "job.stop_grace_s=1"),
        told=True,
    ),
    # Another rank reports, too, and a kill tears a line.
    "reports chunks": Program(
        f"{COUNT}{PROGRESS} $n --of 3\n[ $n = 3 ] && exit; RANK=1 {PROGRESS} 9; "
        "printf '{\"step\": 7' >>$SLURMTRAIN_RUN_DIR/metrics.jsonl; exit 75",
        (ONCE,),
    ),
    "reports no chunks": Program(
        "echo $WANDB_RUN_ID $WANDB_RESUME $MLFLOW_RUN_ID >>given; exit 75",
        ("observe.wandb.enabled=true", "observe.wandb.mode=offline", "observe.mlflow.enabled=true", TWICE),
    ),
    "is given a port": Program(
        "echo $MASTER_ADDR $MASTER_PORT >at-$RANK; echo $WANDB_MODE $WANDB_RUN_ID >wandb-$RANK",
        (TWO, "cluster.port_range=21000-31999", OFF, "observe.wandb.enabled=true", "observe.wandb.mode=offline"),
    ),
    "wants a GPU": Program("touch started", ("cluster.gpus_per_node=1",), env=NO_GPU),
    "has a loop of its own": Program(
        "import slurmtrain\nprint('device', slurmtrain.init().device.type)",
        ("cluster.gpus_per_node=1", "train.device=cpu"),
        env=NO_GPU,
    ),
    "wants a GPU and no GPU": Program("touch started", ("cluster.gpus_per_node=1", "train.device=cpu"), env=NO_GPU),
}


def end_of(program: Program, folder: Path) -> End:
    """Submit it with cluster=local, and wait for its end."""
    folder.mkdir()
    kind, python = ("py", sys.executable) if program.text.startswith("import") else ("sh", "bash")
    (folder / f"program.{kind}").write_text(program.text)
    ours = {name: value for name, value in os.environ.items() if not belongs_to_a_job(name)}
    words = ["+cluster=local", "job=command", f"job.command='{python} program.{kind}'", "job.snapshot=none"]
    submitted = subprocess.Popen(
        [sys.executable, "-m", "slurmtrain", *words, "requeue.restart_delay_s=0", *program.words, "submit"],
        cwd=folder,
        env={**ours, "XDG_STATE_HOME": str(folder / "state"), **program.env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        if program.told:
            while not (folder / "ready").exists() and submitted.poll() is None:
                time.sleep(0.02)
            submitted.send_signal(signal.SIGTERM)
        said, _ = submitted.communicate(timeout=180)
    finally:
        submitted.kill()
    return End(folder, submitted.returncode, said)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[End]]]:
    """All programs, some at a time."""
    root = tmp_path_factory.mktemp("programs")
    pool = ThreadPoolExecutor(3)
    yield {name: pool.submit(end_of, program, root / name.replace(" ", "-")) for name, program in PROGRAMS.items()}
    pool.shutdown(cancel_futures=True)  # a test that runs alone does not need them all


@dataclass(frozen=True)
class Ended:
    running: dict[str, Future[End]]

    def __call__(self, name: str, code: int) -> End:
        end = self.running[name].result()
        assert end.code == code, end.said
        return end


@pytest.fixture
def ended(running: dict[str, Future[End]]) -> Ended:
    return Ended(running)


def test_a_program_that_leaves_at_once_or_becomes_another_one_has_finished_all_the_same(ended: Ended) -> None:
    """The word that a rank has finished is given by whoever has started the program, so it may end in any way."""
    end = ended("becomes another", 0)
    assert end.endings == [("finished", "done")]
    # A closed pipe ends its processes, although Python, which has started it, ignores that.
    assert int((end.folder / "pipe").read_text()) == 128 + signal.SIGPIPE


def test_a_program_that_saves_and_exits_0_when_told_to_stop_has_not_finished(ended: Ended) -> None:
    end = ended("saves and exits 0", 75)
    assert end.endings == [("asked", "end")]  # this launcher was told to stop itself
    assert "exit code 0 after it was told to stop" in end.said and "job.finished_when" in end.said
    (end.folder / "program.sh").write_text("echo all done")
    words = [sys.executable, "-m", "slurmtrain", "resume", "last"]
    again = subprocess.run(words, cwd=end.folder, capture_output=True, text=True, timeout=120, check=False)
    assert again.returncode == 0 and "finished" in again.stdout, again.stdout + again.stderr


def test_a_child_that_still_saves_when_its_parent_has_died_of_the_signal_is_waited_for(ended: Ended) -> None:
    end = ended("has a child that saves", 75)
    (attempt,) = end.status()["attempts"]
    assert attempt["ended"] > float((end.folder / "saved").read_text())


def test_ranks_that_end_well_wait_for_those_that_still_save(ended: Ended) -> None:
    """Rank 0 says 75 at once; without a meeting that ended the others after srun_wait_s."""
    end = ended("saves on rank 1", 75)
    assert (end.folder / "saved").exists() and not (end.folder / "told").exists()


def test_a_rank_that_crashes_ends_those_that_wait_for_it_at_once_and_is_named_before_those_that_have_lost_it(
    ended: Ended,
) -> None:
    end = ended("crashes on rank 1", 1)
    (attempt,) = end.status()["attempts"]
    assert attempt["sentence"].startswith("crashed: rank 1: bash ended with signal 9 (SIGKILL) (last line: 9 of 9)")
    assert attempt["ended"] - attempt["started"] < 100  # not srun_wait_s=600


def test_finished_when_says_exactly_when_a_program_has_finished(ended: Ended) -> None:
    end = ended("finishes by a file", 0)
    assert end.endings == [("asked", "requeue"), ("asked", "requeue"), ("finished", "done")]
    assert "finished: done is there (job.finished_when)" in end.said
    assert "ended with exit code 0, but done is not there" in end.said


def test_a_program_may_say_by_an_exit_code_of_its_own_that_it_has_finished(ended: Ended) -> None:
    end = ended("finishes by a code", 0)
    assert end.endings == [("finished", "done")]
    assert "finished: exit code 9 (job.finished_when)" in end.said


def test_a_program_hears_the_signal_of_its_choice_alone_and_is_killed_when_it_takes_too_long(ended: Ended) -> None:
    end = ended("hears another signal", 75)
    assert end.endings == [("asked", "end")]
    assert (end.folder / "heard").exists()  # SIGTERM, which came first, did not end it
    (event,) = end.events("killed after the grace time")
    assert event["seconds"] >= 1.0 and "is killed (job.stop_grace_s=1)" in end.said


def test_a_program_that_exits_75_after_each_reported_chunk_comes_to_its_end(ended: Ended) -> None:
    status = ended("reports chunks", 0).status()
    assert (status["state"], status["step"], status["steps"], len(status["attempts"])) == ("finished", 3, 3, 3)


def test_a_program_is_given_one_port_of_the_range_for_all_its_ranks(ended: Ended) -> None:
    end = ended("is given a port", 0)
    (given,) = {(end.folder / f"at-{rank}").read_text().strip() for rank in range(2)}
    host, port = given.split()
    assert host == "127.0.0.1" and 21000 <= int(port) <= 31999


def test_rank_0_alone_goes_on_in_the_run_of_wandb_and_no_rank_is_asked_for_a_key(ended: Ended) -> None:
    end = ended("is given a port", 0)
    found = [(end.folder / f"wandb-{rank}").read_text().split() for rank in range(2)]
    assert found == [["offline", end.status()["id"]], ["offline"]]


def test_a_program_that_knows_nothing_of_loggers_goes_on_in_the_same_run_of_each(ended: Ended) -> None:
    pytest.importorskip("mlflow")
    end = ended("reports no chunks", 75)
    first, second = (end.folder / "given").read_text().splitlines()
    assert first == second
    wandb, resume, mlflow = first.split()
    assert (wandb, resume, len(mlflow)) == (end.status()["id"], "allow", 32)


def test_a_program_that_asks_for_gpus_where_none_can_be_is_not_started(ended: Ended) -> None:
    end = ended("wants a GPU", 78)
    assert "cluster.gpus_per_node=1, but rank 0 on " in end.said and "CUDA_VISIBLE_DEVICES=''" in end.said
    assert end.status()["sentence"].startswith("rank 0: cluster.gpus_per_node=1, but rank 0 on ")  # and not the hint
    assert not (end.folder / "started").exists()
    assert (ended("wants a GPU and no GPU", 0).folder / "started").exists()
    assert "device cpu" in ended("has a loop of its own", 0).said
