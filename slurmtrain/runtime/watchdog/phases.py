"""What a thread is doing, by its stack: the phase of training, and whether it waits for other ranks.

Stacks are looked at once a second, so that no step pays for it, and code of the user's own is covered, too.
"""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

MAX_FRAMES = 200


class Frame(NamedTuple):
    """A frame of a stack: file, line number and function."""

    file: str
    line: int
    function: str

    @property
    def text(self) -> str:
        """The line of source; empty where it cannot be read."""
        return linecache.getline(self.file, self.line).strip()


class Allowance(StrEnum):
    """The kinds of work that may take different times."""

    STEP = "step"
    START = "start"  # until the first step is done; and compilation at any time
    EVALUATION = "evaluation"
    SAVE = "save"  # and restore
    DEBUGGER = "debugger"  # for as long as the person wants


@dataclass(frozen=True)
class Phase:
    """What a main thread is doing.

    Attributes:
        name: such as "forward/backward".
        allowance: which time-out holds for it.
        waits: it waits for other ranks, as in a collective.
        where: the innermost frame that is not of a library, as "function (file:line)".
    """

    name: str
    allowance: Allowance
    waits: bool
    where: str


# By a part of the path of a frame, from the most to the least telling: the phase and its allowance. None: that of a step.
_RULES: tuple[tuple[tuple[str, ...], str, Allowance | None], ...] = (
    (("/pdb.py", "/bdb.py", "/debugpy/", "/pydevd", "/IPython/core/debugger.py"), "debugger", Allowance.DEBUGGER),
    (
        (
            "/torch/_dynamo/convert_frame.py",
            "/torch/_inductor/compile_fx.py",
            "/torch/_inductor/codecache.py",
            "/torch/_inductor/scheduler.py",
            "/torch/_inductor/graph.py",
            "/torch/_inductor/async_compile.py",
        ),
        "compile",
        Allowance.START,
    ),
    (("/slurmtrain/checkpoint/restore/",), "restore", Allowance.SAVE),
    (("/slurmtrain/checkpoint/",), "save", Allowance.SAVE),
    (("/slurmtrain/training/hooks/exporting.py",), "export", Allowance.SAVE),
    (
        ("/slurmtrain/training/evaluation.py", "/slurmtrain/runtime/jobs/evaluate.py"),
        "evaluation",
        Allowance.EVALUATION,
    ),
    (("/slurmtrain/data/loading/", "/torch/utils/data/"), "data", None),
    (("/slurmtrain/runtime/agreement.py",), "agreement on a stop", None),
    (("/slurmtrain/training/forward_backward.py",), "forward/backward", None),
    (("/torch/optim/",), "optimizer", None),
    (("/torch/autograd/", "/torch/_tensor.py"), "backward", None),
    (("/torch/nn/",), "forward", None),
)
_WAITING_FILES = ("/torch/distributed/", "/torch/nn/parallel/distributed.py", "/torch/cuda/streams.py")
_WAITING_CALLS = re.compile(
    r"\bwait\(|synchronize\(|\.item\(\)|\.tolist\(\)|all_reduce\(|barrier\(|broadcast\(|_gather\("
)
_ENGINE = "_engine_run_backward"  # where gradients are exchanged, in C++
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen")


def stack_of(thread_id: int) -> tuple[Frame, ...]:
    """Return the stack of a thread of this process, outermost frame first; empty if there is no such thread."""
    frame = sys._current_frames().get(thread_id)
    found: list[Frame] = []
    while frame is not None and len(found) < MAX_FRAMES:
        found.append(Frame(frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name))
        frame = frame.f_back
    return tuple(reversed(found))


_DUMPED = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')


def parse_dump(text: str) -> tuple[Frame, ...]:
    """Return the stack of the last thread in a dump of faulthandler, which is the main one, outermost frame first."""
    found: list[Frame] = []
    for line in text.splitlines():
        match = _DUMPED.match(line)
        if match is not None:
            found.append(Frame(match[1], int(match[2]), match[3]))
        elif "(most recent call first)" in line:
            found = []
    return tuple(reversed(found))


def phase_of(stack: Sequence[Frame], *, stepping: bool) -> Phase:
    """Return what a main thread with this stack is doing.

    Args:
        stack: outermost frame first.
        stepping: the first step is done.
    """
    name, allowance = "start", Allowance.START
    if stepping:
        name, allowance = "step", Allowance.STEP
    for parts, its_name, its_allowance in _RULES:
        if any(part in frame.file for frame in stack for part in parts):
            if its_allowance is not None:
                name, allowance = its_name, its_allowance
            else:
                name = its_name
            break
    if allowance is Allowance.STEP and _in_own_hook(stack):
        name, allowance = "a hook of train.hooks", Allowance.EVALUATION
    return Phase(name, allowance, waits_for_others(stack), where(stack))


def _in_own_hook(stack: Sequence[Frame]) -> bool:
    """Return whether a hook of the user's own runs, which may do anything, such as generating text."""
    callers = [
        number for number, frame in enumerate(stack) if frame.file.endswith("/slurmtrain/training/hooks/base.py")
    ]
    return any(number + 1 < len(stack) and "/slurmtrain/" not in stack[number + 1].file for number in callers)


def waits_for_others(stack: Sequence[Frame]) -> bool:
    """Return whether the innermost frame is one in which a thread waits for other ranks, or for its device."""
    if not stack:
        return False
    inner = stack[-1]
    if any(part in inner.file for part in _WAITING_FILES) or inner.function == _ENGINE:
        return True
    if inner.file.endswith("/threading.py"):  # for the thread that writes checkpoints, which meets those of the others
        return any("/slurmtrain/checkpoint/" in frame.file for frame in stack)
    if "/slurmtrain/data/" in inner.file:
        return False
    return _WAITING_CALLS.search(inner.text) is not None


def where(stack: Sequence[Frame]) -> str:
    """Return the innermost frame that is not of a library, and the innermost: "step (train.py:7), in recv (socket.py:3)"."""
    if not stack:
        return "an unknown place"
    own = next((frame for frame in reversed(stack) if not any(part in frame.file for part in _LIBRARIES)), stack[-1])
    return _short(own) if own == stack[-1] else f"{_short(own)}, in {_short(stack[-1])}"


def _short(frame: Frame) -> str:
    return f"{frame.function} ({frame.file.rpartition('/')[2]}:{frame.line})"
