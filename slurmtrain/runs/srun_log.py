"""What srun and slurmstepd say of the end of a job's tasks, which could not say it themselves: killed ones, lost nodes."""

from __future__ import annotations

import contextlib
import re
import signal
from dataclasses import dataclass
from pathlib import Path

from slurmtrain.errors import EnvironmentMismatchError, UnreadableRecordError
from slurmtrain.runs.attempt_dir import AttemptDir
from slurmtrain.runs.failures import RankFailure
from slurmtrain.slurm.nodelist import expand_nodelist
from slurmtrain.slurm.parse_values import parse_time
from slurmtrain.system import records

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
    sentence, code = first.sentence, first.failure.exit_code
    if code in ABORTED:
        said = last_words(attempt_dir, first.rank)
        return (sentence if said is None else f"{sentence} ({said})"), None
    said = last_line(attempt_dir, first.rank) if program and not first.failure.because_of_peer else None
    if said is None:
        return sentence, None
    return (sentence if said in sentence else f"{said} ({sentence})"), f"{code}: {said}"


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
        if line and own is None and not line.startswith("hint: "):
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
