"""The values that a search judges its trials by, read from their logs, and the end of one that it has pruned."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

from slurmtrain.report.status.look import state
from slurmtrain.report.status.state import WAITING, RunStatus
from slurmtrain.runs import requests
from slurmtrain.runs.events import Event
from slurmtrain.runs.reasons import RunAction
from slurmtrain.runs.requests import signal_rank_0
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.system import records
from slurmtrain.system.records import is_scalar

LONGEST_LINE = 1 << 20  # of a log; what is longer is no record


class LoggedValues:
    """The values of one metric in a run's log, as they come. Only what was added since the last look is read."""

    def __init__(self, run_dir: RunDir, metric: str):
        self._path, self._metric = run_dir.metrics_file, metric
        self._position, self._rest = 0, b""

    def added(self) -> Iterator[tuple[int, float]]:
        """Yield the (step, value) pairs that were logged since the last call.

        A run that is resumed drops records from its log: it is then read from its beginning.

        Raises:
            UnreadableRecordError: the log is not a regular file, or cannot be read.
        """
        with contextlib.suppress(OSError):
            if os.lstat(self._path).st_size < self._position:
                self._position, self._rest = 0, b""
        name = b'"' + self._metric.encode() + b'"'
        for piece in records.pieces(self._path, self._position):
            self._position += len(piece)
            *lines, self._rest = (self._rest + piece).split(b"\n")
            if len(self._rest) > LONGEST_LINE:
                self._rest = b""
            for line in lines:
                record = records.parse(line) if name in line else None
                if isinstance(record, dict) and records.is_count(record.get("step")):
                    value = record.get(self._metric)
                    if is_scalar(value):
                        yield int(record["step"]), float(value)


def ask_to_end(run_dir: RunDir, client: SlurmClient | None) -> bool:
    """Have a run of a search stopped for good, and return whether it was asked to, or had ended.

    Its ranks are warned as before a requeue: they agree on a step, save and leave, and then the job does not come back. A
    job that waits to start again is taken out of the queue. One that is just starting cannot be asked yet.

    Raises:
        ClusterError: SLURM refuses or does not answer.
        OSError: the request could not be written.
    """
    now = state(run_dir)
    if not now.alive:
        return True
    last = now.attempts[-1] if now.attempts else None
    if now.status not in (*WAITING, RunStatus.RUNNING) or now.slurm_error is not None or last is None:
        return False
    requests.write_request(run_dir, RunAction.PRUNE)
    try:
        if client is None:
            signal_rank_0(run_dir, last, signal.SIGTERM)
        elif now.status == RunStatus.RUNNING:
            client.signal((last.step_id if now.packed else now.job_id) or "", "USR2")
        elif not now.packed:  # of a pack, those that were asked to end are left out when the job starts
            client.cancel(now.job_id or "")
    except BaseException:
        run_dir.request_file.unlink(missing_ok=True)
        raise
    run_dir.event(Event.PRUNE_ASKED)
    return True
