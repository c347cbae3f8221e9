"""A drill: scratch runs, one for each way and an undisturbed one, started at once, interrupted, compared and removed.

They are tiny ones, or have the config and the code of a run, of a config or of a program of one's own. Their folder is
`drills/<time>` below the runs. What is removed or cancelled here are runs of this drill alone.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from slurmtrain.choices import Backend, JobKind, SnapshotMode
from slurmtrain.config.rules import validate
from slurmtrain.config.schema import Config
from slurmtrain.control import stop
from slurmtrain.control.drill.judge import Evidence, Result, Verdict, compare_runs, judge
from slurmtrain.control.drill.ways import (
    Plan,
    Way,
    preemptor_script,
    preemptors,
    scratch_config,
    time_given,
    tiny_config,
    why_not_here,
)
from slurmtrain.control.runs import start
from slurmtrain.control.submitting import ask_cluster
from slurmtrain.errors import ClusterError, ConfigError, SlurmtrainError
from slurmtrain.launch.checks import check
from slurmtrain.launch.code_source import CodeSource, find_source
from slurmtrain.launch.named_paths import with_absolute_paths
from slurmtrain.launch.queue_check import with_choices_of_the_shell
from slurmtrain.launch.submit_once import RefusedError, sbatch
from slurmtrain.observe.metrics import read_metrics
from slurmtrain.report.progress import read_progress
from slurmtrain.report.status.state import RunState, RunStatus, states
from slurmtrain.runs.attempts import Attempt, all_attempts, last_logged_step
from slurmtrain.runs.create import make_folder, new_run_id
from slurmtrain.runs.lookup import all_runs
from slurmtrain.runs.requests import RunAction
from slurmtrain.runs.run_dir import DRILLS, RunDir
from slurmtrain.slurm.client import NoAnswerError, SlurmClient
from slurmtrain.slurm.facts import ClusterFacts
from slurmtrain.slurm.job_facts import GONE

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.25  # at the runs' own files
ASK_EVERY_S = 4.0  # SLURM, about all of them
LEAVE_S = 20.0  # longest wait for cancelled jobs to be gone
STOP_AFTER_S = 30.0  # from the first step of a program that shows none until it is interrupted
FIRST_STEP_S = 120.0  # longest wait for the first step, or whatever a program shows: libraries load slowly


@dataclass(kw_only=True)
class ScratchRun(Evidence):
    """A run of a drill, and what is known of it so far.

    Attributes:
        launcher: the process of a local run.
        done: its program was cancelled, since it had done all steps.
    """

    config: Config
    run_dir: RunDir
    launcher: subprocess.Popen[bytes] | None = None
    done: bool = False

    def look(self, now: RunState) -> None:
        """Take over what `status` says now, and the run's own records."""
        self.attempts, self.explanation = all_attempts(self.run_dir), f"{now.status}: {now.explanation}"
        self.finished = self.done or now.status == RunStatus.FINISHED
        self.over = self.cannot is not None or self.refused is not None or not now.alive

    def compare_with(self, undisturbed: ScratchRun) -> None:
        """Compare what it has done with the undisturbed run, if both have finished."""
        self.resumed_at, self.undisturbed = _resumed_at(self.run_dir, self.attempts), undisturbed.explanation
        if self.finished and undisturbed.finished:
            self.comparison = compare_runs(undisturbed.run_dir, self.run_dir, self.config.job, self.resumed_at)

    @property
    def shown_step(self) -> int:
        """The furthest step that it shows, in its log or by its checkpoints; 0 if it shows none."""
        own = self.run_dir.info().get("own_checkpoints")
        return read_progress(self.run_dir, None, own, running_since=None).step or 0


@dataclass
class Drill:
    """The runs of a drill, and what it has shown and left behind when it is over.

    Attributes:
        preemptors: options of sbatch for jobs that may preempt one of the runs, the gentlest first.
        preempting: ids of such jobs.
        verdicts: those of its ways, in their order.
        keep: keep the folder of its runs; so it is with a drill that is broken off.
        kept: that folder; None: it was removed.
        jobs_left: some of its jobs, which are cancelled, have not ended yet.
    """

    plan: Plan
    folder: Path
    client: SlurmClient | None
    runs: list[ScratchRun] = field(default_factory=list)
    preemptors: Sequence[Sequence[str]] = ()
    preempting: list[str] = field(default_factory=list)
    verdicts: list[tuple[Evidence, Verdict]] = field(default_factory=list)
    keep: bool = True
    kept: Path | None = None
    jobs_left: bool = False
    began: float = field(default_factory=time.monotonic)
    took_s: float = 0.0

    def follow(self) -> None:
        """Follow the runs, and interrupt each when it is time, until all have ended or the time of the plan is over."""
        asked, said, until = -ASK_EVERY_S, "", self.began + 60 * self.plan.within_min
        while (left := [run for run in self.runs if not run.over]) and time.monotonic() < until:
            for run in left:
                self._act(run)
            if self.client is None or time.monotonic() - asked >= ASK_EVERY_S:
                asked, now = time.monotonic(), states(run.run_dir for run in self.runs)
                for run in self.runs:
                    run.look(now[run.run_dir])
            line = ", ".join(f"{run.way or 'undisturbed'} {run.explanation.partition(':')[0]}" for run in self.runs)
            if line != said:
                log.info("%s", line)
            said = line
            time.sleep(LOOK_EVERY_S)

    def _act(self, run: ScratchRun) -> None:
        """Interrupt a run when it is time, once; end a program that has done its steps. What kills a rank is in the run."""
        tries = all_attempts(run.run_dir)
        if not tries or not tries[-1].started or tries[-1].ended is not None or run.done:
            return
        to_tell = run.way is not None and not run.way.kills and not run.told
        try:
            if to_tell and is_due(run, self.plan, tries[-1], time.time()):
                self._interrupt(run, tries[-1])
                run.told = True
            elif run.is_program and not to_tell and has_done(run, self.plan, tries):
                stop.cancel(run.run_dir)
                run.done = True
        except NoAnswerError:  # SLURM is asked again at the next look; a second interruption does no harm
            return
        except SlurmtrainError as error:  # a local run is still setting up, or has just left
            if self.client is not None and to_tell:
                run.refused, run.over = error.message, True

    def _interrupt(self, run: ScratchRun, attempt: Attempt) -> None:
        if self.client is None:
            stop.start_again(run.run_dir, RunAction.REQUEUE)
            return
        job_id = attempt.job_id or str(run.run_dir.info()["job_ids"][0])
        if run.way is Way.EARLY_SIGNAL:
            self.client.signal(job_id, "USR2")
        elif run.way is Way.REQUEUE:
            self.client.requeue(job_id, ended=True)
        elif not attempt.nodes:
            raise ClusterError("it is not known on which node its job runs")
        else:
            self._preempt(run, attempt.nodes[0])

    def _preempt(self, run: ScratchRun, node: str) -> None:
        """Submit a job that preempts a run, with the first options that SLURM accepts of this user."""
        assert self.client is not None
        refusals = []
        for options in self.preemptors:
            script = preemptor_script(run.config.cluster.account, [*options, f"--nodelist={node}"])
            try:
                self.preempting.append(sbatch(script, run.run_dir.path / "submitit", self.client.slurm_conf, []))
                return
            except RefusedError as error:
                refusals.append(f"you may not use {options[-1]} ({error.message})")
        run.cannot, run.over = "; ".join(refusals), True

    def end(self) -> None:
        """End what is left of the runs, and remove their folder. It stays if it is to be kept, or a job may write there."""
        launchers = [run.launcher for run in self.runs if run.launcher is not None]
        for launcher in launchers:
            if launcher.poll() is None:
                launcher.send_signal(signal.SIGTERM)  # it tells the ranks, and starts no others
        if self.client is not None:
            for run_dir in all_runs(self.folder):  # also one that Ctrl-C has cut off while it was submitted
                with contextlib.suppress(SlurmtrainError):
                    stop.cancel(run_dir)
            if self.preempting:
                with contextlib.suppress(SlurmtrainError):
                    self.client.cancel(*self.preempting)
        until, pause = time.monotonic() + LEAVE_S, LOOK_EVERY_S
        while any(launcher.poll() is None for launcher in launchers) or self._has_jobs():
            self.jobs_left = time.monotonic() >= until
            if self.jobs_left:
                for launcher in launchers:
                    launcher.kill()
                break
            time.sleep(pause)
            pause = min(2 * pause, ASK_EVERY_S)
        if self.jobs_left or (self.keep and self.runs):
            self.kept = self.folder
        else:
            shutil.rmtree(self.folder, ignore_errors=True)
            with contextlib.suppress(OSError):  # another drill has left something there
                self.folder.parent.rmdir()

    def _has_jobs(self) -> bool:
        if self.client is None:
            return False
        try:
            jobs = [*self.preempting, *(job for run_dir in all_runs(self.folder) for job in run_dir.info()["job_ids"])]
            return any(queued.state not in GONE for queued in self.client.queue(jobs).values())
        except SlurmtrainError:
            return True


@contextlib.contextmanager
def drilling(plan: Plan, runs_dir: Path, client: SlurmClient | None) -> Iterator[Drill]:
    """Make the folder of a drill, and end all of its runs, in whatever way it ends: TERM and HUP are as Ctrl-C.

    Raises:
        ConfigError: somebody else can replace files in it.
        OSError: it cannot be made.
    """
    made = Drill(plan, make_folder(runs_dir, DRILLS, new_run_id()), client)

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    numbers = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) != signal.SIG_IGN]  # nohup
    handlers = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield made
    except BaseException:
        if made.runs:
            log.info("the drill was interrupted; its jobs are cancelled, and its runs are kept: %s", made.folder)
        raise
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        made.end()
        made.took_s = time.monotonic() - made.began


def drill(
    config: Config,
    plan: Plan,
    overrides: Sequence[str],
    cwd: Path,
    *,
    source: CodeSource | None = None,
    given: Collection[str] | None = None,
) -> Drill:
    """Run a drill. All of its jobs are cancelled at the end, also after Ctrl-C.

    The folder of its runs is removed, unless a way has failed or could not be judged, a job may still write there, or the
    drill was broken off.

    Args:
        config: a composed config, or that of a run.
        overrides: for the record.
        cwd: the folder to which paths are relative.
        source: the code of a run; None: that of `cwd`.
        given: keys that a person has set, where the runs are to be tiny ones on one rank; None: runs as in the config.

    Raises:
        ConfigError, ClusterError: a run cannot be prepared, or submitted, or its job does not suit the cluster.
    """
    if config.job.kind not in (JobKind.TRAIN, JobKind.COMMAND):
        raise ConfigError(f"drill works with runs that train, but job.kind is {config.job.kind}")
    if (config.job.checkpoints or "").startswith(("/", "~")):
        raise ConfigError(
            f"job.checkpoints={config.job.checkpoints} is outside of the run directory: the runs of the drill would also "
            "write there",
            hint="make the program write below $SLURMTRAIN_RUN_DIR, and give job.checkpoints relative to it",
        )
    config = with_absolute_paths(config, cwd)
    job, client, facts = config.job, None, ClusterFacts()
    may_be_in_place = source is None and job.kind == JobKind.COMMAND and job.snapshot == SnapshotMode.AUTO
    if may_be_in_place and find_source(job, cwd).root is None:  # there, all runs would find the files of each other
        config = replace(config, job=replace(job, snapshot=SnapshotMode.CWD))
    if config.cluster.backend != Backend.LOCAL:
        config = replace(config, cluster=with_choices_of_the_shell(config.cluster, os.environ))
        client, facts = ask_cluster(config)
    if given is not None:
        config = tiny_config(config, plan, given)

    with drilling(plan, Path(config.job.runs_dir), client) as made:
        cannot = {way: why for way in plan.ways if (why := why_not_here(way, config)) is not None}
        if client is not None and Way.PREEMPTION in plan.ways:
            its = config.cluster
            found = preemptors(facts, partition=its.partition, account=its.account, qos=its.qos)
            if isinstance(found, str):
                cannot[Way.PREEMPTION] = found
            else:
                made.preemptors = found

        def begin(way: Way | None) -> ScratchRun:
            its = scratch_config(config, plan, way, made.folder)
            dims = validate(its)
            check(its, dims, cwd, look_at_files=source is None)
            run_dir, launcher = start(its, overrides, cwd, source)
            run = ScratchRun(way, config=its, run_dir=run_dir, launcher=launcher)
            run.is_program, run.mode = its.job.kind == JobKind.COMMAND, its.requeue.mode
            run.time_s = time_given(way, its.cluster, facts) if way is not None else None
            made.runs.append(run)
            return run

        # A whole node is wanted for the preemption, so its job comes first.
        order = sorted((way for way in plan.ways if way not in cannot), key=lambda way: way is not Way.PREEMPTION)
        tried = {way: begin(way) for way in order}
        undisturbed = begin(None) if tried else None
        made.follow()
        if undisturbed is not None:
            for run in tried.values():
                run.compare_with(undisturbed)
        evidence = [tried.get(way) or Evidence(way, cannot=cannot[way]) for way in plan.ways]
        made.verdicts = [(each, judge(each, plan)) for each in evidence]
        differ = any(verdict.result is Result.FAILED and its.comparison is not None for its, verdict in made.verdicts)
        if differ and undisturbed is not None:
            log.info("the bits differ; are those of two undisturbed runs the same?")
            twin = begin(None)
            made.follow()
            twin.compare_with(undisturbed)
            for run in tried.values():
                run.twin = twin.comparison
            made.verdicts = [(each, judge(each, plan)) for each in evidence]
        made.keep = any(each.result in (Result.FAILED, Result.NOT_JUDGED) for _, each in made.verdicts)
    return made


def is_due(run: ScratchRun, plan: Plan, attempt: Attempt, now: float) -> bool:
    """Return whether it is time to interrupt a run: a training holds, a program shows its step, or else by the clock.

    Args:
        now: unix seconds.
    """
    if not run.is_program:
        return run.run_dir.interrupted_file.exists()
    if shown := run.shown_step:
        return shown >= plan.stop_at
    if run.config.job.checkpoints is not None:  # its first checkpoint is still to come
        return False
    # A program that restores with our Checkpointer has loaded its libraries and its model when it is stepping.
    if attempt.stepping:
        return now - attempt.stepping >= STOP_AFTER_S
    return now - attempt.started >= FIRST_STEP_S


def has_done(run: ScratchRun, plan: Plan, tries: Sequence[Attempt]) -> bool:
    """Return whether a program has done the steps of the plan, and the first one after it was interrupted, too.

    One that shows steps only by its checkpoints may be far beyond the plan when it is interrupted, so that the undisturbed
    one has to go on.
    """
    if run.way is None:
        return (last_logged_step(run.run_dir) or 0) >= plan.steps
    return len(tries) > 1 and run.shown_step >= max(plan.steps, (tries[0].last_step or tries[0].seen_step or 0) + 1)


def _resumed_at(run_dir: RunDir, tries: Sequence[Attempt]) -> int | None:
    """Return the steps done when a run was resumed; None: not known. Of a program its log shows it, if it went back."""
    if len(tries) < 2 or tries[1].first_step is not None:
        return tries[1].first_step if len(tries) > 1 else None
    steps = [int(record["step"]) for record in read_metrics(run_dir.metrics_file)]
    back = next((step for before, step in itertools.pairwise(steps) if step < before), None)
    return max(0, back - 1) if back is not None else tries[0].last_step
