"""A layer between Python and the file system that counts calls and can delay, fail, shorten or end at any of them.

It replaces the functions of `os`, those of the files of `os.fdopen`, too, and acts on paths below one directory only.
Installed in a rank's own process, it sees the calls of all of its threads.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

BY_DESCRIPTOR = ("write", "pwrite", "writev", "pwritev", "fsync", "fdatasync", "ftruncate", "posix_fallocate")
BY_PATH = ("rename", "replace", "mkdir", "unlink", "rmdir", "link", "symlink", "truncate")

Before = Callable[[int, str, str], None]


class FileLayer:
    """Calls `before(number, function, path)` in front of every call that writes, names or syncs below `directory`.

    Args:
        before: may raise what the call shall fail with.
        short: writes take half of what they are given.
    """

    def __init__(self, directory: Path, before: Before | None = None, *, short: bool = False):
        self._directory = str(directory)
        self._before = before or (lambda number, name, path: None)
        self._short = short
        self._lock = threading.Lock()
        self.calls: list[tuple[str, str]] = []
        self._originals: dict[tuple[Any, str], Any] = {}

    def install(self) -> FileLayer:
        for name in BY_DESCRIPTOR:
            self._replace(os, name, self._by_descriptor(name))
        for name in BY_PATH:
            self._replace(os, name, self._by_path(name))
        self._replace(os, "open", self._open)
        self._replace(io, "open", self._open_file)
        return self

    def remove(self) -> None:
        for (module, name), original in self._originals.items():
            setattr(module, name, original)  # and is remembered: other threads may be in our functions still

    def _replace(self, module: Any, name: str, function: Any) -> None:
        self._originals[module, name] = getattr(module, name)
        setattr(module, name, function)

    def _meet(self, name: str, path: Any) -> None:
        path = os.fspath(path) if not isinstance(path, (int, str)) else path
        if not str(path).startswith(self._directory):
            return
        with self._lock:
            self.calls.append((name, str(path)))
            number = len(self.calls)
        self._before(number, name, str(path))

    def _by_descriptor(self, name: str) -> Any:
        original = getattr(os, name)

        def call(descriptor: int, *args: Any, **options: Any) -> Any:
            try:
                path = os.readlink(f"/proc/self/fd/{descriptor}")
            except OSError:
                return original(descriptor, *args, **options)
            self._meet(name, path)
            if self._short and name in ("write", "pwrite") and path.startswith(self._directory) and len(args[0]) > 1:
                args = (memoryview(args[0]).cast("B")[: len(args[0]) // 2], *args[1:])
            return original(descriptor, *args, **options)

        return call

    def _by_path(self, name: str) -> Any:
        original = getattr(os, name)

        def call(path: Any, *args: Any, **options: Any) -> Any:
            at = options.get("dir_fd")
            self._meet(name, path if at is None else f"{os.readlink(f'/proc/self/fd/{at}')}/{os.fspath(path)}")
            return original(path, *args, **options)

        return call

    def _open(self, path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            self._meet("open", path)
        descriptor: int = self._originals[os, "open"](path, flags, *args, **options)
        return descriptor

    def _open_file(self, file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        """As `open` of a descriptor (`os.fdopen`); writing goes through `os.write`, where it is counted."""
        if (
            mode != "wb"
            or not isinstance(file, int)
            or not os.readlink(f"/proc/self/fd/{file}").startswith(self._directory)
        ):
            return self._originals[io, "open"](file, mode, *args, **options)
        return io.BufferedWriter(_RawFile(file, "w"))


class _RawFile(io.FileIO):
    """Writes by the current `os.write`."""

    def write(self, data: Any) -> int:
        return os.write(self.fileno(), data)
