"""Call what may never return, such as a file system whose server is gone, in a thread that nobody has to wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def begin(function: Callable[[], T]) -> Future[T]:
    """Start to call a function in a thread that nobody has to wait for, not even the end of this process."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="preflight", daemon=True).start()
    return future
