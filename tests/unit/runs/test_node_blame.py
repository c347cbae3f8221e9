"""Whose fault an attempt is, the node's or the program's, and what that means for the budget and for the ledger."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from slurmtrain.config.schema import Config, RequeueConfig
from slurmtrain.runs import attempts
from slurmtrain.runs.create import create_run_dir
from slurmtrain.runs.evidence import Evidence, Policy
from slurmtrain.runs.failures import Failure, record_failure
from slurmtrain.runs.node_blame import blamed_for
from slurmtrain.runs.node_fault import fault_of_node
from slurmtrain.runs.outcome import decide_outcome
from slurmtrain.runs.reasons import Reason, Verdict
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runtime.finish_attempt import finish_attempt
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.slurm.job_facts import JobFacts
from slurmtrain.slurm.node_ledger import BlamePolicy, NodeEvent, NodeRecord, ledger_file, read_ledger
from tests.support.runs import add_attempt

NOW = 1_000_000.0
FAST: dict[str, Any] = {"exit_code": 1, "failed_on": "n3", "lasted_s": 1.0, "run": "a", "number": 2, "now": NOW}
RAISED: dict[str, Any] = {**FAST, "failure": (1, "rank 2: ValueError: no"), "failed_nodes": ("n3",)}


@pytest.mark.parametrize(
    ("what", "evidence", "reason", "event"),
    [
        ("a crash in the first second", RAISED, Reason.CRASH, NodeEvent.CRASH),
        ("a crash after an hour", {**RAISED, "lasted_s": 3600.0}, Reason.CRASH, None),
        ("a crash after progress", {**RAISED, "progressed": True}, Reason.CRASH, None),
        ("ranks of two nodes that raise", {**RAISED, "failed_nodes": ("n3", "n4")}, Reason.CRASH, None),
        ("a node that nobody knows", {**RAISED, "failed_on": None}, Reason.CRASH, None),
        ("a segmentation fault", {**FAST, "killed": "n3: task 3: Segmentation fault"}, Reason.CRASH, NodeEvent.CRASH),
        ("a rank that was killed", {**FAST, "killed": "n3: task 3: Killed"}, Reason.CRASH, None),
        ("too little memory", {**FAST, "killed": "n3: task 3: Out Of Memory"}, Reason.CRASH, None),
        (
            "too little memory on the GPU",
            {**RAISED, "failure": (1, "rank 0: torch.OutOfMemoryError: CUDA out of memory.")},
            Reason.CRASH,
            None,
        ),
        (
            "a program that was killed",
            {**RAISED, "failure": (137, "rank 0: python ended with signal 9 (SIGKILL)")},
            Reason.CRASH,
            None,
        ),
        (
            "a rank whose peer has gone",
            {**RAISED, "failure": (1, "rank 0: RuntimeError: Read error: Connection reset by peer")},
            Reason.CRASH,
            None,
        ),
        (
            "broken memory of a GPU after an hour",
            {**RAISED, "lasted_s": 3600.0, "failure": (1, "rank 1: CUDA error: uncorrectable ECC error encountered")},
            Reason.CRASH,
            NodeEvent.HARDWARE,
        ),
        (
            "a program that has asked for no GPU",
            {**FAST, "lasted_s": 3600.0, "failure": (1, "rank 1: CUDA error: no CUDA-capable device is detected")},
            Reason.CRASH,
            None,
        ),
        (
            "a GPU that is gone",
            {**RAISED, "failure": (1, "rank 1: GPU has fallen off the bus"), "failed_nodes": ("n3", "n4")},
            Reason.CRASH,
            NodeEvent.HARDWARE,
        ),
        (
            "a bus error after an hour",
            {**FAST, "lasted_s": 3600.0, "killed": "n3: task 3: Bus error"},
            Reason.CRASH,
            NodeEvent.CRASH,
        ),
        ("a start that fails", {**FAST, "set_up": "set-up failed: module"}, Reason.BAD_NODE, NodeEvent.BAD_START),
        ("a rank that hangs", {**FAST, "hang": "rank 3 did not come", "lasted_s": 900.0}, Reason.HANG, NodeEvent.HANG),
        ("a node that failed", {**FAST, "lost_node": "n3"}, Reason.NODE_FAILURE, NodeEvent.LOST),
        ("a node that failed, nobody knows which", FAST, Reason.NODE_FAILURE, None),
        ("a preemption", FAST, Reason.PREEMPTED, None),
        ("the time limit", FAST, Reason.TIME_LIMIT, None),
        ("a wrong config", {**RAISED, "exit_code": 78}, Reason.CONFIG, None),
    ],
)
def test_what_speaks_against_a_node(
    what: str, evidence: dict[str, Any], reason: Reason, event: NodeEvent | None
) -> None:
    fault = fault_of_node(Evidence(**evidence), reason)
    assert (fault.event if fault else None) == event, what
    assert fault is None or (fault.node, fault.run, fault.attempt, fault.time) == ("n3", "a", 2, NOW)


def attempts_on(*nodes: str, texts: tuple[str, ...] = ("no",), budget: int = 3) -> list[bool]:
    """Whether the run goes on after each of these attempts, which crash in their first second."""
    found: list[NodeRecord] = []
    goes_on = []
    for number, node in enumerate(nodes, start=1):
        evidence = Evidence(
            1,
            failure=(1, f"rank 0: {texts[(number - 1) % len(texts)]}"),
            failed_on=node,
            lasted_s=1.0,
            stalled_before=number - 1,
            stalled_numbers=tuple(range(1, number)),
            run="a",
            number=number,
            now=NOW + number,
            node_records=tuple(found),
        )
        outcome = decide_outcome(evidence, Policy(max_attempts_without_progress=budget))
        goes_on.append(outcome.verdict == Verdict.REQUEUE)
        found += [outcome.fault] if outcome.fault is not None else []
    return goes_on


def test_attempts_that_a_blamed_node_has_ended_within_seconds_do_not_use_up_the_budget() -> None:
    assert attempts_on("n3", "n3", "n4", "n5", texts=("a", "a", "b", "c")) == [True] * 4
    assert attempts_on("n3", "n3", "n4", "n5", "n6", texts=("a", "a", "b", "c", "d"))[-1] is False


def test_a_program_that_crashes_everywhere_has_no_more_attempts_than_without_the_ledger() -> None:
    assert attempts_on("n3", "n3", "n4") == [True, True, False]


def test_a_run_that_comes_back_to_a_blamed_node_has_no_more_attempts() -> None:
    """Its node cannot be left out: it is the only one."""
    assert attempts_on("n3", "n3", "n3") == [True, True, False]


def test_a_run_that_is_broken_in_another_way_each_time_ends() -> None:
    nodes = [f"n{number // 2}" for number in range(20)]
    goes_on = attempts_on(*nodes, texts=tuple("abcdefghijklmnopqrst"))
    assert goes_on.index(False) + 1 <= 2 * 3


# Through the run's files.


class Running(SlurmClient):
    def __init__(self) -> None:
        pass

    def job(self, job_id: str) -> JobFacts | None:
        return JobFacts(state="RUNNING")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    for name in list(os.environ):
        if name.startswith("SLURM_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "big")
    return create_run_dir(tmp_path, "train")


def crash_on(run: RunDir, monkeypatch: pytest.MonkeyPatch, node: str) -> None:
    attempt = add_attempt(run, nodes=[node, "n9"], job_id="7", started=time.time() - 2)
    monkeypatch.setenv("SLURMD_NODENAME", node)
    record_failure(run.attempt(attempt.number), 0, Failure(1, "OSError: /data is not there"))
    assert finish_attempt(run, attempt.number, 1, Config(), Running()).reason is Reason.CRASH


def test_finishing_an_attempt_tells_the_ledger_and_a_later_one_that_trains_proves_it(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    crash_on(run, monkeypatch, "n3")
    crash_on(run, monkeypatch, "n3")
    first, second = read_ledger(ledger_file("big"))
    assert (first.node, first.attempt, first.event, first.said) == (
        "n3", 1, NodeEvent.CRASH, "rank 0: OSError: /data is not there",
    )  # fmt: skip
    other = create_run_dir(run.path.parents[1], "train")
    assert [each.node for each in blamed_for([run], BlamePolicy(), "big", time.time())] == ["n3"]
    assert blamed_for([other], BlamePolicy(), "big", time.time()) == []
    trained = add_attempt(
        run, nodes=["n4", "n9"], job_id="7", started=time.time(), stepping=time.time(), said="finished"
    )
    assert finish_attempt(run, trained.number, 0, Config(), Running()).verdict is Verdict.DONE
    assert [each.node for each in blamed_for([other], BlamePolicy(), "big", time.time())] == ["n3"]
    assert second.attempt == 2


# As torch 2.11 ends a process in which CUDA has failed, on a GPU (H200).
ABORTED = """
[rank3]:[E1127 18:46:06.8 ProcessGroupNCCL.cpp:2073] [PG ID 0 PG GUID 0(default_pg) Rank 3] Process group watchdog thread \
terminated with exception: CUDA error: uncorrectable ECC error encountered
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 PG GUID 0(default_pg) Rank 3] Process group watchdog thread terminated with exception: CUDA error: \
uncorrectable ECC error encountered
CUDA kernel errors might be asynchronously reported at some other API call
""".replace("\\\n", "")


def test_what_a_rank_says_that_torch_aborts_is_evidence_against_its_node(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed by SIGABRT before it can leave a record."""
    attempt = add_attempt(run, nodes=["n0", "n1"], job_id="7", started=time.time() - 1000)
    folder = run.attempt(attempt.number)
    folder.srun_log.write_text("srun: error: n1: task 3: Aborted (core dumped)\nsrun: error: n0: tasks 0-1: Killed\n")
    folder.rank_log(3).write_text(ABORTED)
    outcome = finish_attempt(run, attempt.number, 134, Config(), Running())
    said = "n1: task 3: Aborted (core dumped) (CUDA error: uncorrectable ECC error encountered)"
    assert (outcome.reason, outcome.why) == (Reason.CRASH, f"crashed: {said}")
    (record,) = read_ledger(ledger_file("big"))
    assert (record.node, record.event, record.proven) == ("n1", NodeEvent.HARDWARE, True)


def test_what_a_program_of_ones_own_says_that_torch_aborts_is_evidence_against_its_node(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = add_attempt(run, nodes=["n0", "n1"], job_id="7", started=time.time() - 1000)
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    record_failure(run.attempt(attempt.number), 3, Failure(-6, "python ended with signal 6 (SIGABRT)"))
    run.attempt(attempt.number).rank_log(3).write_text(ABORTED)
    outcome = finish_attempt(run, attempt.number, 134, Config(), Running())
    said = "rank 3: python ended with signal 6 (SIGABRT) (CUDA error: uncorrectable ECC error encountered)"
    assert outcome.why == f"crashed: {said}"
    (record,) = read_ledger(ledger_file("big"))
    assert (record.node, record.event) == ("n1", NodeEvent.HARDWARE)


@pytest.mark.parametrize("log", [None, "step 3\n", "terminate called without an active exception\n"])
def test_an_aborted_rank_that_does_not_say_why_is_said_to_have_aborted(run: RunDir, log: str | None) -> None:
    attempt = add_attempt(run, nodes=["n1"], job_id="7")
    run.attempt(attempt.number).srun_log.write_text("srun: error: n1: tasks 0-3: Aborted\n")
    if log is not None:
        run.attempt(attempt.number).rank_log(0).write_text(log)
    assert finish_attempt(run, attempt.number, 134, Config(), Running()).why == "crashed: n1: tasks 0-3: Aborted"


def test_where_the_ledger_cannot_be_written_the_run_goes_by_its_own_attempts(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    crash_on(run, monkeypatch, "n3")
    crash_on(run, monkeypatch, "n3")
    assert [each.node for each in blamed_for([run], BlamePolicy(), "big", time.time())] == ["n3"]
    assert "cannot be written here: Not a directory; other runs will not know about this attempt" in caplog.text


def test_a_run_that_ends_well_writes_nothing_to_the_ledger(run: RunDir) -> None:
    trained = add_attempt(run, nodes=["n4"], job_id="7", started=time.time(), stepping=time.time(), said="finished")
    finish_attempt(run, trained.number, 0, Config(), Running())
    assert not ledger_file("big").exists()


def test_a_threshold_of_0_keeps_no_ledger(run: RunDir) -> None:
    add_attempt(run, nodes=["n4"], job_id="7", started=time.time())
    record_failure(run.attempt(1), 0, Failure(1, "no"))
    finish_attempt(run, 1, 1, Config(requeue=RequeueConfig(blame_threshold=0)), Running())
    assert not ledger_file("big").exists()


def test_a_rank_that_fails_beside_a_broken_gpu_says_so(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/bash\necho '0, 0, No, No'; echo '3, 2, Yes, No'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURMD_NODENAME", "n3")
    attempt = add_attempt(run, nodes=["n3", "n9"], job_id="7", started=time.time() - 7200)
    record_failure(run.attempt(attempt.number), 0, Failure(1, "RuntimeError: no"))
    outcome = finish_attempt(run, attempt.number, 1, Config(), Running())
    assert "rank 0: RuntimeError: no (GPU 3 has 2 uncorrectable ECC errors)" in outcome.sentence
    other = create_run_dir(run.path.parents[1], "train")  # one such record is enough
    assert [each.node for each in blamed_for([other], BlamePolicy(), "big", time.time())] == ["n3"]


@pytest.mark.parametrize(
    ("log", "node"),
    [
        ("srun: error: n4: task 1: Segmentation fault\nsrun: error: n3: task 0: Terminated\n", "n4"),
        ("srun: error: n4: task 1: Exited with exit code 3\nsrun: error: n3: task 0: Terminated\n", "n4"),
        ("srun: error: n[3-4]: tasks 0-1: Exited with exit code 3\n", None),
        ("srun: error: n3: task 0: Exited with exit code 3\nsrun: error: Node failure on n4\n", "n4"),
        ("", None),
    ],
)
def test_srun_names_the_node_of_a_rank_that_left_no_word(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, log: str, node: str | None
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n3")  # that of the batch script
    attempt = add_attempt(run, nodes=["n3", "n4"], job_id="7", started=time.time() - 2)
    run.attempt(attempt.number).srun_log.write_text(log)
    finish_attempt(run, attempt.number, 3, Config(), Running())
    fault = attempts.read_attempt(run, attempt.number).fault
    assert (fault["node"] if fault else None) == node
