"""Scripts of a user's own, without the seconds of their imports, and with them."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slurmtrain.system.process import descendants
from tests.support.gloo import Ranks, wait_until
from tests.support.local_runs import clean_environment

LOG = "output.txt"


class Script:
    """A script with its options, started in `folder`, where its output is in `log`: forks of the fork server of `gloo`."""

    def __init__(self, folder: Path, *words: str):
        self.log = folder / LOG
        self.log.write_text("")
        self._ranks = Ranks(folder, 1, _run, (words, clean_environment()), [0])

    def has_ended(self) -> bool:
        return self._ranks.has_ended(0)

    def send_signal(self, number: int) -> None:
        os.kill(self._ranks.pid(0), number)

    def wait(self) -> int:
        try:
            return self._ranks.endings()[0].exit_code or 0
        finally:
            self._ranks.reap()


class Program:
    """A Python that runs in a folder, and what it says. It ends with all that it has started."""

    def __init__(self, folder: Path, *words: str, **variables: str):
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".txt", delete=False) as log:
            self.log = Path(log.name)
            self.process = subprocess.Popen(
                [sys.executable, *words],
                cwd=folder,
                env={**clean_environment(), **variables},
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def wait_for(self, condition: Callable[[], Any], what: str) -> None:
        wait_until(lambda: condition() or self.has_ended(), what, 300)
        assert condition(), self.said

    def wait(self, timeout_s: float = 300) -> int:
        return self.process.wait(timeout_s)

    def end(self) -> None:
        for pid in [self.process.pid, *descendants([self.process.pid])]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    @property
    def said(self) -> str:
        return self.log.read_text()


def _run(directory: Path, words: tuple[str, ...], variables: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(directory)
    output = os.open(LOG, os.O_WRONLY | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    sys.argv, sys.path[:0] = list(words), [str(Path(words[0]).parent)]
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)  # as in a new process
    code: object = 0
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as ending:
        code = ending.code or 0
    threading._shutdown()  # type: ignore[attr-defined]  # as at the end of a process: of threads, and then of all else
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code if isinstance(code, int) else 1)
