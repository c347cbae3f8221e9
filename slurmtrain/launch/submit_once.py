"""Submit a script to sbatch so that its job exists exactly once.

The controller may accept a job and fail to say so: then sbatch ends with an error, and a plain retry submits the job
twice. So every submission has a token of its own in the job's comment, and before anything is submitted again SLURM is
asked for it. One empty answer proves nothing; several do. It needs no accounting: slurmctld itself remembers a job for
MinJobAge after its end.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import random
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmtrain.config import secrets
from slurmtrain.config.frozen import SECRET_REFERENCE, to_values
from slurmtrain.config.schema import Config
from slurmtrain.errors import ClusterError
from slurmtrain.launch.directives import directive, set_aside
from slurmtrain.runs.job_tokens import TOKEN_PREFIX
from slurmtrain.slurm.answers import NOT_THERE, UNSURE
from slurmtrain.slurm.client import CONFIG_MISSING, INSTALL_HINT, SlurmClient
from slurmtrain.slurm.command_environment import submission_environment

log = logging.getLogger(__name__)

# Messages of sbatch, in the words of slurm_errno.c and sbatch.c (22.05 to 26.05), besides those of `slurm.answers`.
# Answers of slurmctld to a request that it has read and refuses.
REFUSED = (
    *("invalid", "permission denied", "access denied", "not permitted", "no partition specified", "specification"),
    *(
        "more processors requested",
        "requested nodes not in this partition",
        "not available",
        "job script not specified",
    ),
    *("too long", "dependency", "not supported", "presently disabled", "submissions disabled", "only batch jobs"),
    *(
        "memory required by task",
        "violates accounting/qos policy",
        "reservation",
        "breached",
        "burst buffer",
        "licenses",
    ),
    *("working directory", "partition in down state", "heterogeneous", "requested gres option", "multiple partition"),
    *("job array", "duplicate", "environment is missing", "quota", "cannot request", "can not", "requires more ports"),
)
# `sbatch --test-only` ends with these where sbatch would queue the job: slurmctld's job_allocate() takes them for "not now".
NOT_NOW = (
    *(
        "requested nodes are busy",
        "job is in held state",
        "required node not available",
        "breached requested qos usage",
    ),
    *("violates accounting/qos policy", "requested reservation is in use", "requested reservation not usable now"),
    *("waiting for burst buffer", "partition in down state", "licenses currently unavailable", "ports are in use"),
    *("maintenance reservation", "can not start immediately", "immediate execution impossible", "switch resources"),
)
NO_SUCH_NODE = "requested node configuration is not available"  # or, to --test-only, none that is up now
TIMED_OUT = 124  # timeout(1)
LIMIT = ("submit limit", "submitjoblimit", "job limit", "maxjobcount", "max_job", "job/core submit")
# Limits of the accounting policy other than the number of jobs: a job above them will never be accepted.
OTHER_LIMIT = re.compile(r"\b(?:assoc|qos)\w*(?:limit|perjob|peruser|pernode|peraccount)\b", re.IGNORECASE)


class NotSubmittedError(ClusterError):
    """The job is certainly not in the queue."""


class RefusedError(NotSubmittedError):
    """SLURM does not accept the job as it is."""


class SubmitLimitError(NotSubmittedError):
    """The user, the account or the cluster may not have more jobs in the queue now."""


@dataclass(frozen=True)
class Patience:
    """The limits of how long to keep trying.

    Attributes:
        tries: greatest number of calls of sbatch; half as many while the controller cannot be reached at all.
        first_delay_s: seconds before the second call; doubled each time.
        call_s: seconds after which a call of sbatch is given up; whether the job exists is then found out.
        confirmations: number of empty answers in a row after which a job counts as not existing.
        confirm_every_s: seconds between them. Together longer than slurmctld needs for a message that is on its way.
    """

    tries: int = 6
    first_delay_s: float = 1.0
    call_s: int = 90
    confirmations: int = 3
    confirm_every_s: float = 2.0


def submit_exactly_once(
    script: str,
    folder: Path,
    token: str,
    client: SlurmClient,
    *,
    options: Sequence[str] = (),
    looked_for_before: bool = False,
    even_ended: bool = True,
    finds_out: str = "the same command again looks for it first",
    patience: Patience = Patience(),
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Submit `script` and return the job id, for an array that of the array.

    Args:
        folder: where submitit keeps its files.
        token: this submission's own; a call with the same token finds the job that the first has submitted.
        options: further options of sbatch; they override the script's.
        looked_for_before: an earlier call with this token may have been cut short, so look for its job first.
        even_ended: that job counts although it has ended since; False: the caller knows that what it was for has ended, too.
        finds_out: hint on what to do if it stays unknown whether the job exists.

    Raises:
        NotSubmittedError: sbatch refused, in its own words, or could not be reached; or no more jobs may be submitted now.
        ClusterError: it is not known whether the job exists.
    """
    with_token = [comment_option(script, token), *options]
    aside = set_aside(script, os.environ)
    if aside:
        named = ", ".join(f"{name}={os.environ[name]} ({owner})" for name, owner in sorted(aside.items()))
        log.info("variables of this shell are ignored, since the config decides: %s", named)
    if looked_for_before:
        _wait_for_orphans(token, patience, sleep)
        found = look_for(token, client, patience, sleep, finds_out, even_ended=even_ended)
        if found is not None:
            return found
    delay = patience.first_delay_s
    attempt = 0
    while True:
        attempt += 1
        try:
            return sbatch(script, folder, client.slurm_conf, with_token, call_s=patience.call_s)
        except TransientError as error:
            transient = error
        if transient.may_be_there:
            log.info("sbatch: %s; checking whether the job exists all the same", transient.said)
            found = look_for(token, client, patience, sleep, finds_out, transient.said)
            if found is not None:
                return found
        if isinstance(transient, UnknownRefusalError):  # it is not there, so whatever was meant, it was no
            raise transient.as_refusal()
        if attempt >= (patience.tries if transient.may_be_there else patience.tries / 2):
            raise NotSubmittedError(
                f"sbatch failed {attempt} times, the last time with: {transient.said}; nothing was submitted",
                hint="try again later",
            )
        log.info("sbatch: %s; trying again in about %g s", transient.said, delay)
        sleep(delay * (1 + random.Random().random() / 4))  # many shells must not come back at the same moment
        delay *= 2


def comment_option(script: str, token: str) -> str:
    """Return the option that adds a token to the job's comment, after the user's own."""
    own = directive(script, "comment")
    return f"--comment={own} {TOKEN_PREFIX}{token}" if own else f"--comment={TOKEN_PREFIX}{token}"


def export_option(config: Config) -> list[str]:
    """Return the option by which sbatch exports the secrets if SBATCH_EXPORT tells it not to export everything.

    Raises:
        ConfigError: the variable or file of a secret does not exist.
    """
    secrets.read(config.secrets)
    names = [name for name, source in config.secrets.items() if source == secrets.ENV]
    names += SECRET_REFERENCE.findall(json.dumps(to_values(config)))
    told = os.environ.get("SBATCH_EXPORT", "ALL").split(",")
    if not names or "ALL" in told:
        return []
    return ["--export=" + ",".join(dict.fromkeys([*(word for word in told if word not in ("NONE", "NIL")), *names]))]


def check(script: Path, client: SlurmClient) -> None:
    """Ask SLURM whether it would accept this script, without submitting it.

    Transient errors and limits that are reached are no fault of the script; if SLURM does not answer, it will be asked
    again.

    Raises:
        RefusedError: SLURM would refuse; its own words are in the message.
    """
    try:
        code, words = client.test_only(script, without=list(set_aside(script.read_text(), os.environ)))
    except ClusterError:
        return
    low = words.lower()
    if code == 0 or any(each in low for each in NOT_NOW):
        return
    error = refusal(words, code, 60)
    if isinstance(error, RefusedError):
        if NO_SUCH_NODE in low and _may_be_available(script.read_text(), client):
            return
        raise error


def _may_be_available(script: str, client: SlurmClient) -> bool:
    """Return whether SLURM may queue the job though `sbatch --test-only` has found no nodes for it.

    That looks at the nodes that are up now. Of a job that names fewer nodes than it needs, it looks at these alone, though
    SLURM adds others when it starts the job (seen with 22.05 and --nodes=2 --nodelist=n0). Of several partitions, it tests
    the nodes of each by the limits of the first one, such as MaxCPUsPerNode (seen with 22.05; until 25.11.7).
    """
    named = any(directive(script, name) is not None for name in ("nodelist", "nodefile"))
    partition = directive(script, "partition")
    return named or "," in (partition or "") or client.lacks_nodes(partition)


class TransientError(ClusterError):
    """sbatch failed with a transient error.

    Attributes:
        may_be_there: the job may have been accepted all the same.
    """

    def __init__(self, said: str, *, may_be_there: bool):
        super().__init__(f"sbatch failed: {said}", hint="try again later")
        self.said, self.may_be_there = said, may_be_there


class UnknownRefusalError(TransientError):
    """sbatch failed with words that are in none of the lists: the job may exist; if it does not, it was refused."""

    def __init__(self, said: str):
        super().__init__(said, may_be_there=True)

    def as_refusal(self) -> RefusedError:
        return RefusedError(f"sbatch refused the job: {self.said}", hint=advice(self.said))


def look_for(
    token: str,
    client: SlurmClient,
    patience: Patience,
    sleep: Callable[[float], None],
    finds_out: str,
    said: str = "",
    *,
    even_ended: bool = True,
) -> str | None:
    """Return the job with this token, or None when SLURM has said often enough that there is none.

    Args:
        even_ended: as for `submit_exactly_once`.

    Raises:
        ClusterError: SLURM cannot be asked.
    """
    answers = failures = 0
    while True:
        try:
            found = next(iter(client.find_by_comment(TOKEN_PREFIX + token, ended=even_ended)), None)
            answers += 1
        except ClusterError as error:
            found = None
            failures += 1
            if failures >= patience.tries:
                before = f"sbatch said: {said}, and then " if said else ""
                raise ClusterError(
                    f"it is not known whether the job was submitted: {before}{error.message}",
                    hint=finds_out,
                ) from None
        if found is not None or answers >= patience.confirmations:
            return found
        sleep(patience.confirm_every_s)


def _wait_for_orphans(token: str, patience: Patience, sleep: Callable[[float], None]) -> None:
    """Wait for an sbatch that a killed shell has left behind on this host, and whose job may still be accepted."""
    told = False
    for _ in range(2 * patience.call_s):
        if not _runs_somewhere(TOKEN_PREFIX + token):
            return
        if not told:
            log.info("an sbatch left behind by a killed shell is still running; waiting for it")
            told = True
        sleep(1.0)


def _runs_somewhere(word: str) -> bool:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        comments = b" ".join(each.removeprefix(b"--comment=") for each in words if each.startswith(b"--comment="))
        if b"sbatch" in words and word.encode() in comments.split():
            return True
    return False


def sbatch(script: str, folder: Path, slurm_conf: str | None, options: Sequence[str], *, call_s: int = 90) -> str:
    """Call sbatch once, through submitit, with our script and a clean environment, and return the job id.

    Args:
        options: further options; they override the script's own.

    Raises:
        TransientError, SubmitLimitError, ClusterError: as `refusal` returns them.
    """
    from submitit.core.utils import FailedJobError
    from submitit.slurm.slurm import SlurmExecutor

    class ScriptExecutor(SlurmExecutor):
        """An executor of submitit that submits the script from our one template instead of its own."""

        @classmethod
        def affinity(cls) -> int:
            return 2  # the caller has looked for SLURM's commands; submitit would require srun on our own PATH

        def _make_submission_file_text(self, command: str, uid: str) -> str:
            return script

        def _make_submission_command(self, submission_file_path: Path) -> list[str]:
            # A job submitted from inside another one must not inherit its layout, and the config decides before the shell.
            wanted = submission_environment(os.environ, slurm_conf)
            aside = set_aside(script, os.environ)
            hidden = [word for name in os.environ if name not in wanted or name in aside for word in ("-u", name)]
            settings = [f"{name}={value}" for name, value in wanted.items() if os.environ.get(name) != value]
            # Run in the foreground: Ctrl-C has to reach sbatch, or it would go on after the person has given up.
            sbatch = ["timeout", "--foreground", str(call_s), "sbatch", *options, str(submission_file_path)]
            return ["env", *hidden, *settings, *sbatch]

    folder.mkdir(mode=0o700, exist_ok=True)
    words = io.StringIO()
    try:
        with contextlib.redirect_stderr(words):  # submitit prints sbatch's words; they are in our message instead
            job = ScriptExecutor(folder)._submit_command("train")
    except FailedJobError as error:
        said = str(error).strip() or words.getvalue().strip()
        call = error.__cause__ or error.__context__
        raise refusal(said, call.returncode if isinstance(call, subprocess.CalledProcessError) else 1, call_s) from None
    return str(job.job_id)


def _without_prefix(words: str) -> str:
    return "; ".join(re.sub(r"^(sbatch: |allocation failure: )(error: )?", "", line) for line in words.splitlines())


def refusal(words: str, code: int, call_s: int) -> ClusterError:
    """Return the error that sbatch's words and exit code mean.

    It is a limit, a transient error, a refusal with a hint, or `UnknownRefusalError`.
    """
    said = _without_prefix(words)
    low = said.lower()
    named = OTHER_LIMIT.findall(said)
    if any(each in low for each in LIMIT) and not (named and not any("submit" in each.lower() for each in named)):
        return SubmitLimitError(
            f"sbatch refused the job: {said}",
            hint="wait until jobs have ended, then repeat the command: it continues from here",
        )
    if code == TIMED_OUT:
        return TransientError(f"no answer within {call_s} s", may_be_there=True)
    if code < 0 or code > 128:
        return TransientError(f"it was killed (exit code {code})", may_be_there=True)
    before = re.search(r"^sbatch: (error|fatal|unrecognized)\b", words, re.MULTILINE) and "submission failed" not in low
    low = low.rpartition("submission failed: ")[2]  # before it may stand what an earlier try of sbatch's own ended with
    if any(each in low for each in NOT_THERE):
        return TransientError(said, may_be_there=False)
    if any(each in low for each in UNSURE):
        return TransientError(said, may_be_there=True)
    # Errors of sbatch itself, about its options or its configuration, come before anything is sent.
    if before or any(each in low for each in REFUSED):
        return RefusedError(f"sbatch refused the job: {said}", hint=advice(said))
    return UnknownRefusalError(said or f"exit code {code}, without a word")


def advice(said: str) -> str:
    """Return what to change, for the most frequent messages of sbatch."""
    for words, hint in {
        CONFIG_MISSING: INSTALL_HINT,
        "account": "cluster.account; `sacctmgr show associations user=$USER` lists yours",
        "partition": "cluster.partition; `sinfo` lists the partitions",
        "qos": "cluster.qos; `sacctmgr show qos` lists them",
        "node configuration": "cluster.nodes, spare_nodes, cpus_per_task, gpus_per_node or mem_*: there is not that much; see "
        "`sinfo -N -l`",
        "node count": "cluster.nodes, and cluster.spare_nodes besides; `sinfo` shows how many there are",
        "time limit": "cluster.time_limit_min; `sinfo` shows the partition's limit",
        "controller": "the controller does not answer; try again later",
        "array": "MaxArraySize and MaxJobCount; `scontrol show config` shows them",
        "dependency": "the run it waits for has ended or is not in the queue any more",
        "memory": "cluster.mem_*; see `sinfo -N -l`",
    }.items():
        if words in said.lower():
            return hint
    return "see `man sbatch`; `submit --dry-run` prints what it got"
