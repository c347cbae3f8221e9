"""A typed client for the few SLURM commands that this package uses.

Everything that runs `scontrol` and the like is here.

Running takes the command runner as an argument; what the commands print is read by the modules beside this one. It is not
in `launch`, because the job itself asks SLURM, too: why was it told to stop, when does its time end.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from slurmtrain.errors import ClusterError
from slurmtrain.slurm.command_environment import clean_environment
from slurmtrain.slurm.job_facts import GONE, JobFacts, JobState, QueuedJob, changed_dependency, parse_show_job
from slurmtrain.slurm.nodelist import AT_WORK
from slurmtrain.slurm.parse_values import Version, parse_show_config, parse_time, parse_version

Runner = Callable[[Sequence[str], Mapping[str, str]], "subprocess.CompletedProcess[str]"]

# scontrol called from inside a job gets the job's own TERM while it works, and may die of it although the controller
# has done what was asked. Dispositions that are "ignored" survive exec.
SHIELD = ("bash", "-c", 'trap "" TERM USR2; exec "$@"', "shielded")
# Has the commands print times as unix seconds: a local time of the hour that a clock change repeats may be either.
UNIX_TIMES = MappingProxyType({"SLURM_TIME_FORMAT": "%s"})
# Without --all, squeue leaves out jobs of hidden partitions, also to the person whose jobs they are.
SQUEUE = ("squeue", "--noheader", "--all")
NO_VARIABLES: Mapping[str, str] = MappingProxyType({})
GLANCE_S = 2  # longest wait for an answer that nothing depends on
CONFIG_MISSING = "configuration source"  # said where there is neither a slurm.conf nor a controller that hands one out
INSTALL_HINT = "is this a login node? For a throwaway SLURM here: apt-get install slurm-wlm munge, then: sandbox up"

# Words by which SLURM's commands say that the controller has not answered, as opposed to one that refuses: those of
# slurm_errno.c (22.05 to 26.05).
#
# Transient errors after which the request was certainly not processed: the controller was never reached, or has refused
# it unread.
NOT_THERE = (
    "unable to contact slurm controller (connect failure)",
    "connection refused",
    "slurm temporarily unable to accept job",
    "unable to create job record, try again",
    "rate limit exceeded",
    "in standby",
)
# After these the request had been sent, or was being sent: it may have been processed.
UNSURE = (
    "unable to contact slurm controller",  # send, receive and shutdown failure; 22.05 says it without a reason, too
    "message send failure",
    "message receive failure",
    "communication shutdown failure",
    "communication connection failure",
    "unspecified error",
    "protocol authentication error",
    "incompatible versions of client and server",
    "insane message length",
    "socket timed out",
    "transport endpoint is not connected",
    "zero bytes were transmitted",
    "unexpected message received",
    "unexpected missing socket",
    "broken pipe",
    "connection reset",
    "connection timed out",
    "resource temporarily unavailable",
)


def run_command(
    command: Sequence[str], environment: Mapping[str, str], *, timeout_s: float = 60
) -> subprocess.CompletedProcess[str]:
    """Run a command. After `timeout_s` a slow controller counts as one that does not answer."""
    return subprocess.run(
        command, env=dict(environment), capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False
    )


class NoAnswerError(ClusterError):
    """SLURM's controller did not answer: it may have done what was asked, or may not."""


class SlurmClient:
    """A client of one cluster.

    Args:
        slurm_conf: path of a slurm.conf to use instead of the machine's own.
        run: the command runner.

    Attributes:
        named: SLURM's name of the cluster, once it is known.
    """

    named: str | None = None

    def __init__(self, slurm_conf: str | None = None, run: Runner = run_command):
        self.slurm_conf = slurm_conf
        self._environment = clean_environment(os.environ, slurm_conf)
        self._run = run

    @property
    def available(self) -> bool:
        return shutil.which("scontrol", path=self._environment.get("PATH")) is not None

    def job(self, job_id: str) -> JobFacts | None:
        """Return the facts of one job, or None when SLURM does not know it (any more) or cannot be asked."""
        try:
            return self.look(job_id)
        except ClusterError:
            return None

    def look(self, job_id: str) -> JobFacts | None:
        """Return the facts of one job, or None when SLURM says that it does not know it (any more).

        Raises:
            ClusterError: SLURM cannot be asked.
        """
        answer = self._answer(["scontrol", "show", "job", "-o", job_id], before=SHIELD, variables=UNIX_TIMES)
        if answer.returncode == 0:
            facts = parse_show_job(answer.stdout)
            if facts is None:  # nothing, or words of a wrapper around it: that does not say that the job is gone
                raise ClusterError("`scontrol show job` does not say what the job does")
            return facts
        said = (answer.stderr + answer.stdout).lower()
        # SLURM says the second of a task that a known array does not have.
        if "invalid job id" in said or f"job {job_id} not found" in said:
            return None
        raise ClusterError(f"`scontrol show job` failed: {_last_line(answer)}")

    def job_and_clock(self, job_id: str) -> JobFacts | None:
        """Return the facts of one job, as `job`, with the controller's time: they tell how many seconds the job has left.

        `squeue --format=%L` and the RunTime of `scontrol show job` are of no use for that, since they are counted by the clock
        of the machine that asks.
        """
        facts = self.job(job_id)
        try:
            shown = self._call(["scontrol", "show", "config"], before=SHIELD, variables=UNIX_TIMES) if facts else ""
        except ClusterError:
            return facts
        now = re.match(r"Configuration data as of (\S+)", shown)
        return replace(facts, as_of=parse_time(now[1])) if facts and now else facts

    def step_lives(self, step_id: str) -> bool:
        """Return whether a step of a job, as in "17.0", still exists.

        Raises:
            ClusterError: SLURM cannot be asked.
        """
        answer = self._answer(["scontrol", "show", "step", "-o", step_id], before=SHIELD)
        said = (answer.stderr + answer.stdout).lower()
        if answer.returncode != 0 and "invalid job id" not in said and f"step {step_id} not found" not in said:
            raise ClusterError(f"`scontrol show step` failed: {_last_line(answer)}")
        return f"StepId={step_id} " in f"{answer.stdout} "

    def node_states(self, nodes: str) -> dict[str, str]:
        """Return sinfo's words for the states of these nodes, as in "mixed" or "down*", by name.

        Raises:
            ClusterError: SLURM cannot be asked.
        """
        # --all: nodes of hidden partitions, too
        command = ["sinfo", "--noheader", "--all", "--Node", f"--nodes={nodes}", "--format=%N %T"]
        lines = [line.split() for line in self._call(command, before=SHIELD).splitlines()]
        return {words[0]: words[1] for words in lines if len(words) > 1}

    def requeue(self, job_id: str, *, ended: bool = False) -> None:
        """Put a running job back into the queue. One that SLURM has ended by then, for scancel, say, stays as it is.

        slurmctld looks at the job's state and requeues it in one step, so nobody's scancel can come in between.

        Args:
            ended: requeue it whatever its state: one that was cancelled comes back, too.

        Raises:
            ClusterError: SLURM refused, or was not reached; the count of restarts shows whether it was done.
        """
        self._call(["scontrol", "requeue", *([] if ended else ["incomplete"]), job_id], before=SHIELD)

    def update_pending(self, job_id: str, **fields: str) -> None:
        """Change fields of a job that is in the queue or on its way back, by scontrol's names: StartTime="now+8".

        Raises:
            ClusterError: SLURM refused, or was not reached.
        """
        changes = [f"{name}={value}" for name, value in fields.items()]
        self._call(["scontrol", "update", f"JobId={job_id}", *changes], before=SHIELD)

    def queue(self, job_ids: Iterable[str], user: str | None = None) -> dict[str, QueuedJob]:
        """Return the jobs that are still in the queue, by id, with one squeue call for all.

        Args:
            user: the user whose jobs they are; None: this user.

        Raises:
            ClusterError: squeue is missing, or the controller does not answer.
        """
        ids = set(job_ids)
        if not ids:
            return {}
        # All of the user's jobs: a list with one unknown id makes squeue refuse the whole list.
        whose = "--me" if user is None else f"--user={user}"
        answer = self._call([*SQUEUE, whose, "--array", "--format=%A|%F_%K|%T|%S|%r|%k", "--states=all"])
        found: dict[str, QueuedJob] = {}
        for line in answer.splitlines():
            raw, element, state, start, last = [*line.strip().split("|", 4), "", "", "", ""][:5]
            # A reason can have the separator in it. So can a comment, but not the token, which is its last word.
            reason, comment = last.rsplit("|", 1) if "|" in last else (last, "")
            words = () if comment == "(null)" else tuple(comment.split())
            for job_id in (raw, element):
                if job_id in ids:
                    found[job_id] = QueuedJob(state, reason, start, words)
        return found

    def find_by_comment(self, word: str, *, ended: bool = False) -> list[str]:
        """Return the user's jobs whose comment has `word`, or a word that begins with it if it ends with ":".

        An array is one job.

        Args:
            ended: as for `comments`.

        Raises:
            ClusterError: squeue is missing, or the controller does not answer.
        """
        jobs = self.comments(ended=ended)
        if word.endswith(":"):
            return [job for job, words in jobs.items() if any(each.startswith(word) for each in words)]
        return [job for job, words in jobs.items() if word in words]

    def comments(self, *, ended: bool = False) -> dict[str, list[str]]:
        """Return the words of the comments of the user's jobs, by id, without jobs that have no comment.

        An array is one job.

        Args:
            ended: also return jobs that have ended, as long as slurmctld remembers them (MinJobAge).

        Raises:
            ClusterError: squeue is missing, or the controller does not answer.
        """
        of_all = ["--states=all"] if ended else []
        answer = self._call([*SQUEUE, "--me", *of_all, "--format=%F|%T|%k"])
        found: dict[str, list[str]] = {}
        for line in answer.splitlines():
            job_id, state, comment = [*line.strip().split("|", 2), "", ""][:3]
            if comment and (ended or state not in GONE):
                found.setdefault(job_id, comment.split())
        return found

    def configuration(self) -> dict[str, str]:
        """Return slurm.conf as the controller sees it: "MaxArraySize" -> "1001"; empty when it cannot be asked."""
        return parse_show_config(self.glance(["scontrol", "show", "config"]) or "")

    def cluster_name(self) -> str | None:
        """Return SLURM's name of the cluster; None when it cannot be asked. A job has it in its environment."""
        here = (
            os.environ.get("SLURM_CLUSTER_NAME") if "SLURM_JOB_ID" in os.environ and self.slurm_conf is None else None
        )
        self.named = self.named or here or self.configuration().get("ClusterName") or None
        return self.named

    def existing_nodes(self, names: Iterable[str]) -> set[str] | None:
        """Return those of these nodes that the cluster has; None when it cannot be asked."""
        answer = self.glance(["sinfo", "--noheader", "--all", "--Node", f"--nodes={','.join(names)}", "--format=%N"])
        return None if answer is None else set(answer.split())

    def max_array_size(self) -> int | None:
        """Return the greatest number of tasks of an array; None when it cannot be asked."""
        size = self.configuration().get("MaxArraySize", "")
        return int(size) or 1 if size.isdigit() else None  # 0: the cluster has no arrays

    def glance(self, command: Sequence[str], *, within_s: int = GLANCE_S) -> str | None:
        """Return the output of a command that nothing depends on; None when there is none within a time, in seconds."""
        answer = self._glance(command, within_s)
        return answer.stdout if answer is not None and answer.returncode == 0 else None

    def complaint(self, command: Sequence[str]) -> str | None:
        """Return what a command that `glance` had no output of says is wrong; None when it says nothing for two seconds."""
        answer = self._glance(command, GLANCE_S)
        return None if answer is None or answer.returncode == 0 else answer.stderr.strip().rpartition("\n")[2] or None

    def _glance(self, command: Sequence[str], within_s: int) -> subprocess.CompletedProcess[str] | None:
        paths = [shutil.which(name, path=self._environment.get("PATH")) for name in (command[0], "timeout")]
        if None in paths:
            return None
        try:
            return self._run(["timeout", str(within_s), *command], self._environment)
        except (subprocess.TimeoutExpired, OSError):
            return None

    def version(self) -> Version | None:
        """Return the release that the controller runs, as in (24, 5); None when it cannot be asked."""
        return parse_version(self.configuration().get("SLURM_VERSION", ""))

    def pass_on_dependents(self, job_id: str, successor: str | None) -> list[str]:
        """Let the user's jobs that wait for the success of this one wait for its successor instead, and return them.

        To be called before the job has ended: after that they can never start.

        Args:
            successor: None: the job succeeds, and is waited for no more.

        Raises:
            ClusterError: squeue or scontrol is missing or refused.
        """
        # Without --array, and by the id of the array: its tasks all wait for the same, and may be thousands.
        answer = self._call([*SQUEUE, "--me", f"--states={JobState.PENDING}", "--format=%F|%E"])
        changed: dict[str, str] = {}
        for line in answer.splitlines():
            waiting, _, dependency = line.strip().partition("|")
            new = changed_dependency(dependency, job_id, successor)
            if new is not None:
                changed[waiting] = new
        for waiting, new in changed.items():
            self._call(["scontrol", "update", f"JobId={waiting}", f"Dependency={new}"])
        return list(changed)

    def test_only(self, script: Path, options: Sequence[str] = (), *, without: Collection[str] = ()) -> tuple[int, str]:
        """Return exit code and words of `sbatch --test-only`: whether and when this script would start.

        Nothing is submitted.

        Args:
            options: further options; they override the script's own.
            without: variables of this shell that sbatch is not to see.

        Raises:
            ClusterError: sbatch is missing, or the controller does not answer.
        """
        hidden = [word for name in without for word in ("-u", name)]
        command = ["sbatch", "--test-only", *options, str(script)]
        answer = self._answer(command, before=("env", *hidden) if hidden else ())
        return answer.returncode, (answer.stderr or answer.stdout).strip()

    def lacks_nodes(self, partition: str | None) -> bool:
        """Return whether a node of the partition (None: of any) is out of use now, or this cannot be asked.

        It is drained, down or reserved, is powered down just now or boots, or is not listed, as one in a cloud.
        """
        where = [f"--partition={partition}"] if partition else []
        answer = self.glance(["sinfo", "--noheader", "--all", "--format=%a %T", *where])
        there = [line.split() for line in (answer or "").splitlines() if line.strip()]
        # SLURM can start jobs on nodes that are powered down (~), and on those that are planned for a job (-) or shared by
        # topology (+). It leaves out those that power down (!, %) or boot (#, @, ^) until they are done (slurmctld's
        # power_save.c, avail_node_bitmap).
        return not there or any(words[0] != "up" or words[-1].rstrip("~+-") not in AT_WORK for words in there)

    def cancel(self, *job_ids: str) -> None:
        self._call(["scancel", *job_ids])

    def signal(self, job_id: str, name: str) -> None:
        """Send a signal to every rank of the job's steps."""
        # For a task of an array with tasks that still wait, slurmctld (22.05) delivers the signal and reports the task
        # as "in transition", whereupon scancel sends it again and again for minutes. Sent to the steps, it is delivered
        # once.
        steps = self._steps(job_id) if "_" in job_id else []
        self._call(["scancel", f"--signal={name}", *(steps or [job_id])])

    def _steps(self, element: str) -> list[str]:
        """Return the running steps of an array's task, by the task's own job id: "17.0".

        None are returned if SLURM names none.
        """
        own = re.search(r"\bJobId=(\d+)", self.glance(["scontrol", "show", "job", "-o", element]) or "")
        if own is None:
            return []
        shown = self.glance(["scontrol", "show", "step", "-o", own.group(1)]) or ""
        return [f"{own.group(1)}.{number}" for number in re.findall(r"\bStepId=\S+\.(\d+)\b", shown)]

    def release(self, job_id: str) -> None:
        self._call(["scontrol", "release", job_id])

    def _call(
        self, command: Sequence[str], before: Sequence[str] = (), variables: Mapping[str, str] = NO_VARIABLES
    ) -> str:
        answer = self._answer(command, before, variables)
        if answer.returncode != 0:
            silent = is_no_answer(answer.stderr + answer.stdout)
            kind = NoAnswerError if silent else ClusterError
            raise kind(f"`{' '.join(command)}` failed: {_last_line(answer)}")
        return answer.stdout

    def _answer(
        self, command: Sequence[str], before: Sequence[str] = (), variables: Mapping[str, str] = NO_VARIABLES
    ) -> subprocess.CompletedProcess[str]:
        if shutil.which(command[0], path=self._environment.get("PATH")) is None:
            raise ClusterError(f"there is no `{command[0]}` on this machine", hint=INSTALL_HINT)
        try:
            return self._run([*before, *command], {**self._environment, **variables})
        except subprocess.TimeoutExpired:
            raise NoAnswerError(
                f"SLURM's controller did not answer `{command[0]}` within 60 s", hint="try again later"
            ) from None
        except OSError as error:  # no memory or no process left here (EAGAIN), or the programs' file system is away
            raise ClusterError(f"`{command[0]}` cannot be started on this machine: {error.strerror or error}") from None


def _last_line(answer: subprocess.CompletedProcess[str]) -> str:
    lines = (answer.stderr or answer.stdout).strip().splitlines()
    return lines[-1] if lines else f"exit code {answer.returncode}"


def is_no_answer(words: str) -> bool:
    """Return whether a command's words say that the controller has not judged the request."""
    low = words.lower()
    return any(each in low for each in (*NOT_THERE, *UNSURE))
