"""What cancel, preempt, requeue and resume share: their arguments, their run, and its jobs."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from slurmtrain.choices import Backend
from slurmtrain.cli.arguments import RUN_HELP, Parser
from slurmtrain.cli.json_output import print_json
from slurmtrain.errors import ClusterError, UsageError
from slurmtrain.report.status import RunState
from slurmtrain.runs import lookup, ownership
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.system.file_claims import Owner, claimed

log = logging.getLogger(__name__)

CHANGES_HELP = "continue with this value of a field of the config; train.steps=+N are N steps more"
OVERRIDE = re.compile(r"[+~]{0,2}\w[\w.@-]*=")  # not a path with a = in it


def parser_of(verb: str) -> Parser:
    """Return the parser of a verb for one run, with RUN and --json."""
    parser = Parser.of(verb)
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    parser.add_argument("--json", action="store_true", help="print the answer as JSON, for a program")
    return parser


def split_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the KEY=VALUE among the words of a verb for one run, and the other words.

    A --set may stand before each KEY=VALUE, or before several.

    Raises:
        UsageError: there is a --set without KEY=VALUE.
    """
    overrides: list[str] = []
    others: list[str] = []
    for index, word in enumerate(words):
        if word == "--set":
            if index + 1 == len(words) or not OVERRIDE.match(words[index + 1]):
                raise UsageError("--set needs a KEY=VALUE after it", hint="or leave it out: optim.lr=1e-4")
        elif word.startswith("--set="):
            overrides.append(word.removeprefix("--set="))
        else:
            (overrides if OVERRIDE.match(word) else others).append(word)
    return overrides, others


def open_run(reference: str) -> RunDir:
    """Return the run that a person means by RUN, after a look that it is theirs and can be read whole."""
    run_dir = lookup.find(reference, lookup.runs_root())
    ownership.require_own(run_dir)
    run_dir.info(whole=True)
    return run_dir


def say(run_dir: RunDir, said: str, *, as_json: bool) -> None:
    """Print what was done to a run, for a person or for a program."""
    if as_json:
        print_json({"run": run_dir.id, "said": said, "job_ids": run_dir.info()["job_ids"]})
    else:
        print(said)


@contextlib.contextmanager
def claimed_alone(run_dir: RunDir) -> Iterator[None]:
    """Claim the right to resume this run.

    A process that finds it ended must record its next job before another process looks.
    """

    def busy(owner: Owner) -> None:
        who = f"process {owner['pid']} on {owner['host']}"
        if run_dir.info()["backend"] == Backend.LOCAL:  # it is at it until the run has ended
            raise ClusterError(f"{who} is running {run_dir.id} already", hint=f"status {run_dir.id}")
        log.info("%s is resuming it; waiting for that", who)

    with claimed(claim_folder(run_dir), busy):
        yield


def claim_folder(run_dir: RunDir) -> Path:
    """Return the folder of the claim to resume the run: that of all runs of a sweep, which `sweep retry` resumes together."""
    in_sweep = lookup.is_sweep(run_dir.path.parent) and run_dir.info()["backend"] == Backend.SLURM
    return run_dir.path.parent / "arrays" if in_sweep else run_dir.path


def jobs_in_queue(run_dir: RunDir, now: RunState) -> list[str]:
    """Return all jobs of the run that SLURM still has; none if it has no jobs, or SLURM cannot be asked."""
    if run_dir.info()["backend"] == Backend.LOCAL or now.slurm_error is not None:
        return []
    from slurmtrain.launch.own_jobs import in_queue

    return in_queue([run_dir], client(run_dir))[run_dir.id]


def has_no_job(run_dir: RunDir, now: RunState) -> bool:
    """Return whether the run is not a job of SLURM."""
    return run_dir.info()["backend"] == Backend.LOCAL or now.job_id is None


def client(run_dir: RunDir) -> SlurmClient:
    """Return the client of the SLURM that the run was submitted to."""
    return SlurmClient(run_dir.slurm_conf())
