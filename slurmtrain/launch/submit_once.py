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
from pathlib import Path

from slurmtrain.config import secrets
from slurmtrain.config.frozen import SECRET_REFERENCE, to_values
from slurmtrain.config.schema import Config
from slurmtrain.errors import ClusterError
from slurmtrain.launch.script import directive, set_aside
from slurmtrain.runs.jobs import TOKEN_PREFIX
from slurmtrain.slurm.client import CONFIG_MISSING, INSTALL_HINT, NOT_THERE, UNSURE, SlurmClient
from slurmtrain.slurm.command_environment import submission_environment

log = logging.getLogger(__name__)

# Messages of sbatch, in the words of slurm_errno.c and sbatch.c (22.05 to 26.05), besides those of `slurm.client`.
# `sbatch --test-only` ends with these where sbatch would queue the job: slurmctld's job_allocate() takes them for "not now".
NOT_NOW = (
    "requested nodes are busy",
    "job is in held state",
    "required node not available",
    "breached requested qos usage",
    "requested reservation is in use",
    "requested reservation not usable now",
    "waiting for burst buffer",
    "partition in down state",
    "licenses currently unavailable",
    "ports are in use",
    "maintenance reservation",
    "can not start immediately",
    "immediate execution impossible",
    "switch resources",
)
# The same: the job may wait until others have ended, or for ever.
ABOVE_LIMIT = "violates accounting/qos policy"
NO_SUCH_NODE = "requested node configuration is not available"  # or, to --test-only, none that is up now
TIMED_OUT = 124  # timeout(1)
TRIES = 6  # calls of sbatch; half as many while the controller cannot be reached at all
FIRST_DELAY_S = 1.0  # before the second call; doubled each time
CALL_S = 90  # after which a call of sbatch is given up; whether the job exists is then found out
# Empty answers in a row after which a job counts as not existing, and seconds between them: together longer than slurmctld
# needs for a message that is on its way.
CONFIRMATIONS, CONFIRM_EVERY_S = 3, 2.0
LIMIT = ("submit limit", "submitjoblimit", "job limit", "maxjobcount", "max_job", "job/core submit")
# Limits of the accounting policy other than the number of jobs: a job above them will never be accepted.
OTHER_LIMIT = re.compile(r"\b(?:assoc|qos)\w*(?:limit|perjob|peruser|pernode|peraccount)\b", re.IGNORECASE)
HINTS = {
    CONFIG_MISSING: INSTALL_HINT,
    "account": "cluster.account; `sacctmgr show associations user=$USER` lists yours",
    "partition": "cluster.partition; `sinfo` lists the partitions",
    "qos": "cluster.qos; `sacctmgr show qos` lists them",
    "generic resource": "cluster.gpus_per_node and cluster.gpu_type; `sinfo -N -o '%N %G'` shows the GPUs of each node",
    "node configuration": "cluster.nodes, spare_nodes, cpus_per_task, gpus_per_node or mem_*: there is not that much; see "
    "`sinfo -N -l`",
    "node count": "cluster.nodes, and cluster.spare_nodes besides; `sinfo` shows how many there are",
    "time limit": "cluster.time_limit_min; `sinfo` shows the partition's limit",
    "controller": "the controller does not answer; try again later",
    "array": "MaxArraySize and MaxJobCount; `scontrol show config` shows them",
    "dependency": "the run it waits for has ended or is not in the queue any more",
    "memory": "cluster.mem_*; see `sinfo -N -l`",
}


class NotSubmittedError(ClusterError):
    """The job is certainly not in the queue."""


class RefusedError(NotSubmittedError):
    """SLURM does not accept the job as it is."""

    def __init__(self, said: str, hint: str | None = None):
        found = (each for words, each in HINTS.items() if words in said.lower())
        hint = hint or next(found, "see `man sbatch`; `submit --dry-run` prints what it got")
        super().__init__(f"sbatch refused the job: {said}", hint=hint)


class SubmitLimitError(NotSubmittedError):
    """The user, the account or the cluster may not have more jobs in the queue now."""


class UnclearError(ClusterError):
    """sbatch failed, and that alone does not say that the job is refused.

    Attributes:
        said: its words.
        may_be_there: the job may have been accepted all the same.
        again: the same call may succeed later. Otherwise the words are unknown: if the job is not there, it was refused.
    """

    def __init__(self, said: str, *, may_be_there: bool = True, again: bool = True):
        super().__init__(f"sbatch failed: {said}", hint="try again later")
        self.said, self.may_be_there, self.again = said, may_be_there, again


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
    own = directive(script, "comment")
    with_token = [f"--comment={own} {TOKEN_PREFIX}{token}" if own else f"--comment={TOKEN_PREFIX}{token}", *options]
    aside = set_aside(script, os.environ)
    if aside:
        named = ", ".join(f"{name}={os.environ[name]}" for name in sorted(aside))
        log.info("variables of this shell are ignored, since the config decides: %s", named)

    def look(said: str = "") -> str | None:
        """Return the job with this token, or None when SLURM has said often enough that there is none."""
        answers = failures = 0
        while answers < CONFIRMATIONS:
            if answers or failures:
                time.sleep(CONFIRM_EVERY_S)
            try:
                ended = even_ended or bool(said)
                if (found := next(iter(client.find_by_comment(TOKEN_PREFIX + token, ended=ended)), None)) is not None:
                    return found
                answers += 1
            except ClusterError as error:
                failures += 1
                if failures >= TRIES:
                    before = f"sbatch said: {said}, and then " if said else ""
                    message = f"it is not known whether the job was submitted: {before}{error.message}"
                    raise ClusterError(message, hint=finds_out) from None
        return None

    if looked_for_before and (found := look()) is not None:
        return found
    delay, attempt = FIRST_DELAY_S, 0
    while True:
        attempt += 1
        try:
            return sbatch(script, folder, client.slurm_conf, with_token)
        except UnclearError as error:
            unclear = error
        if unclear.may_be_there:
            log.info("sbatch: %s; checking whether the job exists all the same", unclear.said)
            if (found := look(unclear.said)) is not None:
                return found
        if not unclear.again:
            raise RefusedError(unclear.said)
        if attempt >= (TRIES if unclear.may_be_there else TRIES / 2):
            raise NotSubmittedError(
                f"sbatch failed {attempt} times, the last time with: {unclear.said}; nothing was submitted",
                hint="try again later",
            )
        log.info("sbatch: %s; trying again in about %g s", unclear.said, delay)
        time.sleep(delay * (1 + random.Random().random() / 4))  # many shells must not come back at the same moment
        delay *= 2


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


def check(script: Path, client: SlurmClient, hint_of: Callable[[str], str | None] = lambda said: None) -> None:
    """Ask SLURM whether it would accept this script, without submitting it.

    Transient errors and limits that are reached are no fault of the script; if SLURM does not answer, it will be asked
    again.

    Args:
        hint_of: returns a better hint than the general one for SLURM's words, or None.

    Raises:
        RefusedError: SLURM would refuse; its own words are in the message.
    """
    try:
        code, words = client.test_only(script, without=set_aside(script.read_text(), os.environ))
    except ClusterError:
        return
    low = words.lower()
    if code == 0 or any(each in low for each in NOT_NOW):
        return
    if ABOVE_LIMIT in low:
        log.warning("SLURM would queue this job, but not start it now: %s", _plain(words))
        return
    error = error_of(words, code)
    if isinstance(error, SubmitLimitError) or (isinstance(error, UnclearError) and error.again):
        return
    if NO_SUCH_NODE in low and _may_be_available(script.read_text(), client):
        return
    raise RefusedError(_plain(words), hint_of(words))


def _may_be_available(script: str, client: SlurmClient) -> bool:
    """Return whether SLURM may queue the job though `sbatch --test-only` has found no nodes for it.

    That looks at the nodes that are up now. Of a job that names fewer nodes than it needs, it looks at these alone, though
    SLURM adds others when it starts the job (seen with 22.05 and --nodes=2 --nodelist=n0). Of several partitions, it tests
    the nodes of each by the limits of the first one, such as MaxCPUsPerNode (seen with 22.05; until 25.11.7).
    """
    named = any(directive(script, name) is not None for name in ("nodelist", "nodefile"))
    partition = directive(script, "partition")
    return named or "," in (partition or "") or client.lacks_nodes(partition)


def sbatch(script: str, folder: Path, slurm_conf: str | None, options: Sequence[str]) -> str:
    """Call sbatch once, through submitit, with our script and a clean environment, and return the job id.

    Args:
        options: further options; they override the script's own.

    Raises:
        ClusterError: as `error_of` returns it.
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
            sbatch = ["timeout", "--foreground", str(CALL_S), "sbatch", *options, str(submission_file_path)]
            return ["env", *hidden, *settings, *sbatch]

    folder.mkdir(mode=0o700, exist_ok=True)
    words = io.StringIO()
    try:
        with contextlib.redirect_stderr(words):  # submitit prints sbatch's words; they are in our message instead
            job = ScriptExecutor(folder)._submit_command("train")
    except FailedJobError as error:
        said = str(error).strip() or words.getvalue().strip()
        call = error.__cause__ or error.__context__
        raise error_of(said, call.returncode if isinstance(call, subprocess.CalledProcessError) else 1) from None
    return str(job.job_id)


def _plain(words: str) -> str:
    """Return sbatch's words on one line, without what each line begins with."""
    return "; ".join(re.sub(r"^(sbatch: |error: |allocation failure: )+", "", line) for line in words.splitlines())


def error_of(words: str, code: int) -> ClusterError:
    """Return the error that sbatch's words and exit code mean: a refusal, a limit on jobs, or `UnclearError`."""
    said = _plain(words)
    low = said.lower()
    named = OTHER_LIMIT.findall(said)
    if any(each in low for each in LIMIT) and not (named and not any("submit" in each.lower() for each in named)):
        return SubmitLimitError(
            f"sbatch refused the job: {said}",
            hint="wait until jobs have ended, then repeat the command: it continues from here",
        )
    if code == TIMED_OUT:
        return UnclearError("no answer in time")
    if code < 0 or code > 128:
        return UnclearError(f"it was killed (exit code {code})")
    # Errors of sbatch itself, about its options or its configuration, come before anything is sent.
    before = re.search(r"^sbatch: (error|fatal|unrecognized)\b", words, re.MULTILINE) and "submission failed" not in low
    low = low.rpartition("submission failed: ")[2]  # before it may stand what an earlier try of sbatch's own ended with
    if any(each in low for each in NOT_THERE):
        return UnclearError(said, may_be_there=False)
    if any(each in low for each in UNSURE):
        return UnclearError(said)
    if before or named or low.startswith(("invalid", "requested node")):  # the most frequent of all refusals
        return RefusedError(said)
    return UnclearError(said or f"exit code {code}, without a word", again=False)
