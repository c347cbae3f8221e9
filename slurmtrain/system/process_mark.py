"""The mark that a process leaves in a file, so that others, on this host or another, can tell whether it still lives.

A pid alone proves nothing. On another host, and in another container of this one, it belongs to another process; and after a
reboot, or some million processes, here, too. So a mark also names the host, the namespace of the pid and the start time of
the process. Who cannot see a process decides by what the file shows besides: heartbeats, or its age.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slurmtrain.system import process
from slurmtrain.system.records import is_count


@dataclass(frozen=True)
class ProcessMark:
    """The mark of a process.

    Attributes:
        host: name of its host.
        born: its start time, see `process.born`; None: not on record.
        namespace: that of its pid, as in "pid:[4026531836]"; None: not on record, so it is taken for this process's own.
    """

    host: str
    pid: int
    born: str | None = None
    namespace: str | None = None

    @classmethod
    def own(cls) -> ProcessMark:
        """Return the mark of this process."""
        return cls(socket.gethostname(), os.getpid(), process.born(os.getpid()), pid_namespace())

    @classmethod
    def from_json(cls, values: object) -> ProcessMark | None:
        """Return the mark in a record; None if it names no process, as a torn one."""
        if not isinstance(values, Mapping):
            return None
        host, pid = values.get("host"), values.get("pid")
        if not isinstance(host, str) or not isinstance(pid, int) or not is_count(pid):
            return None
        born, namespace = (
            each if isinstance(each, str) else None for each in (values.get("born"), values.get("pid_namespace"))
        )
        return cls(host, pid, born, namespace)

    def to_json(self) -> dict[str, Any]:
        """Return the mark as values of a record."""
        return {"host": self.host, "pid": self.pid, "born": self.born, "pid_namespace": self.namespace}

    @property
    def can_be_seen(self) -> bool:
        """Whether its process would be seen from here, if it lives."""
        return self.host == socket.gethostname() and self.namespace in (None, pid_namespace())

    def lives(self) -> bool | None:
        """Return whether its process lives; None: that cannot be seen from here.

        A machine may hide the processes of other users (hidepid): one that is there and hidden counts as alive.
        """
        if not self.can_be_seen:
            return None
        if not process.lives(self.pid):
            return False
        born = process.born(self.pid)
        return born is None or self.born is None or born == self.born


def pid_namespace() -> str | None:
    """Return the namespace of the pids that this process sees; None if the kernel does not tell."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None
