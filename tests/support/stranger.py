"""A second user of this machine, for tests of what people who share it may do to each other."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Stranger:
    """Another user.

    Attributes:
        folder: which everybody can read and write, as a scratch folder (the tests' own folders are closed to others).
    """

    name: str
    uid: int
    gid: int
    folder: Path

    def run(self, words: Sequence[str], **more: str) -> subprocess.CompletedProcess[str]:
        """Run a command as this user, with these environment variables added to a minimal environment."""
        return subprocess.run(
            list(words),
            env={"PATH": os.environ["PATH"], "LANG": "C.UTF-8", **more},
            cwd=self.folder,
            user=self.uid,
            group=self.gid,
            extra_groups=[],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def does(self, action: Callable[[], object], *, groups: Sequence[int] = (), umask: int = 0o022) -> None:
        """Let a child of this process do something as this user; it fails the test when it raises."""
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            said = b""
            try:
                os.close(read)
                os.setgroups(list(groups))
                os.setgid(groups[0] if groups else self.gid)
                os.setuid(self.uid)
                os.umask(umask)
                action()
            except BaseException as error:  # a forked child must not run on in its parent's code
                said = f"{type(error).__name__}: {error}".encode()
            finally:
                os.write(write, said)
                os._exit(1 if said else 0)
        os.close(write)
        with open(read, "rb") as pipe:
            said = pipe.read()
        os.waitpid(pid, 0)
        assert not said, f"{self.name}: {said.decode()}"


@contextmanager
def a_stranger() -> Iterator[Stranger]:
    """Add a user to this machine, and remove it again; skips the test where that is not possible."""
    if os.geteuid() != 0 or shutil.which("useradd") is None:
        pytest.skip("a second user can be added by root alone, with useradd")
    name = f"strain-test-{os.getpid()}"
    subprocess.run(["useradd", "--no-create-home", "--shell", "/bin/sh", name], check=True, capture_output=True)
    folder = Path(tempfile.mkdtemp(prefix="slurmtrain-shared-"))
    try:
        folder.chmod(0o1777)
        entry = pwd.getpwnam(name)
        yield Stranger(name, entry.pw_uid, entry.pw_gid, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run(["userdel", name], check=False, capture_output=True)
