"""When a rank counts as hung, what a stack says, and which ranks did not come: decisions from plain values."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from slurmtrain.config.schema import WatchdogConfig
from slurmtrain.runs.attempt_dir import AttemptDir
from slurmtrain.runtime.watchdog import evidence, monitor
from slurmtrain.runtime.watchdog.heartbeats import Beat, silent_between, still_allowed
from slurmtrain.runtime.watchdog.phases import Allowance, Frame, phase_of
from slurmtrain.runtime.watchdog.progress import ActiveClock, Position, Progress
from slurmtrain.runtime.watchdog.report import HangReport, NodeHangReport, find_absent, page, sentence_of
from slurmtrain.system import process, redaction

LIMITS = WatchdogConfig(first_step_s=1000, factor=10, min_s=60, evaluation_s=500, save_s=300)


def beat(rank: int, **values: Any) -> Beat:
    common = {"number": 7, "time": 1e9, "node": f"n{rank}", "pid": 100 + rank, "born": "5", "step": 16, "waits": True}
    common |= {"phase": "forward/backward", "where": "step (train.py:7)", "idle_s": 60.0, "limit_s": 60.0}
    return Beat(rank=rank, **{**common, **values})


A_STEP, EVALUATION, SAVE, START = Allowance.STEP, Allowance.EVALUATION, Allowance.SAVE, Allowance.START


def looked(progress: Progress, *looks: tuple[float, int, Allowance]) -> Progress:
    for now, step, allowance in looks:
        progress.look(now, Position(step, step, step > 0), allowance)
    return progress


BETWEEN = [(1, 2, A_STEP), (2, 2, EVALUATION), (400, 2, EVALUATION), (401, 2, A_STEP), (402, 3, A_STEP)]
TIME_OUTS: dict[str, tuple[list[tuple[float, int, Allowance]], float]] = {
    "the start and a compilation have the longest": ([(0, 0, START)], 1000),
    "no step has less than min_s": ([(0, 1, A_STEP)], 60),
    "nor one of which ten are done within that": ([(0, 1, A_STEP), (2, 2, A_STEP)], 60),
    "a step may take ten times the longest one": ([(0, 1, A_STEP), (30, 2, A_STEP), (40, 3, A_STEP)], 300),
    "an evaluation": ([(0, 1, A_STEP), (1, 1, EVALUATION)], 500),
    "a save": ([(0, 1, A_STEP), (1, 1, SAVE)], 300),
    "batches of an evaluation are progress": ([(100.0 * n, 5 + n, EVALUATION) for n in range(100)], 500),
    "an evaluation in between makes no step longer": ([(0, 1, A_STEP), *BETWEEN], 60),
}


@pytest.mark.parametrize("case", TIME_OUTS)
def test_each_kind_of_work_has_its_own_time_out(case: str) -> None:
    looks, seconds = TIME_OUTS[case]
    last, step, allowance = looks[-1]
    progress = looked(Progress(LIMITS), *looks, (last + seconds - 1, step, allowance))
    assert not progress.overdue
    assert looked(progress, (last + seconds, step, allowance)).overdue


def test_a_debugger_has_no_time_out() -> None:
    debugger = Allowance.DEBUGGER
    assert not looked(Progress(LIMITS), (0, 1, A_STEP), (1, 1, debugger), (1e6, 1, debugger)).overdue


def test_a_copy_to_a_mirror_that_gets_on_is_no_hang_and_hides_none() -> None:
    progress = looked(Progress(LIMITS), (0, 1, Allowance.STEP), (1, 1, Allowance.SAVE))
    for block in range(1, 100):
        progress.look(1 + 250.0 * block, Position(1, 1, True), Allowance.SAVE, block)
        assert not progress.overdue and progress.moving
    progress.look(1 + 250.0 * 99 + 300, Position(1, 1, True), Allowance.SAVE, 99)
    assert progress.overdue, "it gets on no more"
    stepping = looked(Progress(LIMITS), (0, 1, Allowance.STEP))
    stepping.look(61, Position(1, 1, True), Allowance.STEP, 7)  # one beside training
    assert stepping.overdue and not stepping.moving


def test_time_in_which_the_process_was_stopped_does_not_count() -> None:
    clock = ActiveClock(0.0)
    assert [clock.look(1.0), clock.look(2.0), clock.look(9000.0), clock.look(9001.0)] == [1.0, 2.0, 3.0, 4.0]


S = "/p/lib/python3.11/site-packages"
MAIN = Frame("/code/slurmtrain/runtime/main.py", 9, "_train")
HOOKS = Frame("/code/slurmtrain/training/hooks/base.py", 9, "after_step")
STEP = (MAIN, Frame("/code/slurmtrain/training/trainer.py", 9, "_train_step"))


STACKS: list[tuple[Any, ...]] = [
    ((*STEP, Frame("/code/slurmtrain/training/forward_backward.py", 1, "train")), "forward/backward", "step", False),
    ((*STEP, Frame("/code/slurmtrain/training/forward_backward.py", 1, "train"),
      Frame(f"{S}/torch/autograd/graph.py", 1, "_engine_run_backward")), "forward/backward", "step", True),
    ((*STEP, Frame("/code/slurmtrain/data/loading/workers.py", 1, "_receive")), "data", "step", False),
    ((*STEP, Frame("/code/slurmtrain/training/evaluation.py", 1, "evaluate")), "evaluation", "evaluation", False),
    ((*STEP, Frame("/code/slurmtrain/checkpoint/save/pending_save.py", 1, "result"),
      Frame("/usr/lib/python3.11/threading.py", 1, "wait")), "save", "save", True),
    ((MAIN, Frame("/code/slurmtrain/checkpoint/restore/reader.py", 1, "read")), "restore", "save", False),
    ((*STEP, Frame(f"{S}/torch/_dynamo/convert_frame.py", 1, "compile")), "compile", "start", False),
    ((*STEP, HOOKS, Frame("/mine/generate.py", 1, "after_step")), "a hook of train.hooks", "evaluation", False),
    ((*STEP, HOOKS, Frame("/code/slurmtrain/training/hooks/reporting.py", 1, "after_step")), "step", "step", False),
    ((*STEP, Frame("/usr/lib/python3.11/pdb.py", 1, "interaction")), "debugger", "debugger", False),
    ((*STEP, Frame(f"{S}/torch/distributed/distributed_c10d.py", 1, "all_reduce")), "step", "step", True),
    ((*STEP, Frame("/usr/lib/python3.11/threading.py", 1, "wait")), "step", "step", False),
]  # fmt: skip


@pytest.mark.parametrize(("stack", "name", "allowance", "waits"), STACKS)
def test_a_stack_says_what_a_rank_is_doing(stack: tuple[Frame, ...], name: str, allowance: str, waits: bool) -> None:
    phase = phase_of(stack, stepping=True)
    assert (phase.name, phase.allowance, phase.waits) == (name, allowance, waits)


def test_until_the_first_step_is_done_all_has_the_long_time_out_of_the_start() -> None:
    stack = (*STEP, Frame("/code/slurmtrain/training/forward_backward.py", 1, "train"))
    assert phase_of(stack, stepping=False).allowance == Allowance.START


DUMP = """Timeout (0:00:05)!
Thread 0x00007f (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait
Thread 0x00008f (most recent call first):
  File "/code/model.py", line 12 in forward
  File "/code/slurmtrain/runtime/main.py", line 9 in _train
"""


def test_a_rank_that_does_not_beat_between_two_looks_is_silent() -> None:
    one = {0: beat(0), 1: beat(1), 2: beat(2)}
    other = {0: beat(0, number=8), 1: beat(1), 2: beat(2, number=9)}
    assert silent_between(one, other, 4) == {1, 3}


@pytest.mark.parametrize(
    ("values", "silent", "at_work"),
    [
        ({"waits": False, "phase": "evaluation", "limit_s": 500.0}, False, True),
        ({"waits": False, "phase": "debugger", "limit_s": 1e9}, False, True),
        ({"waits": False, "idle_s": 5.0}, False, True),  # it was a little slower, and its own time is not yet over
        ({"waits": False, "idle_s": 61.0}, False, False),
        ({"waits": True, "idle_s": 5.0}, False, False),  # it has come later to where the others wait
        ({"waits": False, "idle_s": 1.0, "time": 1e9 - 70}, True, False),  # it was stopped when it had just begun
        ({"waits": False, "idle_s": 1.0, "time": 1e9 - 50, "limit_s": 300.0}, True, True),  # a long call in a save
        (
            {"waits": False, "idle_s": 1.0, "time": 1e9 - 70, "limit_s": 300.0},
            True,
            False,
        ),  # which it may have left since
        ({"waits": False, "idle_s": 1.0, "time": 1e9 + 70}, True, True),  # its clock is wrong: look again
        ({"waits": False, "idle_s": 1.0, "limit_s": 1800.0, "step": 15}, True, False),  # of a step before this rank's
    ],
)
def test_no_rank_hangs_as_long_as_another_one_may_be_at_work(
    values: dict[str, Any], silent: bool, at_work: bool
) -> None:
    own = beat(0, idle_s=70.0)
    found = still_allowed({0: own, 1: beat(1, **values)}, {1} if silent else set(), own, 60.0)
    assert [each.rank for each in found] == ([1] if at_work else [])


NODES = {rank: f"n{rank}" for rank in range(4)}


def reports(*ranks: int, **values: Any) -> dict[int, HangReport]:
    return {rank: HangReport(beat(rank), **values) for rank in ranks}


# The main thread waits until the save before is written, one that writes blocks has no work, and the writer ...
SAVING = """\
Thread MainThread (most recent call first):
  File "/lib/python3.11/threading.py", line 327 in wait
  File "/app/slurmtrain/checkpoint/save/background_thread.py", line 43 in wait_idle
Thread checkpoint-blocks_0 (most recent call first):
  File "/lib/python3.11/concurrent/futures/thread.py", line 81 in _worker
Thread checkpoint-writer (most recent call first):
"""
FSYNC = """\
  File "/app/slurmtrain/system/files.py", line 30 in fsync_directory
  File "/app/slurmtrain/checkpoint/save/job.py", line 245 in write"""
GATHER = """\
  File "/site-packages/torch/distributed/distributed_c10d.py", line 3000 in gather
  File "/app/slurmtrain/checkpoint/ranks.py", line 127 in gather_on_rank_0"""


def collective(number: int, state: str = "started") -> dict[str, Any]:
    return {"0": {"name": "gloo:all_reduce", "number": number, "state": state, "since": 1e9 - 5}}


def but(rank: int, report: HangReport, **values: Any) -> dict[int, HangReport]:
    """Reports of four ranks, of which this one has another."""
    return {**reports(0, 1, 2, 3, **values), rank: report}


SILENT = {state: reports(0, 2, 3, local_states={1: state}, seen={1: beat(1)}) for state in ("T", "t", "D", "gone", "S")}
STOPPED_WORKER = {"pid": 99, "state": "T", "wchan": None, "command": "python", "stacks": ""}
IN_NFS = NodeHangReport({1: "D"}, {1: "nfs_wait_bit_killable"}, {}, {1: beat(1)})
SAVES_HANG = {
    rank: HangReport(
        beat(rank, phase="save", where="wait_idle (background_thread.py:43)"),
        stacks=SAVING + (FSYNC if rank == 1 else GATHER),
        collectives=collective(9 if rank != 1 else 8),
    )
    for rank in range(4)
}
IN_KERNEL, HOLDS = (
    "waits in the kernel for a disk, file system or driver",
    "is in a call that holds Python's interpreter lock",
)
BLAMED = {
    "stopped": (SILENT["T"], "rank 1 on n1 was stopped (SIGSTOP) in step 17, forward/backward; 3 other ranks waited"),
    "in a debugger": (SILENT["t"], "rank 1 on n1 was stopped by a debugger in step 17"),
    "in the kernel": (SILENT["D"], f"rank 1 on n1 {IN_KERNEL} (state D) in"),
    "in a call of NFS": (reports(0, 2, 3), f"rank 1 on n1 {IN_KERNEL} (state D, in nfs_"),
    "gone": (SILENT["gone"], "rank 1 on n1 ended without a word in step 17"),
    "holds the lock": (SILENT["S"], f"rank 1 on n1 {HOLDS} in step 17"),
    "holds the lock in a function": (reports(0, 2, 3), f"rank 1 on n1 {HOLDS} in step 17, step: forward (model.py:12)"),
    "does not answer": (
        reports(0, 2, 3, seen={1: beat(1)}),
        "rank 1 on n1 does not answer any more (stopped, or its node is gone) in step 17, forward/backward",
    ),
    "rank 0, with the store": (
        reports(1, 2, 3, store_answers=False, local_states={0: "T"}),
        "rank 0 on n0 was stopped (SIGSTOP) in step 17",
    ),
    "does not wait": (
        but(2, HangReport(beat(2, waits=False, where="spin (model.py:3)"))),
        "rank 2 on n2 did not come to where the others wait in step 17, forward/backward: spin (model.py:3); 3 other",
    ),
    "has a stopped data worker": (
        but(1, HangReport(beat(1, waits=False, phase="data"), workers=[STOPPED_WORKER])),
        "rank 1 on n1 waits for data in step 17, data: its data worker 99 is stopped (SIGSTOP); 3 other ranks waited",
    ),
    "has begun fewer collectives": (
        but(2, HangReport(beat(2), collectives=collective(8, "completed")), collectives=collective(9)),
        "rank 2 on n2 waits for others, but not in what they wait in, in step 17",
    ),
    "all in the same collective": (
        reports(0, 1, 2, 3, collectives=collective(9)),
        "all 4 ranks wait for each other in step 17, and none comes",
    ),
    "has a disk that hangs in a save": (
        SAVES_HANG,
        "rank 1 on n1 does not get on with writing a checkpoint in step 17, save: fsync_directory (files.py:30); 3 other",
    ),
}
# Stacks that the timers of silent ranks have written, and reports of monitors.
MORE = {"holds the lock in a function": ({1: DUMP}, []), "in a call of NFS": ({}, [IN_NFS])}


@pytest.mark.parametrize("name", BLAMED)
def test_the_rank_that_did_not_come_is_named_with_what_it_does_instead(name: str) -> None:
    known, sentence = BLAMED[name]
    dumps, nodes = MORE.get(name, ({}, []))
    assert sentence_of(find_absent(known, 4, NODES, dumps, nodes), known, 4).startswith(sentence)


@pytest.mark.parametrize("waits", [False, True])  # True: for its GPU
def test_a_rank_that_is_alone_is_not_said_to_keep_others_waiting(waits: bool) -> None:
    known = {0: HangReport(beat(0, waits=waits, where="synchronize (streams.py:230)"))}
    said = "rank 0 on n0 did not get on in step 17, forward/backward: synchronize (streams.py:230)"
    assert sentence_of(find_absent(known, 1, NODES, {}), known, 1) == said


def test_the_page_shows_first_the_stacks_of_the_rank_that_did_not_come_and_what_the_others_wait_for() -> None:
    known = but(2, HangReport(beat(2, waits=False), stacks="File spin"), collectives=collective(9))
    shown = page("s", find_absent(known, 4, NODES, {}), known, 4)
    assert shown.index("## Rank 2 on n2") < shown.index("File spin") < shown.index("## Ranks that waited")
    assert "### Ranks 0, 1, 3" in shown and "gloo:all_reduce number 9, for 5 s" in shown
    assert "store in rank 0's process did not answer" in page("x", [], reports(1, 2, 3, store_answers=False), 4)


@pytest.mark.parametrize(
    ("idle_s", "limit_s", "silent_s", "overdue"),
    [
        (0.0, 60.0, 64.0, False),
        (0.0, 60.0, 65.0, True),
        (59.0, 60.0, 4.0, False),  # its own thread may just be writing down what it knows
        (30.0, 60.0, 35.0, True),
        (0.0, 1e9, 1e6, False),  # a debugger is open
    ],
)
def test_a_rank_that_is_alone_has_its_own_time_out_and_some_seconds(
    idle_s: float, limit_s: float, silent_s: float, overdue: bool
) -> None:
    assert monitor.is_overdue(beat(0, idle_s=idle_s, limit_s=limit_s), silent_s) is overdue


MONITOR = (
    "import sys; from slurmtrain.runtime.watchdog import monitor; monitor.STOPPED_S = 0.5; monitor.main(sys.argv[1:])"
)


def test_a_node_whose_ranks_are_all_stopped_says_so_and_is_freed_of_them(tmp_path: Path) -> None:
    """The ranks of node n1 are 2 and 3; rank 0, of another node, has found the hang."""
    directory, program = AttemptDir(tmp_path), [sys.executable, "-c", "import sys; sys.stdin.read()"]
    ranks = {rank: subprocess.Popen(program, stdin=subprocess.PIPE) for rank in (2, 3)}
    words = [sys.executable, "-c", MONITOR, str(tmp_path), "4", str(ranks[2].pid)]
    watching = subprocess.Popen(words, stdin=subprocess.PIPE)
    try:
        assert watching.stdin is not None
        for rank, each in ranks.items():
            known = beat(rank, node="n1", pid=each.pid, born=process.born(each.pid))
            watching.stdin.write(known.text().encode() + b"\n")
            os.kill(each.pid, signal.SIGSTOP)
        watching.stdin.flush()
        known_by_others = {rank: HangReport(beat(rank)) for rank in (0, 1)}
        known_by_others[0].write(directory)
        until = time.monotonic() + 20
        while not directory.hang_nodes() and time.monotonic() < until:
            time.sleep(0.05)
        (node,) = filter(None, map(NodeHangReport.read, directory.hang_nodes()))
        absent = find_absent(known_by_others, 4, NODES, {}, [node])
        said = "; ".join(f"rank {rank} on n1 was stopped (SIGSTOP) in step 17, forward/backward" for rank in (2, 3))
        assert sentence_of(absent, known_by_others, 4) == f"{said}; 2 other ranks waited"
        assert all(each.poll() is None for each in ranks.values()), "they are there until the page is"
        directory.hang_page.touch()
        assert [each.wait(20) for each in ranks.values()] == [-signal.SIGKILL] * 2
        assert watching.wait(20) == 0
    finally:
        for each in (watching, *ranks.values()):
            each.kill()
            each.wait()


RACED = """
import os, subprocess, time
start = subprocess._fork_exec

def raced(*words):
    pid = start(*words)
    if os.fork() == 0:  # as the main thread forks a data worker at this moment, which has all that is open now
        time.sleep(60)
        os._exit(0)
    return pid

subprocess._fork_exec = raced
from slurmtrain.runtime.watchdog.monitor import Monitor

Monitor(None, 1).close()
"""


def test_the_watch_goes_on_when_a_data_worker_is_forked_while_the_monitor_starts() -> None:
    subprocess.run([sys.executable, "-c", RACED], timeout=30, check=True)


def test_a_monitor_ends_with_its_rank(tmp_path: Path) -> None:
    rank = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    watching = subprocess.Popen([sys.executable, "-c", MONITOR, "", "1", str(rank.pid)], stdin=subprocess.PIPE)
    rank.communicate()
    assert watching.wait(20) == 0


def test_stacks_of_a_rank_that_has_got_on_since_are_not_those_of_its_hang(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_text(DUMP)
    assert "model.py" in evidence.dump_of_timer(log)
    log.write_text(f"{DUMP}{evidence.GOT_ON}\n")
    assert evidence.dump_of_timer(log) == ""
    log.write_text(f"{DUMP}{evidence.GOT_ON}\n{DUMP.replace('model.py', 'later.py')}")
    assert "later.py" in evidence.dump_of_timer(log)


def test_a_secret_among_the_words_of_a_process_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_hidden", {})
    redaction.hide({"KEY": "s3cr3t-t0k3n-of-the-program"})
    program = "import sys; print(flush=True); sys.stdin.read()"
    padding = "x" * (190 - len(f"{sys.executable} -c {program}"))  # the value lies across the end of what is shown
    words = [sys.executable, "-c", program, padding, "s3cr3t-t0k3n-of-the-program"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        shown = process.command_line(child.pid)
    assert "s3cr3t" not in shown
    assert shown.startswith(sys.executable)
