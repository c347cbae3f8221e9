"""What this process is doing, in its own words, which the watchdog reads from another thread.

Of the steps, their clock says which part goes on, where it is asked; what else the thread that trains does (in general the main
one), such as a save, it tells here. Any thread tells that it waits for other ranks.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

START, COMMUNICATION = "start", "communication"
COMPILATION, EVALUATION, HOOK = "compilation", "evaluation", "a hook of train.hooks"
SAVE, RESTORE = "save", "restore"

_doing: str | None = None  # other than steps
_part_of_step: Callable[[], str] | None = None
_waiting: set[int] = set()
_thread = threading.main_thread().ident
_begin_of_compilation: object = None
_compiles = False  # told by itself: another thread may compile, beyond the end of what the one that trains does


def told() -> str:
    """Return what the thread that trains is doing, as it has told."""
    if _compiles:
        return COMPILATION
    return _doing or (START if _part_of_step is None else _part_of_step())


def follow(part_of_step: Callable[[], str]) -> None:
    """Ask `part_of_step` from now on, in any thread, which part of a step goes on."""
    global _part_of_step
    _part_of_step = part_of_step


def trains_in(thread: int) -> None:
    """Say which thread trains: not the main one, in Ray Train for instance."""
    global _thread
    _thread = thread


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Tell what the thread that trains does in the block; after it, it does what it did before. Of others nothing is told."""
    global _doing
    before, trains = _doing, threading.get_ident() == _thread
    if trains:
        _doing = what
    try:
        yield
    finally:
        if trains:
            _doing = before


@contextmanager
def waiting() -> Iterator[None]:
    """Tell that this thread waits for other ranks in the block."""
    thread = threading.get_ident()
    outermost = thread not in _waiting
    _waiting.add(thread)
    try:
        yield
    finally:
        if outermost:
            _waiting.discard(thread)


def waits(thread: int) -> bool:
    """Return whether a thread waits for other ranks; while the one that trains waits for a save, whether its writer does."""
    return told() == COMMUNICATION or thread in _waiting or (told() == SAVE and bool(_waiting))


def follow_compiler() -> None:
    """Have torch.compile, as soon as it is loaded, tell when it compiles."""
    global _begin_of_compilation, _compiles
    handler = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
    if handler is None or _begin_of_compilation in handler.start_callbacks:  # torch.compiler.reset() forgets them
        return

    def begin(_: object) -> None:
        global _compiles
        _compiles = True

    def end(_: object) -> None:
        global _compiles
        _compiles = False

    _begin_of_compilation, _compiles = begin, False
    handler.register_start_callback(begin)
    handler.register_end_callback(end)
