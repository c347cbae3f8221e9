"""What this process is doing, in its own words: training tells it here, and the watchdog reads it from another thread.

Telling costs an assignment. Only the main thread tells what it does; any thread tells that it waits for other ranks.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

START, COMMUNICATION = "start", "communication"
COMPILATION, EVALUATION, HOOK = "compilation", "evaluation", "a hook of train.hooks"
SAVE, RESTORE, EXPORT = "save", "restore", "export"

_doing = START
_waiting: set[int] = set()
_compiler: object = None


def told() -> str:
    """Return what the main thread is doing, as it has told."""
    return _doing


def tell(what: str) -> None:
    """Tell what the main thread does from now on."""
    global _doing
    _doing = what


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Tell what the main thread does in the block; after it, it does what it did before. Of other threads nothing is told."""
    before, is_main = told(), threading.current_thread() is threading.main_thread()
    if is_main:
        tell(what)
    try:
        yield
    finally:
        if is_main:
            tell(before)


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
    """Return whether a thread waits for other ranks; while the main thread waits for a save, whether its writer does."""
    return _doing == COMMUNICATION or thread in _waiting or (_doing == SAVE and bool(_waiting))


def follow_compiler() -> None:
    """Have torch.compile, as soon as it is loaded, tell when it compiles."""
    global _compiler
    handler = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
    if handler is None or handler is _compiler:
        return
    _compiler, before = handler, []

    def begin(_: object) -> None:
        before.append(told())
        tell(COMPILATION)

    def end(_: object) -> None:
        if before:  # it was loaded by this compilation
            tell(before.pop())

    handler.register_start_callback(begin)
    handler.register_end_callback(end)
