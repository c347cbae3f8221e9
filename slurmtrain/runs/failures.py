"""What is on record of the failures of an attempt: by its ranks, which each write a file, by the watchdog, and by srun.

Nothing has to be agreed on in the error path, so ranks record what each of them has seen. Which of these failures came
first, and on which node, is decided from all of them together, when the last rank has exited.
"""

from __future__ import annotations

import contextlib
import logging
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from slurmtrain.errors import EXIT_CONFIG, EnvironmentMismatchError, UnreadableRecordError
from slurmtrain.runs.attempt_dir import AttemptDir
from slurmtrain.runs.attempts import Attempt, read_attempt
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.environment import own_job_id, own_node_name
from slurmtrain.slurm.nodelist import expand_nodelist
from slurmtrain.slurm.parse_values import parse_time
from slurmtrain.system import records
from slurmtrain.system.files import write_json
from slurmtrain.system.gpu import broken_gpus
from slurmtrain.system.records import Count, Time, read_json, typed, typed_or_none

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Failure:
    """What a rank says of its own failure.

    Attributes:
        because_of_peer: another rank had exited, and its failure came first.
        superseded: a newer incarnation of the run is at work, and this one may not commit any more.
        on_any_node: it is the same on every node, such as a checkpoint that does not fit the config.
        diverged: numbers of the training are not finite, or its loss has jumped.
        bad_nodes: nodes that cannot do what the job needs, as the checks before training have found.
    """

    exit_code: Count
    sentence: str
    because_of_peer: bool = False
    superseded: bool = False
    on_any_node: bool = False
    diverged: bool = False
    bad_nodes: tuple[str, ...] = ()


def record_failure(attempt_dir: AttemptDir, rank: int, failure: Failure, *, when: float | None = None) -> None:
    """Record a rank's failure.

    Args:
        when: when it failed, in unix seconds; None: now.

    Raises:
        OSError: the record cannot be written.
    """
    moment = time.time() if when is None else when
    record = RankFailure(**vars(failure), rank=rank, time=moment, node=own_node_name())
    attempt_dir.write_record(attempt_dir.failure_file(rank), asdict(record))
    if failure.because_of_peer or failure.superseded or failure.on_any_node or failure.exit_code == EXIT_CONFIG:
        return
    # It takes a moment: the record above is there already.
    broken = broken_gpus(before=_broken_before(attempt_dir, record.node))
    if broken is not None:
        told = replace(record, sentence=f"{failure.sentence} ({broken})")
        write_json(attempt_dir.failure_file(rank), asdict(told))


@dataclass(frozen=True)
class _CheckedNode:
    """The part of preflight.json on a node: what was broken on its GPUs before training; None: it was not looked at."""

    node: str | None = None
    broken: tuple[str, ...] | None = None


def _broken_before(attempt_dir: AttemptDir, node: str | None) -> list[str] | None:
    """Return what the checks before training have seen to be broken on the GPUs of a node; None: they were not made there."""
    try:
        record = read_json(attempt_dir.preflight_file) or {}
    except UnreadableRecordError:
        return None
    checked = typed_or_none(list[_CheckedNode], record.get("nodes")) or []
    known = [each.broken for each in checked if node is not None and each.node == node and each.broken is not None]
    return [words for broken in known for words in broken] if known else None


@dataclass(frozen=True, kw_only=True)
class RankFailure(Failure):
    """The failure of a rank, as it is on record.

    Attributes:
        time: when it failed, in unix seconds.
        node: the rank's node, by SLURM's name; None if it is not known.
    """

    rank: Count
    time: Time
    node: str | None = None

    @property
    def in_words(self) -> str:
        return f"rank {self.rank}: {self.sentence}"


@dataclass(frozen=True)
class Failures:
    """The failures of all ranks of an attempt that have left a record."""

    ranks: tuple[RankFailure, ...] = ()

    @classmethod
    def read(cls, attempt_dir: AttemptDir) -> Failures:
        """Read the records of all ranks. One that cannot be used is left out: the others tell what it would."""
        found = []
        for path in attempt_dir.failure_files():
            try:
                if (values := read_json(path)) is not None:
                    found.append(typed(RankFailure, values, path))
            except UnreadableRecordError as error:
                log.warning("a record of a failure is left out: %s", error.message)
        return cls(tuple(found))

    def first(self, *, because_of_peer: bool = False) -> RankFailure | None:
        """Return the failure of the first rank that failed: by itself, or because another rank had exited."""
        chosen = [each for each in self.ranks if each.because_of_peer == because_of_peer]
        # What a node was found unfit for tells more than what has followed from it.
        return min(chosen, key=lambda each: (not each.bad_nodes, each.time), default=None)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes on which a rank failed by itself."""
        own = (each.node for each in self.ranks if not each.because_of_peer)
        return tuple(dict.fromkeys(node for node in own if node))

    def unfit_nodes(self, nodes: Sequence[str]) -> tuple[str, ...]:
        """Return the nodes that the checks before training have found unfit; none if that is most: then none is at fault.

        Args:
            nodes: those of the attempt; others are left out.
        """
        bad = tuple(dict.fromkeys(node for each in self.ranks for node in each.bad_nodes if node in nodes))
        return bad if len(nodes) == 1 or 2 * len(bad) <= len(nodes) else ()


@dataclass(frozen=True)
class Hang:
    """A hang that ended an attempt.

    Attributes:
        nodes, ranks: those that did not come to where the others waited; () if all waited for each other.
        time: when it was found, in unix seconds.
        since: when a rank made progress for the last time; None if it is not known.
    """

    sentence: str
    nodes: tuple[str, ...] = ()
    ranks: tuple[Count, ...] = ()
    time: Time = 0.0
    since: Time | None = None

    @property
    def node(self) -> str | None:
        """The node at fault; None if all waited for each other, or it is no fault of a single one."""
        return self.nodes[0] if len(self.nodes) == 1 else None


def record_hang(
    attempt_dir: AttemptDir, *, sentence: str, nodes: Sequence[str], ranks: Sequence[int], since: float | None = None
) -> None:
    """Record a hang that was found just now, by the fields of `Hang`."""
    write_json(attempt_dir.hang_file, asdict(Hang(sentence, tuple(nodes), tuple(ranks), time.time(), since)))


def found_hang(attempt_dir: AttemptDir) -> Hang | None:
    """Return the hang that the watchdog has found in an attempt; None if it has found none."""
    return typed_or_none(Hang, read_json(attempt_dir.hang_file))


# What srun and slurmstepd say of the end of tasks, which could not say it themselves: killed ones, lost nodes.


SRUN_LOG_BYTES = 16 << 20  # read from the end of srun's log, where it reports killed tasks
JOB_LOG_BYTES = 65536  # read from the end of a job's log
RANK_LOG_BYTES = 65536  # read from the end of the log of a rank that was aborted
LAST_WORDS_LENGTH = 200
ABORTED = (-signal.SIGABRT, 128 + signal.SIGABRT)  # exit codes of a program of the user's own that SIGABRT has ended
OWN_LINE = re.compile(r"(\S+ \S+ rank \d+ )?slurmtrain: (error: )?")  # as system/logs.py writes them


@dataclass(frozen=True)
class SrunLog:
    """The end of what srun has written to stderr for an attempt; empty if there is none."""

    text: str = ""

    @classmethod
    def read(cls, attempt_dir: AttemptDir) -> SrunLog:
        """Read the log of an attempt, as far as it can be read."""
        try:
            return cls(records.read_tail(attempt_dir.srun_log, SRUN_LOG_BYTES).decode(errors="replace"))
        except UnreadableRecordError:
            return cls()

    @property
    def killed_tasks(self) -> str | None:
        """The words of srun on a task that was killed, since that rank could not leave a record; None if there are none."""
        words = r"srun: error: (\S+: tasks? [\d,-]+: (?:Killed|Segmentation fault|Aborted|Bus error|Out Of Memory).*)"
        match = re.search(words, self.text)
        if match is None:  # its slurmstepd was killed; srun (22.05) ends with 0 all the same
            match = re.search(
                r"srun: error: Aborting, (io error and missing step on node.*|.*missing step.*)", self.text
            )
        return match.group(1).strip() if match else None

    def nodes_of_tasks(self, how: str) -> list[str]:
        """Return the nodes of the tasks that have ended in a way that srun reports, in its order.

        Args:
            how: a regular expression for srun's words: "Exited with exit code 1".
        """
        nodes: dict[str, None] = {}
        words = rf"^srun: error: (\S+): tasks? [\d,-]+: (?:{how})\b"
        for hosts in re.findall(words, self.text, re.MULTILINE):
            with contextlib.suppress(EnvironmentMismatchError):
                nodes |= dict.fromkeys(expand_nodelist(hosts))
        return list(nodes)

    @property
    def node_without_tasks(self) -> str | None:
        """The node on which srun could not start its tasks, by its own words; None if it started them on all."""
        return self._named(r"srun: error: Task launch for StepId=\S+ failed on node ([^\s:]+):")

    @property
    def lost_node(self) -> str | None:
        """The node whose failure srun has reported; None if it has reported none."""
        return self._named(r"^srun: error: Node failure on ([A-Za-z0-9_.-]+)$")

    def _named(self, words: str) -> str | None:
        match = re.search(words, self.text, re.MULTILINE)
        return match.group(1) if match else None


KILLS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS)  # for which `killed_tasks` looks


def record_killed_task(attempt_dir: AttemptDir, node: str, rank: int, number: int) -> None:
    """Record which signal has ended a rank, in srun's words, where another launcher is in srun's place.

    Args:
        number: that of the signal; nothing is recorded of one by which ranks are told to stop.
    """
    if number in KILLS:
        with contextlib.suppress(OSError), attempt_dir.srun_log.open("a") as file:  # a full disk
            file.write(f"srun: error: {node}: task {rank}: {signal.strsignal(number)}\n")


def node_of_killed_tasks(killed: str) -> str | None:
    """Return the node that srun's words on killed tasks name, as in "n1: task 3: Killed"; None if it is not just one."""
    match = re.match(r"(\S+): tasks? [\d,-]+: ", killed)
    node = match.group(1) if match else ""  # a "missing step on node 1" counts the nodes of the step
    return node if node and not set("[,") & set(node) else None


def with_last_words(killed: str, attempt_dir: AttemptDir) -> str:
    """Add to srun's words on tasks that have aborted why the first of them did, as far as it has said so."""
    match = re.search(r": tasks? (\d+)[\d,-]*: Aborted", killed)
    said = last_words(attempt_dir, int(match.group(1))) if match is not None else None
    return killed if said is None else f"{killed} ({said})"


def last_words(attempt_dir: AttemptDir, rank: int) -> str | None:
    """Return why a rank was ended by SIGABRT, by its log; None if it has not said so.

    A thread of torch's ends the process so when the GPU has failed, or a collective of NCCL has, mostly before the rank
    itself hears of it. What it says then is all that is known.
    """
    try:
        log = records.read_tail(attempt_dir.rank_log(rank), RANK_LOG_BYTES).decode(errors="replace")
    except UnreadableRecordError:
        return None
    _, _, end = log.rpartition("terminate called after throwing an instance of")
    said = re.search(r"^ *what\(\): +(?:\[PG [^]]*\] *)?(?:.* terminated with exception: )?(.+)", end, re.MULTILINE)
    return said.group(1).strip()[:LAST_WORDS_LENGTH] if said is not None else None


def in_its_words(first: RankFailure | None, attempt_dir: AttemptDir, *, program: bool) -> tuple[str, str | None]:
    """Return the sentence on the first failure with what its rank has printed last; of a program, also its code and that line.

    Args:
        program: the ranks run a program of the user's own, whose last line says why it has failed.
    """
    if first is None:
        return "", None
    sentence, code = first.in_words, first.exit_code
    if code in ABORTED:
        said = last_words(attempt_dir, first.rank)
        return (sentence if said is None else f"{sentence} ({said})"), None
    said = last_line(attempt_dir, first.rank) if program and not first.because_of_peer else None
    if said is None:
        return sentence, None
    if " ended with signal " in first.sentence:  # why it died: what it printed last need not have to do with it
        return f"{sentence} (last line: {said})", f"{code}: {said}"
    # The program has said itself why, and not only its wrapper how it ended.
    told = " ended with " not in first.sentence
    return (sentence if told or said in sentence else f"{said} ({sentence})"), f"{code}: {said}"


def last_line(attempt_dir: AttemptDir, rank: int) -> str | None:
    """Return the last line that a rank's program has printed; None if that cannot be read, or is an error of our own."""
    try:
        log = records.read_tail(attempt_dir.rank_log(rank), RANK_LOG_BYTES).decode(errors="replace")
    except UnreadableRecordError:
        return None
    for line in map(str.strip, reversed(log.splitlines())):
        own = OWN_LINE.match(line)
        if own is not None and own[2] is not None:
            return None
        if line and own is None and not line.startswith(("hint: ", "srun: ", "slurmstepd")):
            return line[:LAST_WORDS_LENGTH]
    return None


def cancelled_due_to(log: Path, since: float) -> str | None:
    """Return SLURM's reason for ending a job, as "PREEMPTION", "JOB REQUEUE", "TIME LIMIT"; None if none can be read.

    Args:
        log: log of the job, to which slurmstepd writes the reason on the node; it also has the lines of earlier starts.
        since: unix seconds; earlier lines are of an earlier attempt.
    """
    try:
        text = records.read_tail(log, JOB_LOG_BYTES).decode(errors="replace")
    except UnreadableRecordError:
        return None
    words = re.findall(r"error: \*\*\* JOB \S+ ON \S+ CANCELLED AT (\S+) DUE TO ([A-Z ]+) \*\*\*", text)
    later = [why for at, why in words if (parse_time(at) or 0.0) >= int(since)]
    return later[-1] if later else None


def was_preempted(run_dir: RunDir, attempt: Attempt) -> bool:
    """Return whether SLURM has said that it preempts this attempt, to rank 0 or in the job's log.

    Without a GraceTime, which is SLURM's default, only the log says so: the job is requeued in the same moment, and
    with that the time of its preemption is gone from what `scontrol show job` prints.
    """
    if attempt.facts_when_told is not None and attempt.facts_when_told.preempted:
        return True
    log = run_dir.job_log(attempt.job_id or own_job_id() or "")
    before = read_attempt(run_dir, attempt.number - 1) if attempt.number > 1 else None
    since = max(attempt.started, (before.ended or 0.0) if before is not None else 0.0)
    return log is not None and cancelled_due_to(log, since) == "PREEMPTION"
