"""A batch job of SLURM: its ranks are a step of srun's, and the run goes on by a requeue or in a further job.

SLURM's signals are meant for the ranks. This process survives them, since it has to go on after the last rank has left: SLURM
itself does not requeue a job that ends within its grace time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from slurmtrain.choices import JobKind, RequeueMode
from slurmtrain.config.frozen import load_frozen
from slurmtrain.config.parallel_dims import usable_sizes
from slurmtrain.errors import EXIT_REQUEUE, ClusterError, ConfigError, SlurmtrainError
from slurmtrain.launch.srun import explained_srun, srun_node_options
from slurmtrain.runs import jobs
from slurmtrain.runs.attempts import Attempt, read_attempt
from slurmtrain.runs.decide import AttemptOutcome
from slurmtrain.runs.reasons import Reason, Verdict
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.slurm.environment import own_job_id, own_node_name, own_restart_count
from slurmtrain.slurm.nodelist import expand_nodelist
from slurmtrain.supervise.platforms import rank_environment
from slurmtrain.system.node_copies import STAGED

GLANCE_S = 10  # how long SLURM may take to say how many nodes are left
CLEAN_UP_S = 20.0  # how long the removal of copies from the nodes may hold up the end of the job
# With the first, srun 22.05 refuses --gres=none; with the others, any srun ignores --ntasks-per-node.
NOT_BESIDE = ("SLURM_GPUS_PER_NODE", "SLURM_NTASKS", "SLURM_NPROCS")


class SlurmJob:
    """The batch job that this process belongs to."""

    def __init__(self, run_dir: RunDir, submitted: Mapping[str, str] | None, *, sharing: int = 1) -> None:
        """Look at the config of a run of this job.

        Args:
            submitted: the environment of the submission, for the next job; None: that of this process.
            sharing: runs that share the job (sweep.pack).
        """
        self.client = SlurmClient()
        self._run_dir, self._submitted, self._sharing = run_dir, submitted, sharing
        self.job_id = own_job_id() or ""
        self._starts = 0
        self._staged: dict[str, str] = {}
        self.config = load_frozen(self._run_dir.config_file, with_secrets=False)
        self.can_start_again = self.config.requeue.starts_in_place
        self._cluster = self.config.cluster
        spare = self._cluster.spare_nodes > 0 or self._cluster.node_range.elastic
        self._keeps_nodes = spare and self.can_start_again and self._sharing == 1

    def begin(self) -> int | None:
        """Return the exit code where nothing is left to do for the run, else None."""
        first = not (self._run_dir.attempt_numbers() or own_restart_count() or self._run_dir.request_file.exists())
        if first or (self.config.requeue.mode == RequeueMode.OFF and self._sharing == 1):
            return None
        from slurmtrain.supervise.requeue import over_before

        over = over_before(self._run_dir, self.config, self.job_id, self.client)
        # Not 0 after another end, which would start jobs that wait for the success of this run.
        return {Verdict.DONE: 0, Verdict.END: 1}.get(over) if over is not None else None

    def claim(self) -> int:
        """Claim the next attempt, for this job.

        Raises:
            ConfigError: its folder cannot be made.
        """
        try:
            number = self._run_dir.new_attempt()
        except OSError as error:
            where = f"{error.filename or self._run_dir.attempts} on {socket.gethostname()}"
            raise ConfigError(f"cannot create {where}: {error.strerror}") from None
        with contextlib.suppress(OSError):  # a full disk
            # A cancel from now on is meant for this attempt.
            claim_file = self._run_dir.attempt(number).claim_file
            claim_file.write_text(f"{self.job_id} {own_restart_count()} {time.time()}\n")
        return number

    def run(self, number: int, nodes: Sequence[str]) -> int:
        """Start the ranks of an attempt and wait until every one has left: SLURM drains the node of a rank that lingers."""
        signal.signal(signal.SIGTERM, lambda *_: None)  # and the default for srun, which passes it on
        attempt_dir = self._run_dir.attempt(number)
        threads = self._cluster.cpus_per_task // self._sharing
        variables = {**os.environ, "SLURM_EXPORT_ENV": "ALL"}  # or srun passes on what SBATCH_EXPORT told sbatch to
        environment = rank_environment(self._run_dir, number, variables, threads)
        if self._starts == 0:
            self._prepare_nodes(number)
        environment |= self._staged
        self._starts += 1
        with attempt_dir.srun_log.open("ab") as srun_log:
            ranks = subprocess.Popen(
                self._srun(attempt_dir.path, nodes), cwd=self._run_dir.workdir, env=environment, stderr=srun_log
            )
        code = ranks.wait()
        step = self._record(number).step_id if code == -signal.SIGKILL else None
        if step is not None:  # srun itself was killed, so nobody else would tell its ranks to save and leave
            with contextlib.suppress(ClusterError):  # they have left by themselves
                self.client.signal(step, "TERM")
            from slurmtrain.supervise.in_place import is_gone

            is_gone(step, self.client)
        # From here on nothing may interrupt this process or what it starts: a requeue sends TERM to all of it.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return code if code >= 0 else 128 - code

    def _record(self, number: int) -> Attempt:
        """Return the record of an attempt, an empty one if it cannot be read now: that is no reason to leave the ranks."""
        try:
            return read_attempt(self._run_dir, number)
        except (OSError, SlurmtrainError):
            return Attempt(number)

    def carry_out(self, number: int, outcome: AttemptOutcome, code: int) -> int | None:
        """Do what was decided, and return the exit code of the job; None if the ranks start again in it.

        Of a run that shares its job, EXIT_REQUEUE says that the job is to be requeued for it.
        """
        verdict = outcome.verdict
        if verdict is Verdict.IN_PLACE:
            return None
        removing = self._clean_up(code)
        # srun also exits with 0 when it has lost the ranks. Jobs that wait for the success of this run must not take that
        # for one.
        code = 1 if code == 0 and verdict is not Verdict.DONE else code
        if verdict in (Verdict.REQUEUE, Verdict.RESUBMIT):
            if self._sharing == 1 or verdict is Verdict.RESUBMIT:
                self.let_go_on([(self._run_dir, number)])
            code = EXIT_REQUEUE
        elif self._sharing > 1 and code == EXIT_REQUEUE:
            code = 1
        self._tell_other_jobs(number, outcome)
        for process in removing:  # after the requeue, so that nothing waits for slow disks
            _wait_or_kill(process)
        return code

    def let_go_on(self, runs: Sequence[tuple[RunDir, int]]) -> None:
        """Let runs that share this job go on; a job that is submitted for them inherits the environment of the submission."""
        from slurmtrain.supervise import requeue

        own = dict(os.environ)
        if self._submitted is not None:
            os.environ.clear()
            os.environ.update(self._submitted)
        try:
            requeue.go_on(runs, self.config, self.job_id, self.client)
        finally:
            os.environ.clear()
            os.environ.update(own)

    def _tell_other_jobs(self, number: int, outcome: AttemptOutcome) -> None:
        """Tell the jobs that wait for this one, or for its run, what has become of it."""
        from slurmtrain.launch.dependencies import free_dependents
        from slurmtrain.launch.node_exclusion import leave_out

        if outcome.verdict is Verdict.DONE:
            free_dependents(self._run_dir, read_attempt(self._run_dir, number), self.client)
        if outcome.verdict is Verdict.NEXT:
            for link in jobs.waiting_after(self._run_dir, self.job_id, self.client)[:1]:
                leave_out([self._run_dir], link, self.client)
        over = outcome.verdict in (Verdict.DONE, Verdict.END) and outcome.reason is not Reason.SUPERSEDED
        if self.config.requeue.mode == RequeueMode.CHAIN and over:
            jobs.cancel_rest(self._run_dir, self.job_id, self.client)

    def _srun(self, attempt_dir: Path, nodes: Sequence[str]) -> list[str]:
        """Return the command that starts the ranks; on the largest number of nodes that can divide the global batch.

        Without an srun on PATH, `env` says so and leaves with 127.
        """
        cluster = self._cluster
        options: list[str] = []
        if nodes:
            options = srun_node_options(cluster, len(nodes), nodes)
        elif cluster.node_range.elastic:
            there, sizes = self._allocated - cluster.spare_nodes, usable_sizes(self.config)
            options = srun_node_options(cluster, max([size for size in sizes if size <= there], default=sizes[0]))
        elif cluster.spare_nodes:
            options = srun_node_options(cluster, cluster.node_range.most)
        explained = explained_srun(
            self.config,
            self._run_dir.path,
            attempt_dir,
            self._run_dir.workdir,
            nodes=options,
            packed=self._sharing > 1,
        )
        return ["env", *(word for words, _ in explained for word in words)]

    def _prepare_nodes(self, number: int) -> None:
        """Copy to the nodes what cluster.stage names, and have another node watch over this one, before the first start."""
        if self._cluster.stage.wanted:
            from slurmtrain.supervise import staging

            options = ["--no-kill"] if self._keeps_nodes else []
            options += ["--kill-on-bad-exit=0", "--wait=0", *_on_nodes(self._allocated)]
            self._staged = staging.stage(self._run_dir, self.config, number, lambda words: self._beside(options, words))
        if self._keeps_nodes:
            # If the node of this process fails, nothing is left that would start the ranks again or end the job.
            last = expand_nodelist(os.environ["SLURM_JOB_NODELIST"])[-1]
            words = ["--watch", own_node_name() or "", "--job", self.job_id]
            words = [sys.executable, "-m", "slurmtrain", "supervise", str(self._run_dir.path), *words]
            self._beside(["--no-kill", "--nodes=1", "--ntasks=1", f"--nodelist={last}"], words)

    def _beside(self, options: Sequence[str], words: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start processes beside the ranks, without GPUs and memory of their own."""
        shared = ["--overlap", "--cpus-per-task=1", "--mem=0", "--gres=none", *options]
        variables = {name: value for name, value in os.environ.items() if name not in NOT_BESIDE}
        variables["SLURM_EXPORT_ENV"] = "ALL"
        return subprocess.Popen(
            ["env", "srun", *shared, *words], cwd=self._run_dir.workdir, env=variables, stdin=subprocess.DEVNULL
        )

    @property
    def _allocated(self) -> int:
        return int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))

    def _remove(self, words: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start to remove folders from each node that the job still has."""
        ask = ["squeue", "--noheader", f"--jobs={self.job_id}", "--format=%D"]
        left = self.client.glance(ask, within_s=GLANCE_S) if self._keeps_nodes else None
        return self._beside([*_on_nodes(int(left or self._allocated)), "--output=none"], words)

    def _clean_up(self, code: int) -> list[subprocess.Popen[bytes]]:
        """Remove from the nodes what nothing else would; return what still does so."""
        local = self.config.checkpoint.local if self.config.job.kind in (JobKind.TRAIN, JobKind.COMMAND) else None
        # Our own ranks that finish or stop remove the copies of checkpoints from their nodes. Those that crash do not, nor does
        # anybody on nodes that were left out since, and a program may leave copies.
        everywhere = self._starts == 1 or not self._keeps_nodes
        removed = self.config.job.kind == JobKind.TRAIN and everywhere and code in (0, EXIT_REQUEUE)
        if local is not None and self._starts and not removed:
            script = 'rm -rf -- "$1/slurmtrain-$(id -u)/$2"-*'
            _wait_or_kill(self._remove(["bash", "-c", script, "remove", str(local), self._run_dir.path.name]))
        return [self._remove(["rm", "-rf", "--", self._staged[STAGED]])] if self._staged else []


def _on_nodes(count: int) -> list[str]:
    return [f"--nodes={count}", "--ntasks-per-node=1"]


def _wait_or_kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(CLEAN_UP_S)
    process.kill()
