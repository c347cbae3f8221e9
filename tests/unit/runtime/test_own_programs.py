"""job=command on this machine: when a program counts as finished, what it leaves behind, how its ranks leave together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from slurmtrain.runs import attempts
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system import process

# Traps TERM, saves, and exits with 0, as many scripts do.
POLITE = """
trap 'echo saved >saved; exit 0' TERM
touch "$1"
while sleep 0.05; do :; done
"""


def start(project: Path, program: str, *more: str) -> subprocess.Popen[str]:
    """Submit with cluster=local, without waiting for its end."""
    words = ["+cluster=local", "job=command", f"job.command='{program}'", "job.snapshot=none", *more, "submit"]
    return subprocess.Popen(
        [sys.executable, "-m", "slurmtrain", *words],
        cwd=project,
        env=dict(os.environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(submitted: subprocess.Popen[str]) -> tuple[int, str]:
    """Its exit code and what it said."""
    said, _ = submitted.communicate(timeout=120)
    return submitted.returncode, said


def wait_for(condition: Callable[[], object], timeout_s: float = 90) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def the_run(project: Path) -> RunDir:
    (info,) = project.glob("runs/*/*/run.json")
    return RunDir(info.parent)


def stopped_when_ready(project: Path, program: str, *more: str) -> tuple[int, str]:
    """Start it, tell it to stop when the file `ready` is there, and wait."""
    running = start(project, program, *more)
    wait_for((project / "ready").exists)
    running.send_signal(signal.SIGTERM)
    return ended(running)


def test_a_program_that_saves_and_exits_0_when_told_to_stop_has_not_finished(project: Path) -> None:
    (project / "train.sh").write_text(POLITE)
    code, said = stopped_when_ready(project, "bash train.sh ready")
    assert code == 75, said
    (attempt,) = attempts.all_attempts(the_run(project))
    assert (attempt.said, attempt.verdict) == ("stopped", "end")  # this launcher was told to stop itself
    assert "exit code 0 after it was told to stop" in said and "job.finished_when" in said
    (project / "train.sh").write_text("echo all done")
    again = subprocess.run(
        [sys.executable, "-m", "slurmtrain", "resume", "last"], capture_output=True, text=True, timeout=120
    )
    assert again.returncode == 0 and "finished" in again.stdout, again.stdout + again.stderr


def test_a_program_that_leaves_at_once_or_becomes_another_one_has_finished_all_the_same(project: Path) -> None:
    """The word that a rank has finished is given by whoever has started the program, so it may end in any way."""
    (project / "exec.sh").write_text(f"exec {sys.executable} -c 'import os; os._exit(0)'")
    code, said = ended(start(project, "bash exec.sh", "requeue=off"))
    assert code == 0, said
    (attempt,) = attempts.all_attempts(the_run(project))
    assert (attempt.said, attempt.verdict) == ("finished", "done")


def test_a_child_that_still_saves_when_its_parent_has_died_of_the_signal_is_waited_for(project: Path) -> None:
    (project / "save.sh").write_text(
        "trap 'sleep 1.5; date +%s.%N >saved; exit 0' TERM; touch ready; while sleep 0.05; do :; done"
    )
    (project / "wrap.sh").write_text("bash save.sh >/dev/null 2>&1\n")
    code, said = stopped_when_ready(project, "bash wrap.sh")
    assert code == 75, said
    (attempt,) = attempts.all_attempts(the_run(project))
    assert (project / "saved").exists(), "the attempt ended without its child"
    assert attempt.ended is not None and attempt.ended > float((project / "saved").read_text())


def test_what_a_finished_program_leaves_running_is_ended_and_named(project: Path) -> None:
    (project / "leave.sh").write_text("setsid bash -c 'trap \"\" TERM; echo $$ >left; exec sleep 3000' & sleep 0.5")
    code, said = ended(start(project, "bash leave.sh", "cluster.srun_wait_s=1"))
    assert code == 0, said
    assert "left behind" in said and "sleep 3000" in said
    assert not process.lives(int((project / "left").read_text()))


def test_ranks_that_end_well_wait_for_those_that_still_save(project: Path) -> None:
    """Rank 0 says 75 at once; without a meeting that ended the others after srun_wait_s."""
    (project / "rank.py").write_text(
        "import os, pathlib, signal, sys, time\n"
        "rank = os.environ['RANK']\n"
        "pathlib.Path(f'up-{rank}').touch()\n"
        "while not pathlib.Path('up-1').exists(): time.sleep(0.02)\n"
        "if rank == '0': sys.exit(75)\n"
        "signal.signal(signal.SIGTERM, lambda *_: pathlib.Path('told').touch())\n"
        "end = time.time() + 3\n"
        "while time.time() < end: time.sleep(0.05)\n"
        "pathlib.Path('saved').touch(); sys.exit(75)\n"
    )
    words = ["cluster.tasks_per_node=2", "cluster.srun_wait_s=1", "requeue=off"]
    code, said = ended(start(project, f"{sys.executable} rank.py", *words))
    assert (code, (project / "saved").exists(), (project / "told").exists()) == (75, True, False), said


def test_a_rank_that_crashes_ends_those_that_wait_for_it_at_once(project: Path) -> None:
    (project / "rank.sh").write_text('[ "$RANK" = 0 ] && exit 0; sleep 1; exit 3')
    began = time.monotonic()
    words = ["cluster.tasks_per_node=2", "requeue=off"]
    code, said = ended(start(project, "bash rank.sh", *words))
    assert code == 1 and "rank 1: bash ended with exit code 3" in said
    assert time.monotonic() - began < 40  # not srun_wait_s=60


def test_finished_when_says_exactly_when_a_program_has_finished(project: Path) -> None:
    (project / "step.sh").write_text(
        'n=$(cat n 2>/dev/null || echo 0); echo $((n + 1)) >n; [ "$n" = 2 ] && touch "$SLURMTRAIN_RUN_DIR/done"; exit 0'
    )
    code, said = ended(start(project, "bash step.sh", "job.finished_when=done"))
    assert code == 0, said
    reasons = [attempt.reason for attempt in attempts.all_attempts(the_run(project))]
    assert reasons == ["asked", "asked", "finished"]
    assert "finished: done is there (job.finished_when)" in said
    assert "ended with exit code 0, but done is not there" in said


def test_a_program_may_say_by_an_exit_code_of_its_own_that_it_has_finished(project: Path) -> None:
    (project / "train.sh").write_text(POLITE.replace("exit 0", "exit 9"))
    code, said = stopped_when_ready(project, "bash train.sh ready", "job.finished_when=9")
    assert code == 0 and "finished: exit code 9 (job.finished_when)" in said, said
    record = json.loads((the_run(project).attempt(1).path / "attempt.json").read_text())
    assert record["verdict"] == "done"


DEAF = """
import pathlib, signal, time
signal.signal(signal.SIGUSR1, lambda *_: pathlib.Path("heard").touch())
pathlib.Path("ready").touch()
while True: time.sleep(0.05)
"""


def test_a_program_hears_the_signal_of_its_choice_alone_and_is_killed_when_it_takes_too_long(project: Path) -> None:
    (project / "deaf.py").write_text(DEAF)
    words = ["job.stop_signal=SIGUSR1", "job.stop_grace_s=1"]
    code, said = stopped_when_ready(project, f"{sys.executable} deaf.py", *words)
    assert code == 75 and (project / "heard").exists(), said  # SIGTERM, which came first, did not end it
    (event,) = [each for each in the_run(project).events() if each["event"] == "killed after the grace time"]
    assert event["seconds"] >= 1.0 and "is killed (job.stop_grace_s=1)" in said
    (attempt,) = attempts.all_attempts(the_run(project))
    assert (attempt.said, attempt.reason, attempt.program_code) == ("stopped", "asked", -signal.SIGKILL)
