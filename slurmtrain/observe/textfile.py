"""A text file per node for the node exporter of Prometheus: the numbers of the last logged step, labelled by run, job and user.

The node exporter reads *.prom in the folder that its --collector.textfile.directory names. A thread writes the file, since
the folder is not ours: one that hangs or is full must not hold up training. The file is replaced in one step every 10 s, so
that `slurmtrain_updated_timestamp_seconds` tells what is stale; it is removed at the end.
A kill leaves it behind: the user's next run on that node removes it.

Format: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import stat
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system.files import replace_file
from slurmtrain.system.redaction import redact

log = logging.getLogger(__name__)

EVERY_S = 10.0
STALE_S = 600.0  # a file that was not written for so long is left over
CLOSE_S = 2.0
MODE = 0o644  # the node exporter is another user
PREFIX = "slurmtrain_"


def text_file_of(run_dir: RunDir, rank: int, node: str) -> tuple[str, dict[str, str]]:
    """Return the name of the text file of this node for a run, and the labels of its numbers."""
    info = run_dir.info()
    labels = {"run": run_dir.id, "job": str(info["name"]), "user": str(info["user"]), "node": node, "rank": str(rank)}
    return f"{run_dir.id}-{rank}", labels


def render(values: Mapping[str, float], labels: Mapping[str, str]) -> str:
    """Return the text for numbers by their names, each a gauge with these labels."""
    # A label's value is escaped as a string in JSON is.
    shown = ",".join(f"{name}={json.dumps(redact(value), ensure_ascii=False)}" for name, value in labels.items())
    lines = []
    for name, value in sorted(values.items()):
        metric = PREFIX + re.sub(r"[^a-zA-Z0-9_]", "_", name)
        lines += [f"# TYPE {metric} gauge", f"{metric}{{{shown}}} {float(value)!r}"]
    return "\n".join(lines) + "\n"


class TextFile:
    """The text file of this node.

    Args:
        folder: of the node exporter.
        name: of the file, without `slurmtrain_` and `.prom`.
        labels: of every number.
        every_s: seconds between two writes.
    """

    def __init__(self, folder: Path, name: str, labels: Mapping[str, str], *, every_s: float = EVERY_S):
        self._folder, self.path = folder, folder / f"{PREFIX}{re.sub(r'[^A-Za-z0-9._-]', '_', name)}.prom"
        self._labels, self._every_s = dict(labels), every_s
        self._values: dict[str, float] = {}
        self._ended, self._warned = threading.Event(), False
        self._thread = threading.Thread(target=self._work, name="textfile", daemon=True)
        self._thread.start()

    def update(self, values: Mapping[str, float]) -> None:
        """Show these numbers, and those before under other names. Returns at once."""
        self._values = {**self._values, **values}

    def close(self) -> None:
        """Remove the file. A folder that hangs is not waited for."""
        self._ended.set()
        self._thread.join(CLOSE_S)

    def _work(self) -> None:
        self._remove_stale()
        while True:
            if self._values:
                self._write(self._values)
            if self._ended.wait(self._every_s):
                break
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)

    def _write(self, values: dict[str, float]) -> None:
        try:
            text = render({**values, "updated_timestamp_seconds": round(time.time(), 3)}, self._labels)
            replace_file(self.path, text.encode(), mode=MODE, durable=False)
            self._warned = False
        except Exception as error:  # of a folder that is not ours
            if not self._warned:
                self._warned = True
                log.warning("cannot write %s for Prometheus: %s", self.path, getattr(error, "strerror", None) or error)

    def _remove_stale(self) -> None:
        """Remove the files that runs of this user have left behind on this node."""
        with contextlib.suppress(OSError):
            for path in self._folder.glob(f"{PREFIX}*.prom"):
                found = os.lstat(path)
                old = time.time() - found.st_mtime > STALE_S
                if old and found.st_uid == os.geteuid() and stat.S_ISREG(found.st_mode):
                    path.unlink()
