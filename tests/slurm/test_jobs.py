"""Jobs of every shape on a real SLURM: arrays, own programs, by hand, side by side, edited meanwhile, wrongly started."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import sys
import time
import venv
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import pytest

import slurmtrain
from slurmtrain.checkpoint.format.directory import committed, step_of
from slurmtrain.runs import attempts
from slurmtrain.runs.lookup import all_runs
from slurmtrain.slurm.node_ledger import NodeRecord, ledger_file, read_ledger
from slurmtrain.slurm.nodelist import expand_nodelist
from slurmtrain.system.records import typed
from tests.slurm.project import Project, Run, counting, events, make_project
from tests.support.slurm_cluster import Cluster

ONE = ["cluster.nodes=1", "cluster.tasks_per_node=1"]
# So that steps beside the ranks start in a job with GPUs, too. No program can compute on those of a sandbox.
WITH_GPUS = ["cluster.gpus_per_node=2", "train.device=cpu"]
PYTHON = sys.executable


@pytest.fixture
def project(sandbox: Cluster, tmp_path: Path) -> Project:
    return make_project(tmp_path / "50%j", sandbox)  # SLURM's own names of files have % in them


def test_between_two_attempts_in_the_same_job_a_run_can_be_ended_and_preempted(project: Project) -> None:
    words = [
        "job=command",
        "job.command='bash -c \"exit 3\"'",
        "requeue.max_attempts_without_progress=9",
        "requeue.blame_threshold=0",
        *ONE,
    ]

    def submit(node: str) -> Run:
        return project.submit(*words, small=False, nodes=node)

    def waits(run: Run) -> bool:
        """Whether no rank is left, and none starts for 20 s or more."""
        tries = run.attempts()
        return len(tries) > 2 and tries[-1].verdict == "in-place"

    scancelled, preempted = submit("n0"), submit("n1")
    scancelled.wait_until(lambda: waits(scancelled), "between two attempts")
    scancelled.cluster.run(["scancel", scancelled.job_id])
    preempted.wait_until(lambda: waits(preempted), "between two attempts")
    number = len(preempted.attempts())
    preempted.cluster.submit_high(nodes=["n1"], seconds=0.1)
    last = scancelled.wait_for_end()
    assert (last.reason, last.verdict) == ("crash", "end"), scancelled.logs()
    assert "then cancelled by scancel" in (last.sentence or "") and "resume" in scancelled.status()
    preempted.wait_until(lambda: int(project.cluster.job(preempted.job_id)["Restarts"]) == 1, "requeued")
    last = preempted.attempts()[number - 1]
    assert (last.verdict, last.restart_count) == ("requeue", 0)
    assert (last.sentence or "").endswith("; then preempted; it is requeued")
    preempted.cli("cancel", preempted.run_dir.id)


def test_team_mates_save_and_end_a_run_with_files_and_status_tells_how_far_it_is(project: Project) -> None:
    run = project.submit("train.steps=400", "+model.pause_s=0.1", "checkpoint.every_steps=0", *ONE, nodes="n0")
    waits = project.submit("+cluster.sbatch.begin=now+2hours", *ONE)
    run.wait_for_step(3)
    runs, waiting = json.loads(run.cli("status", "--json"))
    assert (runs["state"], runs["steps"], waiting["steps"]) == ("running", 400, 20)
    record = next(each for each in run.losses() if each["step"] == runs["step"])
    assert runs["loss"] == record["loss"] and runs["eta_s"] == (400 - runs["step"]) * runs["step_time_s"] > 30
    assert runs["tokens_per_s"] > 0 and abs(time.time() - runs["logged"]) < 30
    assert (waiting["reason"], waiting["loss"]) == ("BeginTime", None)
    assert 7000 < waiting["expected_start"] - time.time() <= 7200
    (row,) = [line for line in run.cli("status").splitlines() if waits.run_dir.id in line]
    assert "its begin time has not been reached (BeginTime)" in row
    assert "expects to start it in about " in run.cli("status", waits.run_dir.id)
    waits.cli("cancel", waits.run_dir.id)
    (run.run_dir.path / "save").touch()
    run.wait_until(lambda: len(committed(run.run_dir.checkpoints)) == 1, "saved")
    assert run.attempts()[-1].ended is None
    (run.run_dir.path / "stop").touch()
    last = run.wait_for_end()
    assert (last.reason, last.verdict) == ("cancelled", "end")
    assert "stopped by the file `stop`" in (last.sentence or "") and len(run.attempts()) == 1
    assert step_of(committed(run.run_dir.checkpoints)[-1]) == last.last_step
    assert "stopped" in run.status()


# It knows nothing of us, keeps its own count in a file, and dies of the signal, as programs do.
COUNTS = """
import os, pathlib, socket, sys, time
from length import TOTAL

rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
socket.create_server(("", int(os.environ["MASTER_PORT"]))) if rank == "0" else None
state = pathlib.Path(os.environ["SLURMTRAIN_RUN_DIR"]) / f"count-{rank}"
count = int(state.read_text()) if state.exists() else 0
while count < TOTAL:
    while count == 20 and os.environ["SLURMTRAIN_ATTEMPT"] == "1":
        time.sleep(0.1)  # until it is preempted
    count += 1; new = state.with_suffix(".new"); new.write_text(str(count)); new.replace(state)
print("counted to", count, "as", rank, "of", world, sys.argv[1:])
"""
# It dies of the signal; its child traps it, saves, on rank 1 for seconds longer, and exits with 0.
WRAPPED = r"""
cd "$SLURMTRAIN_RUN_DIR"; [ -e "saved-$RANK" ] && { touch "again-$RANK"; exit 0; }
trap 'sleep $((RANK * 3 + 1)); date +%s.%N >new-$RANK; mv new-$RANK saved-$RANK; exit 0' TERM
touch "up-$RANK"; while :; do sleep 0.05; done  # the signal may reach its sleep first
"""
# It is told to stop, and does so when it may.
STOPS_LATER = (
    "trap 'touch {folder}/told' TERM; touch {folder}/ready; until [ -e {folder}/go ]; do sleep 0.1; done; exit 75\n"
)


class Preempted(NamedTuple):
    """Runs that were preempted at the same moment, each on nodes of its own but for two that share theirs.

    Attributes:
        hooks: what the hooks of the first one have written.
        cancelled: by scancel, in the grace time of the preemption.
    """

    sharing: tuple[Run, Run]
    hooks: Path
    wrapped: Run
    cancelled: Run


@pytest.fixture(scope="module")
def preempted(sandbox: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Preempted:
    folder = tmp_path_factory.mktemp("preempted")
    project = make_project(folder / "project", sandbox)
    (project.path / "length.py").write_text("TOTAL = 40\n")
    (project.path / "count.py").write_text(COUNTS)
    (project.path / "wrap.sh").write_text("bash train.sh >/dev/null 2>&1\n")
    (project.path / "train.sh").write_text(WRAPPED)
    (folder / "later").write_text(STOPS_LATER.format(folder=folder))
    told = folder / "hooks"
    hook = f"echo $SLURMTRAIN_EVENT $SLURMTRAIN_ATTEMPT $SLURMTRAIN_NEXT $SLURMTRAIN_SENTENCE >>{told}"
    hooks = [f"hooks.on_preemption='{hook}'", f"hooks.on_finish='{hook}; sleep 60'", f"hooks.on_failure='{hook}'"]
    counts = ["job=command", f"job.command='{PYTHON} count.py --greeting \"two words\"'", "cluster.tasks_per_node=1"]
    first = project.submit(*counts, *hooks, "hooks.timeout_s=4", small=False, nodes="n0,n1")
    second = project.submit(*counts, small=False, nodes="n0,n1")
    two = ["cluster.nodes=1", "cluster.tasks_per_node=2", "cluster.srun_wait_s=1"]
    wrapped = project.submit("job=command", "job.command='bash wrap.sh'", *two, small=False, nodes="n2")
    cancelled = project.submit("job=command", f"job.command='bash {folder}/later'", *ONE, small=False, nodes="n3")
    for name in ("length.py", "count.py", "train.sh"):
        (project.path / name).write_text("edited, not to be run\n")
    for run in (first, second):
        run.wait_until((run.run_dir.path / "count-1").exists, "counting")
    wrapped.wait_until(lambda: all((wrapped.run_dir.path / f"up-{rank}").exists() for rank in "01"), "up")
    cancelled.wait_until((folder / "ready").exists, "running")
    for nodes in (["n0", "n1"], ["n2"], ["n3"]):
        sandbox.submit_high(nodes=nodes, seconds=0.1)
    cancelled.wait_until((folder / "told").exists, "told to stop")
    # The end that SLURM has announced stands there: by it the cancel, which brings an earlier one, is told from the preemption.
    stop = cancelled.run_dir.attempt(1).path / "stop.json"
    cancelled.wait_until(lambda: stop.exists() and json.loads(stop.read_text())["facts"], "SLURM's answer is recorded")
    sandbox.run(["scancel", cancelled.job_id])
    (folder / "go").touch()
    return Preempted((first, second), told, wrapped, cancelled)


def test_any_program_gets_ranks_requeue_and_status_and_shares_its_nodes(preempted: Preempted) -> None:
    for run in preempted.sharing:
        run.finish()
        assert [attempt.reason for attempt in run.attempts()] == ["preempted", "finished"]
        logs = [(run.run_dir.attempt(2).path / f"rank-{rank}.log").read_text() for rank in range(2)]
        assert [log.strip().splitlines()[-1] for log in logs] == [
            f"counted to 40 as {rank} of 2 ['--greeting', 'two words']" for rank in range(2)
        ]
        assert run.cluster.job(run.job_id)["ExitCode"] == "0:0"
    first, second = (run.attempts()[0] for run in preempted.sharing)
    assert first.nodes == second.nodes == ["n0", "n1"] and first.ended is not None and second.ended is not None
    assert max(first.started, second.started) < min(first.ended, second.ended), "they did not run side by side"


def test_editing_the_work_tree_changes_nothing_for_a_submitted_run(preempted: Preempted) -> None:
    (run, _) = preempted.sharing
    assert "edited" in (run.project / "count.py").read_text()
    run.finish()  # the second attempt has imported everything again


def test_hooks_are_told_of_the_preemption_and_of_the_end_and_are_ended_in_time(preempted: Preempted) -> None:
    (run, _) = preempted.sharing
    run.finish()
    assert preempted.hooks.read_text() == "preemption 1 requeue preempted; it is requeued\nfinish 2 done finished\n"
    assert [event["outcome"] for event in events(run, "hook ended")][1:] == ["was killed after hooks.timeout_s=4"]


def test_a_program_whose_child_still_saves_when_preempted_is_waited_for_and_started_again(
    preempted: Preempted,
) -> None:
    run = preempted.wrapped
    run.finish()
    first, second = run.attempts()
    assert (first.reason, first.said, second.reason) == ("preempted", "stopped", "finished")
    saved = [float((run.run_dir.path / f"saved-{rank}").read_text()) for rank in "01"]
    assert first.ended is not None and max(saved) < first.ended < second.started
    assert all((run.run_dir.path / f"again-{rank}").exists() for rank in "01")


def test_a_bare_scancel_in_the_grace_time_of_a_preemption_is_not_undone(preempted: Preempted) -> None:
    run = preempted.cancelled
    run.cluster.wait_for(run.job_id, "CANCELLED")
    (only,) = run.attempts()
    assert (only.reason, only.verdict) == ("cancelled", "end"), run.logs()
    assert int(run.cluster.job(run.job_id)["Restarts"]) == 0


@pytest.fixture(scope="module")
def brief(sandbox: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Runs of one attempt, but for one that crashes again, at the same time."""
    project = make_project(tmp_path_factory.mktemp("brief") / "project", sandbox)
    (project.path / "seal.py").write_text("raise ValueError('the seventh seal')\n")
    (project.path / "bin").mkdir()
    (project.path / "bin" / "srun").symlink_to("/bin/true")
    command = ["job=command", "requeue.max_attempts_without_progress=1", *ONE]
    hooks = [f"hooks.on_{event}='echo $SLURMTRAIN_EVENT $SLURMTRAIN_EXIT_CODE'" for event in ("failure", "finish")]
    words = {
        "crash": [*command, "job.command='bash -c \"exit 3\"'", *hooks],
        "crash loop": [
            *command,
            f"job.command='{PYTHON} seal.py'",
            "requeue.max_attempts_without_progress=2",
            "requeue.blame_threshold=0",
        ],
        # srun has been seen to leave with 0 where it had lost its ranks; this one never starts any.
        "lost": [*command, "job.command=true", f"cluster.setup=['PATH={project.path}/bin:$PATH']"],
        "set-up fails": [*command, "job.command=true", "cluster.setup=['export FINE=1','ls /no/such/folder']"],
        "variables": [
            *command,
            "job.command='bash -c \"echo $FROM_SETUP $FROM_ENV\"'",
            "cluster.setup=['export FROM_SETUP=one']",
            "+cluster.env.FROM_ENV='two  $(words)'",
        ],
    }
    return {name: project.submit(*overrides, small=False) for name, overrides in words.items()}


def test_a_program_that_fails_is_a_crash_with_its_exit_code(brief: dict[str, Run]) -> None:
    run = brief["crash"]
    last = run.wait_for_end()
    assert (last.reason, last.verdict) == ("crash", "end")
    assert "exit code 3" in run.status()
    assert run.cluster.job(run.job_id)["ExitCode"] == "3:0"
    assert (run.run_dir.attempt(1).path / "hook.log").read_text() == "failure 3\n"


def test_a_crash_loop_ends_and_says_why(brief: dict[str, Run]) -> None:
    run = brief["crash loop"]
    run.wait_for_end()
    assert [attempt.reason for attempt in run.attempts()] == ["crash", "crash"]
    run.cluster.wait_for(run.job_id, "FAILED")
    assert "crashed: ValueError: the seventh seal" in run.status() and "not started a third time" in run.status()


def test_a_job_whose_ranks_were_lost_without_a_word_has_not_finished(brief: dict[str, Run]) -> None:
    run = brief["lost"]
    last = run.wait_for_end()
    assert (last.reason, last.verdict) == ("crash", "end") and "ended without a word" in (last.sentence or ""), (
        run.logs()
    )
    assert "finished" not in run.status().partition("\n")[0]
    run.cluster.wait_for(run.job_id, "FAILED")  # so none starts that waits for its success


def test_a_set_up_line_that_fails_stops_the_job_and_says_which(brief: dict[str, Run]) -> None:
    run = brief["set-up fails"]
    run.cluster.wait_for(run.job_id, "FAILED")
    assert "ls /no/such/folder" in run.status()
    assert run.cluster.job(run.job_id)["ExitCode"] == "78:0"


def test_setup_lines_and_variables_reach_the_ranks(brief: dict[str, Run]) -> None:
    run = brief["variables"]
    run.finish()
    assert (run.run_dir.attempt(1).path / "rank-0.log").read_text() == "one two $(words)\n"


def test_an_own_loop_resumes_where_it_stopped(project: Project) -> None:
    """That it ends with the bits of one that nobody stops is shown in tests/distributed/test_own_scripts.py."""
    (project.path / "own_loop.py").write_text((Path(__file__).parents[2] / "jobs" / "own_loop.py").read_text())
    command = f"job.command='{PYTHON} own_loop.py --steps 40 --pause 0.1'"
    run = project.submit("job=command", command, "cluster.tasks_per_node=1", small=False, nodes="n0,n1")
    run.wait_for_attempt(1)
    run.cli("preempt", run.run_dir.id)
    run.finish()
    first, second = run.attempts()
    assert [len(set(attempt.nodes)) for attempt in (first, second)] == [2, 2]
    assert first.committed_step == second.first_step and 0 < (second.first_step or 0) < 40
    assert step_of(committed(run.run_dir.checkpoints)[-1]) == 40


def two_lives(folder: Path) -> str:
    """A program that stops at once in its first attempt, and finishes in any other."""
    (folder / "program").write_text(
        '[ "$SLURMTRAIN_ATTEMPT" -gt 1 ] && exit 0; touch "$SLURMTRAIN_RUN_DIR/bad-$SLURMD_NODENAME"; exit 75\n'
    )
    return f"job.command='bash {folder}/program'"


# A scontrol before the real one, of which `requeue` fails as many times as a file says; before the real one it does more.
FAILING_REQUEUE = """#!/bin/bash
n=$(cat {folder}/left)
if [ "$1" = requeue ] && [ "$n" -gt 0 ]; then
  echo $((n - 1)) >{folder}/left
  echo "slurm_requeue error: Unable to contact slurm controller (connect failure)" >&2
  exit 1
fi
[ "$1" != requeue ] || {first}
exec {scontrol} "$@"
"""


@pytest.fixture(scope="module")
def requeued(sandbox: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Run, Path]]:
    """Runs that stop and want to be requeued, at the same time, by what happens just before; each with a folder of its own."""
    folder = tmp_path_factory.mktemp("requeued")
    project = make_project(folder / "project", sandbox)
    cases = {  # times that a requeue fails, and what is done before it
        "always fails": (99, ":"),
        "scancel": (0, 'scancel "${!#}"'),
    }
    runs = {}
    for name, (times, first) in cases.items():
        own = folder / name.replace(" ", "-")
        own.mkdir()
        (own / "left").write_text(str(times))
        (own / "scontrol").write_text(
            FAILING_REQUEUE.format(folder=own, first=first, scontrol=shutil.which("scontrol"))
        )
        (own / "scontrol").chmod(0o755)
        path = f"{own}:{os.environ['PATH']}"
        runs[name] = project.submit("job=command", two_lives(own), *ONE, small=False, PATH=path), own
    return runs


def test_a_requeue_that_fails_loses_no_run(requeued: dict[str, tuple[Run, Path]]) -> None:
    run, folder = requeued["always fails"]
    last = run.wait_for_end()
    assert (last.number, last.reason) == (2, "finished"), run.logs()
    assert len(run.run_dir.info()["job_ids"]) == 2 and int((folder / "left").read_text()) < 99
    assert int(run.cluster.job(run.job_id)["Restarts"]) == 0


def test_a_run_that_is_cancelled_just_before_its_requeue_stays_cancelled(
    requeued: dict[str, tuple[Run, Path]],
) -> None:
    """`scontrol requeue` can bring a cancelled job back: here somebody comes between the last look and the requeue."""
    run, _ = requeued["scancel"]
    run.wait_until(lambda: bool(run.attempts()) and run.attempts()[-1].verdict == "end", "cancelled")
    run.cluster.wait_for(run.job_id, "CANCELLED")
    (only,) = run.attempts()
    assert "cancelled by scancel" in (only.sentence or ""), run.logs()
    assert int(run.cluster.job(run.job_id)["Restarts"]) == 0


@pytest.mark.slow
def test_a_run_leaves_out_a_node_on_which_its_set_up_fails_once_it_has_worked_elsewhere(
    project: Project, tmp_path: Path
) -> None:
    run = project.submit(
        "job=command",
        two_lives(tmp_path),
        "cluster.setup=['test ! -e $SLURMTRAIN_RUN_DIR/bad-$SLURMD_NODENAME']",
        *ONE,
        small=False,
    )
    last = run.wait_for_end()
    assert last.number == 3, run.logs()
    first, bad = run.attempts()[0], run.attempts()[1]
    assert (bad.reason, bad.verdict, bad.bad_nodes) == ("bad node", "requeue", first.nodes), run.logs()
    assert last.reason == "finished" and last.nodes != first.nodes
    assert run.cluster.job(run.job_id)["ExcNodeList"] == first.nodes[0]


def test_a_node_that_crashes_every_attempt_in_its_first_second_is_left_out_until_that_is_forgotten(
    project: Project, tmp_path: Path
) -> None:
    """The first node that the run gets is the bad one."""
    (tmp_path / "program").write_text(
        'cd "$SLURMTRAIN_RUN_DIR"; [ -e bad ] || echo "$SLURMD_NODENAME" >bad\n'
        '[ "$SLURMD_NODENAME" = "$(cat bad)" ] && [ "$SLURMTRAIN_ATTEMPT" -lt 4 ] && exit 3\n'
        f'[ "$SLURMTRAIN_ATTEMPT" -gt 3 ] && exit 0; until [ -e {tmp_path}/go ]; do sleep 0.1; done; exit 75\n'
    )
    words = [f"job.command='bash {tmp_path}/program'", *ONE]
    run = project.submit("job=command", *words, "requeue.max_attempts_without_progress=2", small=False)
    run.wait_until(lambda: len(run.attempts()) == 3 and bool(run.attempts()[2].nodes), "started elsewhere")
    (bad,) = run.attempts()[0].nodes
    # Two attempts are all that the run has without progress, and a blamed node has not eaten them.
    assert [(each.reason, each.nodes == [bad]) for each in run.attempts()[:2]] == [("crash", True)] * 2, run.logs()
    assert bad not in run.attempts()[2].nodes and run.cluster.job(run.job_id)["ExcNodeList"] == bad
    assert re.search(rf"left out: {bad} \(crashed 2 attempts in \d+ s, forgotten in 1 d\)", run.status()), run.status()
    listed = json.loads(run.cli("nodes", "list", "--json"))
    assert [(each["node"], len(each["records"])) for each in listed] == [(bad, 2)]

    # A day later.
    ledger = ledger_file("sandbox")
    ledger.write_text("".join(json.dumps(asdict(each)) + "\n" for each in aged(read_ledger(ledger))))
    for attempt in run.attempts()[:2]:
        attempt.fault = asdict(aged([typed(NodeRecord, attempt.fault, ledger)])[0])
        attempts.write_attempt(run.run_dir, attempt)
    (tmp_path / "go").touch()
    assert run.wait_for_end().number == 4, run.logs()
    assert run.attempts()[3].reason == "finished" and run.cluster.job(run.job_id)["ExcNodeList"] == "(null)"


def aged(found: Sequence[NodeRecord]) -> list[NodeRecord]:
    return [replace(each, time=each.time - 25 * 3600) for each in found]


def ignores_usr2(last_words: Sequence[str]) -> bool:
    """Whether a Python whose command line ends so runs on this machine and ignores USR2."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_text().split("\0")[:-1]
            if words[-len(last_words) :] == list(last_words) and words[0] == PYTHON:
                (ignored,) = re.findall(r"^SigIgn:\s*(\w+)", (folder / "status").read_text(), re.MULTILINE)
                return bool(int(ignored, 16) & 1 << signal.SIGUSR2 - 1)
    return False


@pytest.mark.slow
def test_a_job_with_spare_nodes_whose_first_node_dies_is_requeued_by_another_one(
    project: Project, tmp_path: Path
) -> None:
    """The step that looks after the node of the batch script outlives a TERM to all steps, at which it looks at once."""
    (tmp_path / "program").write_text(f"trap '' TERM; until [ -e {tmp_path}/go ]; do sleep 0.1; done\n")
    program = f"job.command='bash {tmp_path}/program'"
    words = ["cluster.nodes=1", "cluster.tasks_per_node=1", "cluster.spare_nodes=1"]
    run = project.submit("job=command", program, *words, *WITH_GPUS, small=False)
    run.wait_until(lambda: bool(run.attempts()) and bool(run.attempts()[0].nodes), "running")
    cluster, first = run.cluster, run.cluster.job(run.job_id)["BatchHost"]

    def steps() -> list[str]:
        found = cluster.run(["squeue", "--noheader", "--steps", f"--jobs={run.job_id}", "--format=%i"]).stdout
        return [step for step in found.split() if step.rpartition(".")[2].isdigit()]

    # A watch that has just begun would die of the TERM. It blocks that, which the system doesn't show of a process that waits
    # for the signal, and then ignores USR2.
    run.wait_until(lambda: len(steps()) == 2 and ignores_usr2(["--watch", first, "--job", run.job_id]), "watched")
    (watch,) = [step for step in steps() if step != run.attempts()[0].step_id]
    cluster.kill_node(first)
    try:
        run.wait_until(lambda: first not in expand_nodelist(cluster.job(run.job_id)["NodeList"]), "the node is lost")
        cluster.run(["scancel", "--signal=TERM", watch])  # once: it also ends the commands by which the watch looks
        run.wait_until(lambda: cluster.job(run.job_id)["Restarts"] == "1", "requeued")
        (tmp_path / "go").touch()
        assert run.wait_for_end().reason == "finished", run.logs()
    finally:
        cluster.start_node(first)
    assert [(each.job_id, each.restart_count) for each in run.attempts()] == [(run.job_id, 0), (run.job_id, 1)]


def test_new_runs_leave_out_a_node_that_is_blamed_and_none_that_the_cluster_does_not_have_any_more(
    project: Project,
) -> None:
    def nodes(*words: str, check: bool = True) -> str:
        done = project.cluster.run([PYTHON, "-m", "slurmtrain", "nodes", *words], cwd=project.path, check=check)
        return done.stdout + done.stderr

    program = ["job=command", "job.command=true", *ONE]
    assert "n2 is left out of the next starts" in nodes("blame", "n2", "--reason", "its disk is full")
    assert "has no node 'n17'" in nodes("blame", "n17", check=False)
    nodes("blame", "n17", "--cluster", "sandbox")  # as if it had been removed since
    blamed = project.submit(*program, "cluster.exclude=n1", small=False)
    assert expand_nodelist(project.cluster.job(blamed.job_id)["ExcNodeList"]) == ["n1", "n2"]
    (left_out,) = json.loads(blamed.cli("status", blamed.run_dir.id, "--json"))["left_out"]
    assert (left_out["node"], left_out["why"]) == ("n2", "blamed by hand: its disk is full")
    pinned = project.submit(*program, small=False, nodes="n2")  # without its node it could never start
    assert project.cluster.job(pinned.job_id)["ExcNodeList"] == "(null)"
    nodes("forgive", "--all")
    forgiven = project.submit(*program, "cluster.exclude=n1", small=False)
    assert project.cluster.job(forgiven.job_id)["ExcNodeList"] == "n1"
    for run in (blamed, pinned, forgiven):
        run.wait_for_end()


@pytest.mark.slow
def test_a_run_leaves_out_a_node_that_has_lost_its_run_directory(
    project: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    # The nodes of a sandbox share all folders: on that of the first attempt, nothing can be written there any more.
    wrapper = tmp_path / "bin" / "touch"
    wrapper.write_text(
        f"""#!/bin/bash
if [[ "$1" = */attempts ]] && grep -qs "\\"$SLURMD_NODENAME\\"" "$1/0001/attempt.json"; then exit 1; fi
exec {shutil.which("touch")} "$@"
"""
    )
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{wrapper.parent}:{os.environ['PATH']}")
    run = project.submit("job=command", two_lives(tmp_path), *ONE, small=False)
    last = run.wait_for_end()
    first = run.attempts()[0]
    assert (last.number, last.reason) == (2, "finished"), run.logs()
    assert last.nodes != first.nodes
    job = run.cluster.job(run.job_id)
    assert (job["ExcNodeList"], job["Restarts"]) == (first.nodes[0], "2")


def test_a_rendered_script_can_be_handed_to_sbatch_and_with_other_ranks_says_both_and_is_not_retried(
    project: Project,
) -> None:
    words = ["+cluster=sandbox", "cluster.sandbox=null", *counting(20)]
    jobs = {}
    for options in ([], ["--ntasks-per-node=2"]):
        project.cluster.run([PYTHON, "-m", "slurmtrain", *words, "render", "-o", "job.sbatch"], cwd=project.path)
        (rendered,) = {each.id: each for each in all_runs(project.path / "runs") if each.id not in jobs}.values()
        command = ["sbatch", "--parsable", *options, "job.sbatch"]
        jobs[rendered.id] = project.cluster.run(command, cwd=project.path).stdout.strip(), rendered
    (job_id, plain), (_, other) = jobs.values()
    run = Run(plain, project.cluster, project.path)
    run.wait_until_done()
    assert run.attempts()[0].job_id == job_id
    run = Run(other, project.cluster, project.path)
    run.wait_until(lambda: bool(run.attempts()) and run.attempts()[-1].verdict is not None, "ended")
    (attempt,) = run.attempts()
    assert (attempt.reason, attempt.verdict) == ("config", "end")
    assert "started 2 ranks" in (attempt.sentence or "")
    assert "cluster.nodes=1 x cluster.tasks_per_node=1" in (attempt.sentence or "")


LOOKS = """
import glob, json, os, sys, time, helper
attempt = os.environ["SLURMTRAIN_ATTEMPT"]
data = os.path.join(os.environ["SLURMTRAIN_DATA"], "words")
seen = {"node": os.environ["SLURMD_NODENAME"], "helper": helper.__file__, "prefix": sys.prefix, "data": os.path.realpath(data),
        "words": open(data).read(), "made": os.stat(data).st_ino}
beginning = os.path.join(os.environ["SLURMTRAIN_RUN_DIR"], f"seen-{attempt}-")
with open("writing-" + os.environ["RANK"], "w") as file:
    file.write(json.dumps(seen))
os.replace(file.name, beginning + os.environ["RANK"])
while len(glob.glob(beginning + "*")) < 4:  # the first rank that fails ends the others
    time.sleep(0.02)
sys.exit(3 if attempt == "1" else 0)
"""


def test_each_node_has_one_copy_of_code_environment_and_data_for_all_starts_of_its_ranks(
    project: Project, tmp_path: Path
) -> None:
    """The environment is a small one that leads to the packages of this one. The nodes are one machine: each has a folder."""
    environment, local, data = tmp_path / "environment", tmp_path / "local", tmp_path / "shared" / "words"
    venv.create(environment, symlinks=True)
    packages = next(environment.glob("lib/python*/site-packages"))
    there = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "all.pth").write_text("\n".join([*there, str(Path(slurmtrain.__file__).parents[1])]))
    for folder in (data.parent, local):
        folder.mkdir()
    data.write_text("some words")
    (project.path / "looks.py").write_text(LOOKS)
    (project.path / "helper.py").write_text("")
    stage = ["code=true", "environment=true", f"data=['{data}']", f"dir='{local}'"]
    run = project.submit(
        "job=command",
        r"job.command='python \${SLURMTRAIN_CODE}/looks.py'",
        f"cluster.venv='{environment}'",
        *(f"cluster.stage.{each}" for each in stage),
        "cluster.nodes=2",
        "cluster.tasks_per_node=2",
        *WITH_GPUS,
        small=False,
    )
    run.wait_for_end()
    assert [attempt.verdict for attempt in run.attempts()] == ["in-place", "done"], run.logs()
    seen = {
        (attempt, rank): json.loads((run.run_dir.path / f"seen-{attempt}-{rank}").read_text())
        for attempt in (1, 2)
        for rank in range(4)
    }
    (top,) = local.glob("slurmtrain-*")
    for each in seen.values():
        found = [Path(each[name]).relative_to(top).parts[1:] for name in ("helper", "prefix", "data")]
        node = each["node"]
        assert found == [(node, "code", "helper.py"), (node, "environment"), (node, "data", "words")]
        assert each["words"] == "some words"
    assert len({each["made"] for each in seen.values()}) == 2  # copied once on each of two nodes
    assert "uses the shared folders" not in run.logs()
    assert list(top.iterdir()) == []  # they are gone with the job
    assert len(list(run.run_dir.path.parent.parent.glob(".environments-*/*.tar"))) == 1


def test_submitting_from_inside_a_job_inherits_nothing_of_it(project: Project) -> None:
    inner = [
        "+cluster=sandbox",
        "cluster.sandbox=null",
        "job=command",
        "job.command=hostname",
        "cluster.nodes=2",
        "submit",
        "--follow",
    ]
    quoted = " ".join(f"'{word}'" for word in inner)
    job_id = project.cluster.sbatch(
        *("-N1", "-n1", "--mem=100", "-o", str(project.path / "outer.log").replace("%", "%%")),
        script=f"srun {PYTHON} -m slurmtrain {quoted}\n",
        cwd=project.path,
    )
    project.cluster.wait_for(job_id, {"COMPLETED", "FAILED"})
    (run_dir,) = all_runs(project.path / "runs")
    run = Run(run_dir, project.cluster, project.path)
    run.finish()
    assert run.attempts()[0].world_size == 4
    assert "finished" in (project.path / "outer.log").read_text()


def test_what_a_shell_has_set_for_slurms_commands_hides_no_run_and_changes_no_job(project: Project) -> None:
    shell = {
        "SQUEUE_PARTITION": "high",
        "SQUEUE_STATES": "COMPLETED",
        "SQUEUE_USERS": "nobody",
        "SQUEUE_FORMAT": "%i",
        "SCANCEL_STATE": "RUNNING",
        "SCANCEL_PARTITION": "high",
        "SCONTROL_FUTURE": "1",
        "SINFO_PARTITION": "high",
        "SLURM_TIME_FORMAT": "relative",
        "SLURM_BITSTR_LEN": "1",
        "SBATCH_TIMELIMIT": "1",
        "SBATCH_NO_REQUEUE": "1",
        "SBATCH_ARRAY_INX": "0-2",
        "SBATCH_WAIT": "1",
        "SBATCH_PARTITION": "high",
        "SBATCH_JOB_NAME": "other",
        "SBATCH_SIGNAL": "INT@30",
        "SBATCH_ACCOUNT": "mine",
    }

    def cli(*words: str) -> str:
        done = project.cluster.run([PYTHON, "-m", "slurmtrain", *words], env=shell, cwd=project.path)
        return done.stdout + done.stderr

    words = ["+cluster=sandbox", "cluster.sandbox=null", "+cluster.sbatch.begin=now+2hours", *ONE]
    said = cli(*words, "+experiment=smoke", "submit")
    assert "of this shell are ignored" in said and "SBATCH_TIMELIMIT=1" in said
    (run_dir,) = all_runs(project.path / "runs")
    (job_id,) = run_dir.info()["job_ids"]
    job = project.cluster.job(job_id)
    assert {key: job[key] for key in ("JobName", "Partition", "TimeLimit", "Requeue", "Account")} == {
        "JobName": "train",
        "Partition": "low",
        "TimeLimit": "01:00:00",
        "Requeue": "1",
        "Account": "mine",
    }
    assert "ArrayJobId" not in job
    assert json.loads(cli("status", run_dir.id, "--json"))["state"] == "waiting"
    assert "is told to end" in cli("cancel", run_dir.id)
    project.cluster.wait_for(job_id, "CANCELLED")


def test_in_a_shell_of_salloc_it_is_one_process(project: Project) -> None:
    words = " ".join(["+experiment=smoke", "train.steps=3", "train"])
    done = project.cluster.run(
        ["salloc", "-N2", "--ntasks-per-node=2", "bash", "-c", f"{PYTHON} -m slurmtrain {words}"], cwd=project.path
    )
    (run_dir,) = all_runs(project.path / "runs")
    attempt = json.loads((run_dir.attempt(1).path / "attempt.json").read_text())
    assert (attempt["world_size"], attempt["reason"]) == (1, "finished"), done.stdout + done.stderr


def test_srun_by_hand_makes_one_run_of_all_its_ranks(project: Project) -> None:
    words = ["+experiment=smoke", "train.steps=3", "train"]
    srun = ["sh", "-c", 'scontrol show hostnames >allocated; exec srun "$@"', "sh", PYTHON, "-m", "slurmtrain", *words]
    done = project.cluster.run(["salloc", "-N2", "--ntasks-per-node=1", *srun], cwd=project.path)
    (run_dir,) = all_runs(project.path / "runs")
    attempt = json.loads((run_dir.attempt(1).path / "attempt.json").read_text())
    assert (attempt["world_size"], attempt["reason"]) == (2, "finished"), done.stdout + done.stderr
    assert attempt["nodes"] == (project.path / "allocated").read_text().split()
    assert run_dir.attempt_numbers() == [1]


@pytest.mark.parametrize(
    ("override", "code", "said"),
    [
        ("cluster.partition=nope", 78, "cluster.partition=nope: this cluster has no such partition"),
        ("+cluster.sbatch.nodelist=nope", 1, "sbatch refused the job: Invalid node name specified"),  # sbatch's words
    ],
)
def test_a_refused_submission_says_why_and_leaves_nothing(
    project: Project, override: str, code: int, said: str
) -> None:
    words = ["+cluster=sandbox", "cluster.sandbox=null", override, "submit"]
    done = project.cluster.run([PYTHON, "-m", "slurmtrain", *words], cwd=project.path, check=False)
    assert done.returncode == code
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not (project.path / "runs").exists()


@pytest.mark.parametrize(
    "text", ["n0", "n[0-2]", "a[01-03],c", "rack[1-2]-n[08-11,20]", "x-1,y[1,3-4]", "n[1-2]-[3-4]"]
)
def test_node_lists_are_read_as_slurm_reads_them(sandbox: Cluster, text: str) -> None:
    assert expand_nodelist(text) == sandbox.run(["scontrol", "show", "hostnames", text]).stdout.split()
