"""Restart in place: the ranks start again in the same job, which keeps its nodes. The part that asks SLURM, and waits.

What is decided is in runs/decide.py; the platform starts the ranks. Between two attempts nobody else watches over the
job: a signal reaches no rank, and the grace time of a preemption is announced to ranks alone. So SLURM is asked.

In a job that keeps its nodes when one fails (--no-kill), the node of the supervisor itself is watched from another one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import signal
import time

from slurmtrain.errors import ClusterError, EnvironmentMismatchError
from slurmtrain.runs import attempts, requests
from slurmtrain.runs.attempts import Attempt
from slurmtrain.runs.decide import AttemptOutcome, decide_after_pause
from slurmtrain.runs.evidence import Evidence, Policy
from slurmtrain.runs.reasons import Event, Verdict
from slurmtrain.runs.requests import RunAction
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.slurm.environment import own_job_id, own_node_name
from slurmtrain.slurm.job_facts import JobState
from slurmtrain.slurm.nodelist import expand_nodelist, is_dead, is_silent, is_usable
from slurmtrain.system.signals import STOP_SIGNALS

log = logging.getLogger(__name__)

STEP_GONE_S = 60.0  # how long killed processes may take to be gone: KillWait, often 30 s, and some more
STEP_POLL_S = 0.2
REGISTRATION_POLL_S = 1.0
REGISTRATION_POLLS = 15  # a slurmd registers as soon as it has started
LOOK_EVERY_S = 5.0  # seconds between two questions to SLURM during a pause: a preemption gives this shell no signal


def with_allocation(evidence: Evidence, attempt: Attempt, client: SlurmClient) -> Evidence:
    """Add what SLURM says of the nodes of this job, once the processes of the attempt are gone from them."""
    if evidence.facts is None or evidence.facts.state != JobState.RUNNING:
        return evidence
    gone = is_gone(attempt.step_id, client)
    facts = client.job(attempt.job_id or own_job_id() or "")  # that may have taken a while
    evidence = dataclasses.replace(evidence, facts=facts, step_left=not gone)
    if facts is None or not facts.nodes:
        return evidence
    try:
        allocated, states = expand_nodelist(facts.nodes), _node_states(facts.nodes, client)
    except (ClusterError, EnvironmentMismatchError) as error:
        log.warning("cannot look at the nodes of this job: %s", error.message)
        return evidence
    usable = [node for node in allocated if is_usable(states.get(node, ""))]
    if (own_node_name() or allocated[0]) not in usable:  # this process itself will not last
        usable = []
    dead = [node for node in attempt.nodes if node not in allocated or is_dead(states.get(node, ""))]
    at_fault = dead[0] if dead else evidence.failed_on
    return dataclasses.replace(evidence, usable_nodes=tuple(usable), dead_nodes=tuple(dead), failed_on=at_fault)


def _node_states(nodes: str, client: SlurmClient) -> dict[str, str]:
    """Return the states of these nodes, once each answers or is known to be dead, or has had time to.

    A slurmd that is just being restarted does not answer, for some seconds, and its node is none that has failed.
    """
    states = client.node_states(nodes)
    for _ in range(REGISTRATION_POLLS):
        if not any(map(is_silent, states.values())):
            break
        time.sleep(REGISTRATION_POLL_S)
        states = client.node_states(nodes)
    return states


def is_gone(step_id: str | None, client: SlurmClient) -> bool:
    """Wait until the step of the ranks is gone, at most STEP_GONE_S, and return whether it is, or cannot be seen."""
    give_up = time.monotonic() + STEP_GONE_S
    try:
        while step_id is not None and client.step_lives(step_id):
            if time.monotonic() > give_up:
                return False
            time.sleep(STEP_POLL_S)
    except ClusterError as error:  # srun says that they are gone, and will wait itself where they are not
        log.warning("cannot see whether the ranks are gone: %s", error.message)
    return True


def await_next_start(
    run_dir: RunDir, attempt: Attempt, outcome: AttemptOutcome, evidence: Evidence, policy: Policy, client: SlurmClient
) -> AttemptOutcome:
    """Wait as long as the outcome says before the ranks start again, and look whether the job is to be stopped meanwhile.

    Returns:
        The outcome, another one if the ranks do not start again; the record of the attempt says so then.
    """
    until = time.monotonic() + outcome.wait_s
    signalled, facts = False, evidence.facts  # which is an answer of a moment ago
    while True:
        left = until - time.monotonic()
        if left > 0:
            signalled = _signal_comes(min(LOOK_EVERY_S, left))
            facts = client.job(attempt.job_id or own_job_id() or "")
        # No rank is left that would look for the file.
        told = run_dir.take_switch(run_dir.stop_switch, Event.STOP_FILE_FOUND)
        request = RunAction.STOP if told else requests.take_request(run_dir, attempt)
        now = decide_after_pause(outcome, evidence, policy, request=request, facts=facts)
        if now.verdict is not Verdict.IN_PLACE or signalled or time.monotonic() >= until:
            break
    if now.verdict is not Verdict.IN_PLACE:
        attempt.reason = now.reason
        attempts.change_outcome(run_dir, attempt, now.verdict, now.why, now.next_step)
    return now


def _signal_comes(seconds: float) -> bool:
    """Wait, and return whether a signal to stop has ended that early, also one that this process ignores."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        return signal.sigtimedwait(STOP_SIGNALS, seconds) is not None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


NODE_LOOK_EVERY_S = 60.0
# The state is SIGNALING until all nodes have taken a signal, which a failed node never does.
GOES_ON = (JobState.RUNNING, "SIGNALING", "SUSPENDED", "STOPPED", "RESIZING")


def watch_over(job_id: str, node: str, *, requeues: bool) -> None:
    """Requeue or end a job once SLURM has taken the node of its supervisor from it; return when the job ends otherwise.

    The end of the job ends this process, too.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    while True:
        told = signal.sigtimedwait({signal.SIGTERM}, NODE_LOOK_EVERY_S) is not None
        with contextlib.suppress(ClusterError):
            facts = SlurmClient().look(job_id)
            # TERM is sent to all steps: the ranks are to save, and this goes on; or the job ends, and this, too.
            if facts is None or (told and facts.state not in GOES_ON):
                return
            if facts.nodes and node not in expand_nodelist(facts.nodes):
                SlurmClient().requeue(job_id) if requeues else SlurmClient().cancel(job_id)
