"""The life of a run in one job, or in one command on this machine: attempt after attempt."""

from __future__ import annotations

import contextlib
import logging
import subprocess

from slurmtrain.choices import RequeueMode
from slurmtrain.errors import EXIT_CONFIG, EXIT_REQUEUE
from slurmtrain.runs.decide import AttemptOutcome
from slurmtrain.runs.reasons import Reason, Verdict
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.supervise.alone import watched
from slurmtrain.supervise.platforms import Platform

log = logging.getLogger(__name__)


def supervise(run_dir: RunDir, platform: Platform, set_up_failure: str | None = None) -> int:
    """Run attempts until the ranks are not to start again here, and return the exit code of the job.

    Args:
        set_up_failure: why no rank can be started here, in words; None: the set-up has worked.
    """
    code = platform.begin()
    if code is not None:
        return code
    hooks: list[subprocess.Popen[bytes]] = []
    outcome = None
    while code is None:
        number = platform.claim()
        if set_up_failure is None:
            with watched(run_dir.attempt(number)):
                left_with = platform.run(number, outcome.nodes if outcome is not None else ())
        else:
            log.error(set_up_failure)
            with contextlib.suppress(OSError):  # a full disk
                run_dir.attempt(number).setup_failure_file.write_text(f"{set_up_failure}\n")
            left_with = EXIT_CONFIG
        # Imported only now, so that the ranks start without waiting for what the end of an attempt needs.
        from slurmtrain.supervise.end_of_attempt import finish_attempt
        from slurmtrain.supervise.hooks import start_hook

        try:
            outcome = finish_attempt(
                run_dir, number, left_with, platform.config, platform.client, can_start_again=platform.can_start_again
            )
        except Exception:  # an error of ours, which must not lose a run that was only stopped
            log.exception("attempt %d of run %s cannot be judged", number, run_dir.id)
            mode = platform.config.requeue.mode
            stopped = left_with == EXIT_REQUEUE and mode in (RequeueMode.REQUEUE, RequeueMode.RESUBMIT)
            outcome = AttemptOutcome(Reason.ASKED, Verdict(mode) if stopped else Verdict.END, f"exit code {left_with}")
        if platform.client is not None:  # on this machine it is printed
            log.info("run %s, attempt %d: %s", run_dir.id, number, outcome.sentence)
        code = platform.carry_out(number, outcome, left_with)
        hooks += start_hook(run_dir, number, platform.config)
    for hook in hooks:  # last: after a requeue, SLURM soon kills this job
        hook.wait()
    return code
