"""cluster=local: the same job as processes of this machine, in the foreground."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from slurmtrain.choices import JobKind, RequeueMode
from slurmtrain.config import secrets
from slurmtrain.config.frozen import load_frozen
from slurmtrain.report.status.state import how_to_continue
from slurmtrain.runs.decide import AttemptOutcome
from slurmtrain.runs.reasons import Verdict, exit_code_of_run
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.supervise.loop import supervise
from slurmtrain.supervise.platforms.local_ranks import LocalRanks, Place


def run_local(run_dir: RunDir) -> int:
    """Run attempts until one is the last, and return the exit code: 0 finished, 75 stopped, 78 config, else a crash."""
    return supervise(run_dir, ThisMachine(run_dir))


class ThisMachine:
    """A run in the foreground. Ctrl-C, or TERM to this process, stops it for good."""

    client = None
    can_start_again = False

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._read_config()
        secrets.take(self.config.secrets)

    def _read_config(self) -> None:
        self.config = load_frozen(self._run_dir.config_file)

    def begin(self) -> int | None:
        """Nobody but this process starts the run here."""
        return None

    def claim(self) -> int:
        """Claim the next attempt."""
        return self._run_dir.new_attempt()

    def run(self, number: int, nodes: Sequence[str]) -> int:
        """Run all ranks; return their highest exit code, as srun does: 128 + n for a rank killed by signal n."""
        caught: list[int] = []
        before = {
            each: signal.signal(each, lambda got, _: caught.append(got)) for each in (signal.SIGINT, signal.SIGTERM)
        }
        ranks = LocalRanks(self._run_dir, self.config, number, Place())
        try:
            return ranks.run(lambda: self._stop_for_good(caught))
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def _stop_for_good(self, caught: list[int]) -> int | None:
        """Return the next signal that a person has sent, if there is one: then the run does not start again."""
        if not caught:
            return None
        never = dataclasses.replace(self.config.requeue, mode=RequeueMode.OFF)
        self.config = dataclasses.replace(self.config, requeue=never)
        return caught.pop(0)

    def carry_out(self, number: int, outcome: AttemptOutcome, code: int) -> int | None:
        """Say how the attempt has ended; return the exit code, or None if another attempt begins."""
        ended = outcome.verdict is Verdict.END
        how = f". {how_to_continue(self._run_dir, self._run_dir.info(), outcome.reason)}" if ended else ""
        try:
            print(f"slurmtrain: {outcome.sentence}{how}", flush=True)  # the result of the verb
        except BrokenPipeError:  # nobody reads it any more, as with `submit | head`; a run outlives that
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        own_is_done = outcome.verdict is Verdict.DONE and self.config.job.kind == JobKind.COMMAND
        if (ended or own_is_done) and self.config.checkpoint.local is not None:
            # It loads numpy, for which `submit` has no time.
            from slurmtrain.checkpoint.node_folder import remove_run

            remove_run(Path(self.config.checkpoint.local), self._run_dir.checkpoints, self._run_dir.id)
        if outcome.verdict is not Verdict.REQUEUE:
            return exit_code_of_run(outcome.verdict, outcome.reason, code)
        return None
