"""The state of a run that was submitted to several choices, as long as no job has taken it."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from typing import NamedTuple

from slurmtrain.errors import ClusterError, UnreadableRecordError
from slurmtrain.report.progress import at_about
from slurmtrain.report.status.queue import CONFIRMATIONS, expected_start, wait_to_ask_again
from slurmtrain.report.status.record import Record
from slurmtrain.report.status.state import RunState, RunStatus, unreadable
from slurmtrain.runs import choices, requests
from slurmtrain.runs.choices import Choice
from slurmtrain.runs.job_tokens import TOKEN_PREFIX
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.slurm.job_facts import QueuedJob
from slurmtrain.slurm.job_states import GONE, JobState
from slurmtrain.slurm.pending_reasons import in_words, is_held


def open_state(record: Record) -> RunState | None:
    """Return the state of a run that is in several queues, and that the first job that starts takes; None: one just has."""
    for _ in range(CONFIRMATIONS):
        try:
            places = [_place(choice, record.owner.user) for choice in choices.choices_of(record.run_dir)]
        except UnreadableRecordError as error:
            return unreadable(error)
        if any(place.alive for place in places):
            break
        wait_to_ask_again()
    if not choices.is_open(record.run_dir):
        return None
    word, sentence, alive = _of_places(record, places)
    waits = [place for place in places if place.word == RunStatus.WAITING]
    doubt = next((place.doubt for place in places if place.doubt is not None), None)
    starts = [start for place in waits if (start := expected_start(place.job)) is not None]
    return RunState(
        word,
        sentence,
        alive,
        [],
        None,
        slurm_error=doubt,
        reason=waits[0].job.reason if waits else None,
        expected_start=min(starts, default=None),
    )


class _Place(NamedTuple):
    """A choice of a run, and what SLURM says of its job there: `word` is None for a job that is gone or was never submitted."""

    choice: Choice
    job: QueuedJob
    word: RunStatus | None
    doubt: str | None = None

    @property
    def alive(self) -> bool:
        return self.word is not None


def _place(choice: Choice, user: str | None) -> _Place:
    if not choice.token or _was_in_a_lost_sandbox(choice.named_conf):
        return _Place(choice, QueuedJob(), None)
    try:
        client = SlurmClient(choice.slurm_conf())
        job_id = choice.job_id or next(iter(client.find_by_comment(TOKEN_PREFIX + choice.token)), None)
        job = client.queue([job_id], user).get(job_id, QueuedJob()) if job_id is not None else QueuedJob()
    except ClusterError as error:
        return _Place(choice, QueuedJob(), RunStatus.UNKNOWN, error.message)
    if TOKEN_PREFIX + choice.token not in job.comment:  # another run's job has its id by now
        return _Place(choice, QueuedJob(), None)
    if job.state in GONE:
        return _Place(choice, job, None)
    return _Place(dataclasses.replace(choice, job_id=job_id), job, _word_of(job))


def _was_in_a_lost_sandbox(conf: str | None) -> bool:
    """Return whether a slurm.conf is that of a sandbox of this user that is down: its jobs are gone with it."""
    from slurmtrain.sandbox.directory import user_directory

    return conf is not None and Path(conf).parent.parent == user_directory() and not os.path.lexists(conf)


def _word_of(job: QueuedJob) -> RunStatus:
    if job.state != JobState.PENDING:
        return RunStatus.STARTING
    return RunStatus.HELD if is_held(job.reason) else RunStatus.WAITING


def _of_places(record: Record, places: list[_Place]) -> tuple[RunStatus, str, bool]:
    """Return word, sentence and `alive` of a run that no job has taken yet."""
    said = []
    for place in places:
        job = f"{place.choice.name}: job {place.choice.job_id}"
        start = expected_start(place.job)
        when = f", expected to start {at_about(start, time.time())}" if start is not None else ""
        if place.word in (RunStatus.WAITING, RunStatus.HELD):
            said.append(f"{job} is pending: {in_words(place.job.reason, record.id)}{when}")
        elif place.word == RunStatus.STARTING:
            said.append(f"{job} is about to begin")
        elif place.word == RunStatus.UNKNOWN:
            said.append(f"{place.choice.name}: SLURM cannot be asked")
    alive = [place.word for place in places if place.word is not None]
    resume = f"`resume {record.id}` submits it to each of them again"
    if requests.cancelled_after(record.run_dir, None):
        if any(word != RunStatus.UNKNOWN for word in alive):
            return RunStatus.STOPPING, f"it is cancelled; {'; '.join(said)}", True
        return RunStatus.STOPPED, f"cancelled while it waited. {resume}", False
    if not alive:
        if not any(place.choice.token for place in places):
            return RunStatus.PREPARED, f"not submitted yet. {resume}", False
        if any(place.job.state == JobState.CANCELLED for place in places):
            return RunStatus.STOPPED, f"cancelled while it waited. {resume}", False
        return RunStatus.LOST, f"its jobs are gone and left no attempt. {resume}", False
    first = "it waits in several queues, and the first job that starts takes it"
    for word in (RunStatus.STARTING, RunStatus.WAITING, RunStatus.HELD):
        if word in alive:
            return word, f"{first if len(alive) > 1 else 'it waits'}: {'; '.join(said)}", True
    return RunStatus.UNKNOWN, "; ".join(said), True
