"""When a rank counts as hung, and which ranks did not come: decisions from plain values."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from torch._dynamo.callback import callback_handler

from slurmtrain.config.schema import WatchdogConfig
from slurmtrain.hangs import judge, page
from slurmtrain.hangs.beats import Beat, Position, Progress
from slurmtrain.hangs.judge import Report, find_culprits
from slurmtrain.observe.phases import Phase, PhaseClock
from slurmtrain.runs.attempt_dir import AttemptDir
from slurmtrain.supervise import loop
from slurmtrain.system import activity, process, redaction
from slurmtrain.system.process import ProcessMark
from slurmtrain.training.hooks.base import RecordingHook, TrainingHooks

LIMITS = WatchdogConfig(first_step_s=1000, factor=10, min_s=60, evaluation_s=500, save_s=300)


def beat(rank: int, **values: Any) -> Beat:
    common = {"number": 7, "time": 1e9, "node": f"n{rank}", "process": ProcessMark("h", 100 + rank), "step": 16}
    common |= {"waits": True, "phase": "forward/backward", "idle_s": 60.0, "limit_s": 60.0}
    return Beat(rank=rank, **{**common, **values})


Look = tuple[float, int, str]
BETWEEN = [(1, 2, "step"), (2, 2, "evaluation"), (400, 2, "evaluation"), (401, 2, "step"), (402, 3, "step")]
TIME_OUTS: dict[str, tuple[list[Look], float]] = {
    "the first step has the longest, whatever it does": ([(0, 0, "forward/backward")], 1000),
    "a loop of the user's own tells nothing": ([(0, 1, "start"), (1, 2, "start")], 60),
    "a compilation has the same": ([(0, 1, "step"), (1, 1, "compilation")], 1000),
    "no step has less than min_s": ([(0, 1, "step")], 60),
    "a step may take ten times the longest one": ([(0, 1, "step"), (30, 2, "data"), (40, 3, "communication")], 300),
    "an evaluation": ([(0, 1, "step"), (1, 1, "evaluation")], 500),
    "a hook of the user's own": ([(0, 1, "step"), (1, 1, activity.HOOK)], 500),
    "a save": ([(0, 1, "step"), (1, 1, "save")], 300),
    "batches of an evaluation are progress": ([(100.0 * n, 5 + n, "evaluation") for n in range(100)], 500),
    "an evaluation in between makes no step longer": ([(0, 1, "step"), *BETWEEN], 60),
}


def looked(progress: Progress, *looks: Look, copied: int = 0) -> bool:
    """Whether it is overdue after these looks."""
    for now, step, phase in looks:
        progress.look(now, Position(step, step, step > 0), phase, copied)
    return progress.idle_s >= progress.limit_s


@pytest.mark.parametrize("case", TIME_OUTS)
def test_each_kind_of_work_has_its_own_time_out(case: str) -> None:
    looks, seconds = TIME_OUTS[case]
    last, step, phase = looks[-1]
    progress = Progress(LIMITS)
    assert not looked(progress, *looks, (last + seconds - 1, step, phase))
    assert looked(progress, (last + seconds, step, phase))


class Generates(RecordingHook):
    """A hook of the user's own."""

    told = ""

    def message(self, text: str) -> None:
        Generates.told = activity.told()


def test_training_tells_what_it_does_and_when_it_waits() -> None:
    phases, thread = PhaseClock(None), threading.get_ident()
    told = []
    phases.start()
    for within in (
        *(phases.within(phase) for phase in (Phase.DATA, Phase.FORWARD_BACKWARD, Phase.EVALUATION, Phase.CHECKPOINT)),
        *(phases.waiting(), activity.waiting(), activity.doing(activity.RESTORE)),
    ):
        with within:
            told.append((activity.told(), activity.waits(thread)))
    told.append((activity.told(), activity.waits(thread)))
    own = [(each, False) for each in ("data", "forward/backward", "evaluation", "save")]
    assert told == [*own, ("communication", True), ("step", True), ("restore", False), ("step", False)]
    beside = threading.Thread(target=activity.doing(activity.SAVE)(lambda: told.append((activity.told(), False))))
    beside.start()
    beside.join()
    assert told.pop() == ("step", False)
    TrainingHooks([Generates()]).message("")
    assert (Generates.told, activity.told()) == (activity.HOOK, "step")
    activity.follow_compiler()
    compiles: Any = callback_handler
    with activity.doing(activity.SAVE):  # while another thread begins to compile
        compiles.start_callbacks[-1](None)
    compiles.end_callbacks[-1](None)
    assert activity.told() == "step"


WORKS = {"waits": False, "idle_s": 5.0}
SLOW = {"idle_s": 65.0, "limit_s": 600.0}
HANGS: dict[str, tuple[dict[str, Any], dict[str, Any], float, bool]] = {
    # this rank, which is rank 0; rank 1; for how long that is silent; whether some rank hangs
    "both are within their time-outs": ({"idle_s": 59.0}, {"idle_s": 59.0}, 0, False),
    "one is overdue, and the other waits": ({}, {"idle_s": 5.0}, 0, True),
    "rank 1 is overdue, and rank 0 waits": ({"idle_s": 5.0}, {"waits": False}, 0, True),
    "the other is a little slower": ({}, WORKS, 0, False),
    "and then overdue, too": ({}, {**WORKS, "idle_s": 61.0}, 0, True),
    "it evaluates": ({}, {**WORKS, "limit_s": 500.0, "idle_s": 400.0}, 0, False),
    "it is silent, and this one is at work": ({**WORKS, "idle_s": 50.0}, WORKS, 100, False),
    "it is silent for silent_s, whatever a step may take": (SLOW, {**WORKS, "limit_s": 600.0}, 65, True),
    "but not before": (SLOW, {**WORKS, "limit_s": 600.0}, 50, False),
    "nor before the first step": ({**SLOW, "unhurried": True}, {**WORKS, "limit_s": 600.0}, 500, False),
    "it was stopped when it had just begun": ({}, {**WORKS, "idle_s": 1.0}, 59, True),
    "a long call in a save": ({}, {**WORKS, "limit_s": 300.0}, 50, False),
    "which it may have left since": ({}, {**WORKS, "limit_s": 300.0}, 61, True),
}


@pytest.mark.parametrize("case", HANGS)
def test_no_rank_hangs_as_long_as_another_one_may_be_at_work(case: str) -> None:
    own, other, silent_s, expected = HANGS[case]
    answer = judge.hangs(beat(0, **own), {1: beat(1, **other)}, {1: silent_s}, limit_s=60.0, every_s=1.0)
    assert answer is expected


def test_a_rank_that_is_overdue_leaves_the_decision_to_rank_0_as_long_as_that_beats() -> None:
    silences: list[tuple[dict[int, float], bool]] = [({0: 2.0}, False), ({0: 12.0}, True), ({}, True)]
    for silent_s, hangs in silences:
        heard = {rank: beat(rank, idle_s=50.0) for rank in silent_s}
        assert judge.hangs(beat(2), heard, silent_s, limit_s=60.0, every_s=1.0) is hangs


def test_a_rank_that_is_alone_has_its_own_time_out_and_some_seconds() -> None:
    # Of the third, its own thread may just be writing down what it knows.
    for idle_s, silent_s, hangs in ((0.0, 64.0, False), (0.0, 65.0, True), (59.0, 4.0, False), (30.0, 35.0, True)):
        assert judge.hangs_alone(beat(0, idle_s=idle_s), silent_s) is hangs


DUMP = """Timeout (0:00:05)!
Thread 0x00007f (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait
Thread 0x00008f (most recent call first):
  File "/code/model.py", line 12 in forward
  File "/code/slurmtrain/rank/main.py", line 9 in _train
"""
NODES = [f"n{rank}" for rank in range(4)]


def reports(*ranks: int, **values: Any) -> dict[int, Report]:
    return {rank: Report(beat(rank), **values) for rank in ranks}


def but(rank: int, report: Report, **values: Any) -> dict[int, Report]:
    """Reports of four ranks, of which this one has another."""
    return {**reports(0, 1, 2, 3, **values), rank: report}


SILENT = {
    state: reports(0, 2, 3, states={1: state}, heard={1: beat(1)})
    for state in ("stopped", "disk-sleep", "gone", "sleeping")
}
STOPPED_WORKER = {"pid": 99, "state": "stopped", "command": "python", "stacks": ""}
HOLDS = "is in a call that holds Python's interpreter lock"
BLAMED = {
    "stopped": (
        SILENT["stopped"],
        "rank 1 on n1 was stopped (SIGSTOP) in step 17, forward/backward; 3 other ranks waited",
    ),
    "in the kernel": (
        SILENT["disk-sleep"],
        "rank 1 on n1 waits in the kernel for a disk, file system or driver (state D) in",
    ),
    "gone": (SILENT["gone"], "rank 1 on n1 ended without a word in step 17"),
    "holds the lock": (SILENT["sleeping"], f"rank 1 on n1 {HOLDS} in step 17"),
    "holds the lock in a function": (
        reports(0, 2, 3, heard={1: beat(1)}),
        f"rank 1 on n1 {HOLDS} in step 17, forward/backward: forward (model.py:12); 3 other ranks waited",
    ),
    "was never heard": (
        reports(0, 2, 3),
        "rank 1 on n1 does not answer any more (stopped, or its node is gone), phase not known; 3 other ranks waited",
    ),
    "does not answer": (
        reports(0, 2, 3, heard={1: beat(1)}),
        "rank 1 on n1 does not answer any more (stopped, or its node is gone) in step 17, forward/backward",
    ),
    "does not wait": (
        but(2, Report(beat(2, waits=False), where="spin (model.py:3)")),
        "rank 2 on n2 did not come to where the others wait in step 17, forward/backward: spin (model.py:3); 3 other",
    ),
    "has a stopped data worker": (
        but(1, Report(beat(1, waits=False, phase="data"), workers=[STOPPED_WORKER])),
        "rank 1 on n1 waits for data in step 17, data: its data worker 99 was stopped (SIGSTOP); 3 other ranks waited",
    ),
    "has done fewer steps": (
        but(2, Report(beat(2, step=15))),
        "rank 2 on n2 waits for others, but not in what they wait in, in step 16",
    ),
    "all wait": (
        reports(0, 1, 2, 3),
        "all 4 ranks wait for each other in step 17, and none comes",
    ),
}


@pytest.mark.parametrize("name", BLAMED)
def test_the_rank_that_did_not_come_is_named_with_what_it_does_instead(name: str) -> None:
    known, sentence = BLAMED[name]
    dumps = {1: DUMP} if "in a function" in name else {}
    assert page.sentence_of(find_culprits(known, NODES, dumps), known, 4).startswith(sentence)


def test_the_page_shows_first_the_stacks_of_the_rank_that_did_not_come_and_what_the_others_wait_for(
    tmp_path: Path,
) -> None:
    """As the lowest of four ranks writes it, of which one has a data worker that hangs."""
    directory = AttemptDir(tmp_path)
    worker = {**STOPPED_WORKER, "state": "S", "stacks": 'File "x"\n  File "/data.py", line 3 in load'}
    own = Report(beat(2, waits=False, phase="data"), stacks="File spin", workers=[worker], heard={0: beat(0)})
    threads = [
        threading.Thread(target=page.write_together, args=(directory, report, NODES, 0.0))
        for report in but(2, own).values()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    shown = directory.hang_page.read_text()
    assert shown.index("## Rank 2 on n2") < shown.index("File spin") < shown.index("## Ranks that waited")
    assert "load (data.py:3)" in shown.splitlines()[0]
    assert "### Ranks 0, 1, 3" in shown
    assert {path.name for path in tmp_path.iterdir()} == {"hang.md", "hang.json"}


def test_a_rank_that_is_alone_and_has_ended_or_beats_is_not_killed(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(loop, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(judge, "ALONE_MARGIN_S", 0.05)
    directory, program = AttemptDir(tmp_path), [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(program, stdin=subprocess.PIPE) as rank:
        known = beat(0, process=ProcessMark.of(rank.pid), idle_s=0.0, limit_s=0.0)
        for each in (replace(known, limit_s=1e9), replace(known, process=replace(known.process, born="1"))):
            with loop.watched(directory):
                directory.heartbeat_file.write_bytes(msgspec.json.encode(each))
                threading.Event().wait(0.5)
        assert rank.poll() is None and not directory.hang_page.exists()
        with loop.watched(directory):
            directory.heartbeat_file.write_bytes(msgspec.json.encode(known))
            assert rank.wait(20) == -signal.SIGKILL
    assert "rank 0 on n0 is in a call that holds" in directory.hang_page.read_text()


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
