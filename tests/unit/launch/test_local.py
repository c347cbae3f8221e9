"""The ranks of cluster=local: what they leave behind, and what is shown of what they print. How they end is in test_job.py."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from slurmtrain.system import process
from tests.support.commands import Cli


def test_ranks_on_this_machine_do_not_spin_while_they_wait_and_hear_nothing_that_another_launcher_has_said(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    words = ("+cluster=local", "job=command", "job.command=env", "job.snapshot=none", "submit")
    said = cli(*words, GOMP_SPINCOUNT="5", RANK="3", WORLD_SIZE="4", MASTER_ADDR="far", OMPI_COMM_WORLD_SIZE="4").stdout
    assert "OMP_WAIT_POLICY=passive\n" in said and "GOMP_SPINCOUNT=5\n" in said
    assert "\nRANK=0\n" in said and "\nWORLD_SIZE=1\n" in said
    assert "MASTER_ADDR=far" not in said and "OMPI_COMM" not in said


def rank(folder: Path, text: str) -> str:
    """A script in place of the interpreter of the ranks, as an override."""
    script = folder / "rank"
    script.write_text(text)
    script.chmod(0o700)
    return f"cluster.python={script}"


def test_what_a_killed_rank_leaves_behind_is_ended_with_the_attempt_and_holds_nothing_up(
    cli: Cli, project: Path
) -> None:
    """The program of a wrapper that the kernel has killed, and a process of a launcher, which has a group of its own."""
    python = rank(
        project,
        "#!/bin/bash -m\n"  # -m: each job has a process group of its own
        f"bash -c 'trap \"\" TERM; echo $$ >{project}/own; exec sleep 3000' &\n"
        "set +m\n"
        f"bash -c 'trap \"\" TERM; echo $$ >{project}/same; exec sleep 3000' &\n"
        f"until [ -s {project}/own ] && [ -s {project}/same ]; do sleep 0.01; done; kill -9 $$\n",
    )
    done = cli("+cluster=local", "requeue=off", python, "submit")
    assert done.returncode == 1 and f"crashed: {socket.gethostname()}: task 0: Killed" in done.stdout, done.stderr
    for name in ("own", "same"):
        assert not process.lives(int((project / name).read_text())), name


def test_a_rank_that_a_signal_has_ended_is_named_and_not_the_one_that_has_lost_it(cli: Cli, project: Path) -> None:
    lost = '{"rank": 0, "exit_code": 1, "sentence": "RuntimeError: Connection reset by peer", '
    lost += '"because_of_peer": true, "node": null, "time": 9e9}'
    last_words = "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc"
    python = rank(
        project,
        f"#!/bin/bash\nlost=$SLURMTRAIN_RUN_DIR/attempts/0001/failed-0.json\n"
        f'if [ $RANK = 1 ]; then until [ -s $lost ]; do sleep 0.05; done; echo "{last_words}"; kill -6 $$; fi\n'
        f"echo '{lost}' >$lost; sleep 60\n",
    )
    words = ("cluster.tasks_per_node=2", "cluster.srun_wait_s=1", "requeue=off", python)
    done = cli("+cluster=local", *words, "submit")
    said = f"crashed: {socket.gethostname()}: task 1: Aborted (std::bad_alloc)"
    assert said in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("says", "tries"),
    [("prog.py: error: unrecognized arguments: --lr", 2), ("no answer from port $RANDOM$SLURMTRAIN_ATTEMPT", 3)],
)
def test_a_program_that_fails_twice_in_the_same_way_within_seconds_is_not_started_a_third_time(
    cli: Cli, project: Path, says: str, tries: int
) -> None:
    (project / "p.sh").write_text(f'echo usage; echo "{says}" >&2; exit 2')
    words = ("job=command", "job.command='bash p.sh'", "job.snapshot=none", "requeue.restart_delay_s=0")
    assert cli("+cluster=local", *words, "submit").returncode == 1
    assert len(list(project.glob("runs/*/*/attempts/*/attempt.json"))) == tries
    said = cli("status", "last").stdout.splitlines()[1]
    assert said.startswith(f"  crashed: {says.partition('$')[0]}")
    assert ("not started a third time" in said) == (tries == 2)


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ('echo bad flag; echo "slurmstepd-n0: error: *** STEP 1.0 ON n0 CANCELLED ***"', "bad flag (rank 0: bash end"),
        ('echo "$failure" >$SLURMTRAIN_RUN_DIR/attempts/0001/failed-0.json; echo epoch 2', "rank 0: ValueError: no"),
    ],
)
def test_the_first_words_on_a_crash_are_the_programs_reason(cli: Cli, project: Path, program: str, said: str) -> None:
    failure = '{"rank": 0, "exit_code": 1, "sentence": "ValueError: no", "node": null, "time": 1}'
    (project / "p.sh").write_text(f"failure='{failure}'\n{program}\nexit 1")
    assert cli("+cluster=local", "job.snapshot=none", "requeue=off", "submit", "--", "bash", "p.sh").returncode == 1
    assert cli("status", "last").stdout.splitlines()[1].startswith(f"  crashed: {said}")


def test_a_run_goes_on_although_nobody_reads_what_its_ranks_print(project: Path) -> None:
    """As with `submit | head`. More than a pipe holds, so that rank 0 would wait for ever in its next print."""
    (project / "p.sh").write_text("yes 'step 1  loss 2.5' | head -n 20000; [ $SLURMTRAIN_ATTEMPT = 2 ] || exit 75")
    words = ("+cluster=local", "job=command", "job.command='bash p.sh'", "job.snapshot=none", "submit")
    command = [sys.executable, "-m", "slurmtrain", *words]
    with subprocess.Popen(command, cwd=project, stdout=subprocess.PIPE, text=True) as submit:
        assert submit.stdout is not None and any("step 1" in line for line in submit.stdout)
        submit.stdout.close()
    assert submit.returncode == 0
    logs = sorted(project.glob("runs/*/*/attempts/*/rank-0.log"))
    assert [log.read_text().count("step 1  loss 2.5\n") for log in logs] == [20_000, 20_000]
