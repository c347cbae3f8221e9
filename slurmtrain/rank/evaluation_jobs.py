"""Jobs that evaluate a run's checkpoints (eval.mode=job), as requested by the training's rank 0.

A checkpoint that is to be evaluated is held, so that it is not removed before. When it is committed, a process of its
own submits the job: `python -m slurmtrain evaluate RUN --due`, which submits every held checkpoint that is not
submitted yet, once. So a submission that was killed half-way, or was refused by SLURM, is repeated by the next; at the
latest by the next attempt's.
"""

from __future__ import annotations

import logging
import os
import subprocess
import threading
import time

from slurmtrain.checkpoint.format.directory import committed, step_of
from slurmtrain.checkpoint.store import retention
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.command_environment import belongs_to_a_job
from slurmtrain.system.files import folder_mode
from slurmtrain.system.node_copies import shared_interpreter, without_copies
from slurmtrain.system.patience import BestEffort
from slurmtrain.system.records import read_json

log = logging.getLogger(__name__)

CLOSE_WAITS_S = 120.0  # a sbatch that is given up after 90 s, and the look whether its job is there
# Variables that a rank has set for itself, and that a job submitted from here would inherit.
OF_RANKS = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class EvaluationJobs:
    """Training's protocol for evaluation by jobs, on rank 0.

    `committed` is called by the thread that writes checkpoints.
    """

    def __init__(self, run_dir: RunDir):
        self._run_dir = run_dir
        self._lock = threading.Lock()
        self._submitting: list[subprocess.Popen[bytes]] = []
        self._storage = BestEffort(
            f"requests for evaluations of {run_dir.id}", "`evaluate RUN --step STEP` makes up for them"
        )
        self._storage.attempt(self._submit_due)  # what an attempt before this one has left

    def ask(self, step: int) -> None:
        """Have the checkpoint of this step evaluated once it is committed; training goes on if the storage fails."""
        self._storage.attempt(lambda: self._hold(step))

    def _hold(self, step: int) -> None:
        retention.hold(self._run_dir.checkpoints, step, self._run_dir.evaluation(step).path.name)
        self._submit_due(step)  # if it was restored from this very checkpoint

    def committed(self, step: int) -> None:
        """Submit the evaluation of a checkpoint that was asked for; what fails is submitted with the next one."""
        self._storage.attempt(lambda: self._submit_due(step))

    def _submit_due(self, step: int | None = None) -> None:
        """Submit what is due if the checkpoint of this step is; None: of any step."""
        due = self._due()
        if due if step is None else step in due:
            self._submit()

    def close(self, *, finished: bool) -> None:
        """Wait until everything is submitted, but not for ever: the training's GPUs are idle meanwhile.

        A run that stops has no time for that; its next attempt submits the rest.
        """
        if not finished:
            return
        deadline = time.monotonic() + CLOSE_WAITS_S
        for process in self._submitting:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.terminate()  # it has a token: what it may have submitted is found by the next one
        self._storage.attempt(self._say_due)

    def _say_due(self) -> None:
        if steps := self._due():
            which, again = ", ".join(map(str, steps)), f"evaluate {self._run_dir.path} --due"
            log.warning(
                "no job was submitted for the evaluation of step %s; `%s` submits what is missing", which, again
            )

    def _due(self) -> list[int]:
        """Return the steps of checkpoints that exist and whose evaluation is not submitted yet.

        Only files that can be read quickly are looked at.
        """
        there = {step_of(path) for path in committed(self._run_dir.checkpoints)}
        return [
            step
            for step, by in retention.held(self._run_dir.checkpoints)
            if step in there and not (read_json(RunDir(self._run_dir.evaluations / by).info_file) or {}).get("job_ids")
        ]

    def _submit(self) -> None:
        """Start a process that submits what is due, and return at once."""
        words = [shared_interpreter(), "-m", "slurmtrain", "evaluate", str(self._run_dir.path), "--due"]
        variables = {
            name: value
            for name, value in without_copies(os.environ).items()
            if not belongs_to_a_job(name) and name not in OF_RANKS
        }
        self._run_dir.evaluations.mkdir(mode=folder_mode(self._run_dir.path), exist_ok=True)
        with self._lock, (self._run_dir.evaluations / "submitting.log").open("ab") as output:
            self._submitting = [process for process in self._submitting if process.poll() is None]
            # Not to the rank's own log: SLURM waits until nobody has that open any more.
            process = subprocess.Popen(words, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
            self._submitting.append(process)
