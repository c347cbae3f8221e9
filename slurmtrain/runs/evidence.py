"""What `decide` decides from: all that is known of the end of an attempt, and the part of the config that matters.

Also what follows for nodes: what the end of an attempt says against one, and which ones the next start does without. Pure
functions; what is on record of earlier attempts is read by `node_blame`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from slurmtrain.choices import RequeueMode
from slurmtrain.runs.reasons import FAILURES, Reason
from slurmtrain.slurm.job_facts import JobFacts
from slurmtrain.slurm.node_ledger import (
    BUS_ERROR,
    FAST_S,
    HARDWARE,
    NODE_NAME,
    NOT_THE_NODE,
    BlamePolicy,
    NodeEvent,
    NodeRecord,
    blamed_nodes,
    short,
)


@dataclass(frozen=True)
class Evidence:
    """All facts that are known when the last rank has exited.

    Attributes:
        exit_code: exit code of srun, the highest of all ranks; 128 + n for a rank killed by signal n.
        said: rank 0's last word, for all ranks; None when it had none. srun may exit with 0 when it
            has lost the ranks, so only this word proves the end. Our launcher writes it, whatever program it has started.
        cause: what told the ranks to stop; None when nothing did.
        seconds_left: seconds from the stop request to the time limit; None when unknown.
        failure: (exit code, sentence) of the first rank that failed by itself.
        set_up: message of a set-up that failed before any rank was started.
        on_any_node: that failure is the same on every node: a checkpoint that does not fit the config.
        diverged: that failure is one of the training's numbers.
        failed_on: the node of the first failure; None if it is not known.
        failed_nodes: all nodes on which a rank failed by itself.
        unfit_nodes: nodes that cannot do what the job needs, as the checks before training have found, or the copying to them.
        only_victims: that failure is of a rank that lost another one, and nobody has seen why that one was lost.
        lost_node: the node that failed, as srun has said; None if it has not.
        dead_nodes: nodes of its ranks that have left the job, or do not answer SLURM.
        usable_nodes: nodes of the job on which ranks can start, in SLURM's order; () if SLURM did not say.
        failed_before: nodes at fault for earlier attempts in this start of the job, the newest first.
        step_left: the processes of its ranks are not gone, so that others could not start beside them.
        seconds_to_limit: seconds from now to the end of the job; None when there is none, or it is not known.
        superseded: if a newer attempt has taken the run over: "attempt 3 in job 12 goes on with this run".
        trained: this attempt has begun to train.
        trained_before: an earlier attempt has begun to train with the same config and code.
        trained_on: the nodes of each earlier attempt that has trained without a fault.
        program_code: exit code of a program of the user's own on rank 0; None for other kinds of jobs.
        finished_when: job.finished_when.
        hang: the watchdog's sentence on the ranks that did not come, if it has ended the attempt; `failed_on` is their node.
        disk_full: a record of the attempt could not be written for want of room.
        killed: srun's words on tasks that were killed, e.g. "n1: task 3: Killed".
        request: what a person requested of this attempt.
        facts: what SLURM says of the job; None outside of SLURM.
        told: what SLURM said of the job when the attempt was told to stop; None if it said nothing.
        preempted_when_told: SLURM said that it preempts the job when the attempt was told to stop; a requeue may have
            cleared that since.
        restart_count: SLURM_RESTART_COUNT of this attempt.
        progressed: a checkpoint was committed that is newer than the one the attempt started from, or a program of the
            user's own shows progress.
        progress_visible: False for a program that reports none, where the absence of progress proves nothing.
        lasted_s: seconds from its beginning to its end, or to the last thing that it wrote.
        stalled_before: number of attempts directly before this one that also stalled.
        alike_before: the program of the attempt directly before this one ended with the same exit code and the same last
            line, within QUICK_FAILURE_S, too.
        unseen_before: number of long attempts before this one that show no progress.
        run, number: id of the run, and number of this attempt.
        now: unix seconds.
        node_records: what is on record against nodes, by earlier attempts of this run and in this person's ledger.
    """

    exit_code: int
    said: str | None = None  # a LastWord
    cause: str | None = None  # a StopCause
    seconds_left: float | None = None
    failure: tuple[int, str] | None = None
    set_up: str | None = None
    on_any_node: bool = False
    diverged: bool = False
    failed_on: str | None = None
    failed_nodes: tuple[str, ...] = ()
    unfit_nodes: tuple[str, ...] = ()
    only_victims: bool = False
    lost_node: str | None = None
    dead_nodes: tuple[str, ...] = ()
    usable_nodes: tuple[str, ...] = ()
    failed_before: tuple[str, ...] = ()
    step_left: bool = False
    seconds_to_limit: float | None = None
    superseded: str | None = None
    trained: bool = False
    trained_before: bool = False
    trained_on: tuple[Sequence[str], ...] = ()
    program_code: int | None = None
    finished_when: str | None = None
    hang: str | None = None
    disk_full: bool = False
    killed: str | None = None
    request: str | None = None  # a RunAction
    facts: JobFacts | None = None
    told: JobFacts | None = None
    preempted_when_told: bool = False
    restart_count: int = 0
    progressed: bool = False
    progress_visible: bool = True
    lasted_s: float = 0.0
    stalled_before: int = 0
    alike_before: bool = False
    unseen_before: int = 0
    run: str = ""
    number: int = 0
    now: float = 0.0
    node_records: tuple[NodeRecord, ...] = ()

    @property
    def lost_nodes(self) -> tuple[str, ...]:
        """The nodes that have failed, as far as SLURM or srun says so."""
        return self.dead_nodes or ((self.lost_node,) if self.lost_node is not None else ())


@dataclass(frozen=True)
class Policy:
    """The part of the config that decides.

    Attributes:
        mode: requeue.mode.
        links_left: jobs of the chain that still wait for this one.
        max_unseen_attempts: requeue.max_unseen_attempts.
        long_attempt_s: seconds after which an attempt may have made progress that is not visible.
        signal_lead_s: seconds before the time limit at which the early warning was requested.
        blame: what decides which nodes are left out.
        local: all ranks run on this machine (cluster.backend=local).
        queue: SLURM has a queue; otherwise whoever started the ranks starts them again.
        in_place: the ranks may start again in the same job (requeue.in_place).
        node_counts: numbers of nodes that the ranks can run on, the best first.
    """

    mode: RequeueMode = RequeueMode.REQUEUE
    links_left: int = 0
    max_attempts_without_progress: int = 3
    max_unseen_attempts: int = 10
    long_attempt_s: float = 3600.0
    signal_lead_s: float = 120.0
    early_s: float = 90.0  # SLURM may warn 60 s early, and looks every 30 s
    blame: BlamePolicy = field(default_factory=BlamePolicy)
    local: bool = False
    queue: bool = True
    in_place: bool = False
    node_counts: tuple[int, ...] = ()


def fault_of_node(evidence: Evidence, reason: Reason) -> NodeRecord | None:
    """Return what an attempt that ended for this reason says against a node; None if it says nothing.

    A crash speaks against a node when it comes within seconds, or with words about broken hardware. It does not when ranks
    failed by themselves on several nodes, or were killed, as for want of memory, or when the disk of the run was full.
    """
    node = evidence.failed_on
    said = evidence.failure[1] if evidence.failure is not None else evidence.set_up or evidence.killed or ""
    if reason is Reason.NODE_FAILURE or (evidence.lost_nodes and reason in FAILURES):
        node, event = evidence.lost_node or next(iter(evidence.dead_nodes), None), NodeEvent.LOST
        said = "SLURM says that the node failed"  # what its victims said tells nothing of it
    elif reason is Reason.BAD_NODE:
        event = NodeEvent.BAD_START
    elif reason is Reason.HANG:
        said, event = evidence.hang or "", NodeEvent.HANG
    elif reason is Reason.CRASH and HARDWARE.search(said):
        event = NodeEvent.HARDWARE
    elif reason is Reason.CRASH and evidence.disk_full:
        return None
    elif reason is Reason.CRASH and not NOT_THE_NODE.search(said) and len(evidence.failed_nodes) < 2:
        event = NodeEvent.CRASH
        if not BUS_ERROR.search(said) and (evidence.progressed or evidence.lasted_s >= FAST_S):
            return None
    else:
        return None
    if node is None or NODE_NAME.fullmatch(node) is None or not evidence.run:
        return None
    return NodeRecord(
        time=evidence.now,
        node=node,
        event=event,
        run=evidence.run,
        attempt=evidence.number,
        said=short(said or f"exit code {evidence.exit_code}"),
        lasted_s=round(evidence.lasted_s, 1),
        proven=event in (NodeEvent.HARDWARE, NodeEvent.BAD_START)
        or (event is NodeEvent.HANG and evidence.trained)
        or any(node not in nodes for nodes in evidence.trained_on),
    )


def nodes_to_leave_out(fault: NodeRecord | None, evidence: Evidence, policy: BlamePolicy) -> tuple[str, ...]:
    """Return the nodes that the next start should leave out, after this attempt has said this of a node."""
    found = [*evidence.node_records, *([fault] if fault is not None else [])]
    return tuple(each.node for each in blamed_nodes(found, policy, now=evidence.now, run=evidence.run))


def nodes_of_next_start(
    allocated: Sequence[str], counts: Sequence[int], *, refused: Collection[str] = (), avoided: Sequence[str] = ()
) -> tuple[str, ...] | None:
    """Choose the nodes on which the ranks start again in the same job, in SLURM's order.

    Args:
        allocated: the nodes of the job that can be used, in SLURM's order.
        counts: the numbers of nodes that the ranks can run on, the best first.
        refused: nodes that must not be used.
        avoided: nodes that are left out where spare nodes can replace them; those that matter most come first.

    Returns:
        None if too few nodes are left.
    """
    left = [node for node in allocated if node not in refused]
    count = next((count for count in counts if count <= len(left)), None)
    if count is None:
        return None
    last = [node for node in dict.fromkeys(avoided) if node in left]
    order = [node for node in left if node not in last] + last[::-1]
    chosen = order[:count]
    return tuple(node for node in left if node in chosen)
