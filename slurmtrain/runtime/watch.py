"""Rank 0's watchman: a thread that knows the clock and SLURM's word, and writes down why a stop was asked for."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from slurmtrain.runtime import attempts
from slurmtrain.runtime.settle import own_job_id
from slurmtrain.runtime.signals import StopSignals
from slurmtrain.runtime.slurm import JobFacts, SlurmClient


def start_watch(signals: StopSignals, attempt_dir: Path, client: SlurmClient | None, *, signal_lead_s: float) -> None:
    """Watch over rank 0 until a stop is requested, then record it.

    A signal that came before Python had handlers was ignored. What it meant is still on record, so SLURM is asked
    once at the start; and should the early warning never come, the clock gives it.
    """
    watch = threading.Thread(
        target=_watch, args=(signals, attempt_dir, client, signal_lead_s), name="watch", daemon=True
    )
    watch.start()


def _watch(signals: StopSignals, attempt_dir: Path, client: SlurmClient | None, signal_lead_s: float) -> None:
    end_time: float | None = None
    if client is not None:
        facts = client.job(own_job_id() or "")
        end_time = _end_time(facts)
        if facts is not None and facts.preempted:
            signals.request("preempted before the start")
        elif facts is not None and facts.state == "COMPLETING":
            signals.request("ended before the start")
    # Half of the lead: SLURM's own signal, which may be up to 60 s early but never late, should come first.
    deadline = None if end_time is None or not signal_lead_s else end_time - signal_lead_s / 2
    if not signals.wait(None if deadline is None else max(0.0, deadline - time.time())):
        signals.request("deadline")
    first = signals.first
    assert first is not None
    facts = client.job(own_job_id() or "") if client is not None else None
    left = None if end_time is None else end_time - first.time
    attempts.record_stop(attempt_dir, cause=first.cause, cause_time=first.time, seconds_left=left, facts=facts)


def _end_time(facts: JobFacts | None) -> float | None:
    if facts is not None:
        return facts.end_time
    stated = os.environ.get("SLURM_JOB_END_TIME")  # since 23.02; where scontrol cannot be run, in a container
    return float(stated) if stated else None
