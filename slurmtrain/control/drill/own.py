"""The drill of a run of the user's own: it trains twice for a few steps, once stopped and resumed, and both are compared.

Both are scratch runs: with the code and the config of the run, in a folder of the drill, without loggers, hooks and
mirror. Nothing of the run itself is written. The stop is the one of `requeue RUN`; it is resumed as by `resume RUN`, so
that it is the program that is judged, and not the site.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmtrain.choices import Backend, JobKind, RequeueMode, SnapshotMode
from slurmtrain.config.frozen import load_frozen
from slurmtrain.config.schema import Config
from slurmtrain.config.validate import validate
from slurmtrain.control import stop
from slurmtrain.control.drill import evidence as records
from slurmtrain.control.drill import scratch
from slurmtrain.control.drill.comparison import TOLERANCE, RunComparison, describe, likely_causes
from slurmtrain.control.drill.judge import Result
from slurmtrain.control.drill.scratch import NOTHING_LEFT, Leftovers, Watched
from slurmtrain.control.drill.ways import interruption, scratch_config
from slurmtrain.control.submitting import check, client_of
from slurmtrain.errors import ConfigError, SlurmtrainError, UnreadableRecordError
from slurmtrain.launch import further_jobs
from slurmtrain.launch.named_paths import with_absolute_paths
from slurmtrain.launch.snapshot import find_source
from slurmtrain.launch.submit import preparing, preparing_with_code_of
from slurmtrain.observe.metrics import read_metrics
from slurmtrain.runs import attempts, reached_step
from slurmtrain.runs.program_checkpoints import ProgramCheckpoint, find_checkpoints, newest_complete
from slurmtrain.runs.reasons import Verdict as Next
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.client import SlurmClient

log = logging.getLogger(__name__)

STOP_AFTER_S = 30.0
RETRY_S = 1.0  # after a stop that came too early: the run is still setting up


@dataclass(frozen=True)
class OwnPlan:
    """What a drill of a run does.

    Attributes:
        steps: how far both train. A program of the user's own is ended when it shows so many steps.
        stop_at: the step after which one is stopped.
        stop_after_s: seconds after its beginning at which a program is stopped that shows no steps; None: STOP_AFTER_S,
            or never, where job.checkpoints will show them.
    """

    steps: int = 20
    stop_at: int = 10
    stop_after_s: float | None = None
    tolerance: float = TOLERANCE
    within_min: float = 30.0
    keep: bool = False


@dataclass(frozen=True)
class OwnEvidence:
    """All that is known of the two runs.

    Attributes:
        undisturbed: why the undisturbed run gave nothing to compare with; None if it did.
        told: the other one could be told to stop, and started again, so that what came of it is its own doing.
        finished_first: it had finished before it could be told.
        failed: why it could not be stopped and resumed; None if it could.
        stopped_at: the last step that it showed before it was resumed.
        resumed_at: steps done when it was resumed, as far as it shows.
        comparison: the comparison; None if there is none.
    """

    undisturbed: str | None = None
    told: bool = True
    finished_first: bool = False
    failed: str | None = None
    stopped_at: int | None = None
    resumed_at: int | None = None
    comparison: RunComparison | None = None


@dataclass(frozen=True)
class OwnDrill:
    """What a drill of a run has shown, and what it has left behind."""

    result: Result
    sentence: str
    causes: Sequence[str] = ()
    stopped_at: int | None = None
    resumed_at: int | None = None
    comparison: RunComparison | None = None
    took_s: float = 0.0
    leftovers: Leftovers = NOTHING_LEFT


def judge_own(evidence: OwnEvidence, plan: OwnPlan) -> OwnDrill:
    """Judge the two runs: a pure function."""
    known = OwnDrill(
        Result.NOT_TRIED,
        "",
        stopped_at=evidence.stopped_at,
        resumed_at=evidence.resumed_at,
        comparison=evidence.comparison,
    )
    if evidence.undisturbed is not None:
        return dataclasses.replace(known, sentence=f"could not be judged: the undisturbed run {evidence.undisturbed}")
    if evidence.finished_first:
        return dataclasses.replace(
            known,
            sentence="could not be judged: it had finished before it was told to stop; give it more to do, or stop it "
            "earlier (--stop-at, --stop-after)",
        )
    if evidence.failed is not None and not evidence.told:
        return dataclasses.replace(known, sentence=f"could not be judged: {evidence.failed}")
    if evidence.failed is not None:
        return dataclasses.replace(known, result=Result.FAILED, sentence=evidence.failed)
    stopped, resumed = evidence.stopped_at, evidence.resumed_at
    if resumed == 0 and stopped:
        return dataclasses.replace(
            known,
            result=Result.FAILED,
            sentence=f"stopped after step {stopped}, and began anew: it did not find what it had saved",
            causes=[
                "it saves nothing when it is told to stop (SIGTERM, or slurmtrain.should_stop()), or looks for it elsewhere: "
                "write below $SLURMTRAIN_RUN_DIR"
            ],
        )
    same = evidence.comparison or RunComparison()
    story = _story(stopped, resumed)
    if not same.anything_compared:
        return dataclasses.replace(
            known,
            sentence=f"{story}, and {describe(same)}",
            causes=[
                'let it log its loss, as lines {"step": 1, "loss": 2.5} in $SLURMTRAIN_RUN_DIR/metrics.jsonl, or name its '
                "checkpoints (job.checkpoints='out/checkpoint-*')"
            ],
        )
    after = stopped if resumed is None else resumed
    if after is not None and same.reached <= after:
        return dataclasses.replace(
            known,
            sentence=f"{story}, and nothing that came after could be compared, only up to step {same.reached}; give it more to "
            "do (--steps), or stop it earlier (--stop-at, --stop-after)",
        )
    passed = same.same_bits or same.within(plan.tolerance)
    return dataclasses.replace(
        known,
        result=Result.PASSED if passed else Result.FAILED,
        sentence=f"{story}: {describe(same, plan.tolerance)}",
        causes=likely_causes(same, after, plan.tolerance),
    )


def _story(stopped: int | None, resumed: int | None) -> str:
    if stopped is None:
        return "stopped and resumed"
    if resumed is None or resumed == stopped:
        return f"stopped after step {stopped} and resumed there"
    return f"stopped after step {stopped} and resumed at step {resumed}"


def own_config(config: Config, plan: OwnPlan, folder: Path, *, stopped: bool) -> Config:
    """Return the config of a scratch run: of the undisturbed one, or of that which is stopped and resumed."""
    train = config.train
    if config.job.kind == JobKind.TRAIN:
        hooks = [*train.hooks, *([interruption(plan.stop_at, False)] if stopped else [])]
        train = dataclasses.replace(train, steps=plan.steps, log_every=1, hooks=hooks)
    cluster = config.cluster
    limit_min = math.ceil(plan.within_min + 2 * cluster.signal_lead_s / 60)
    changed = dataclasses.replace(
        config,
        train=train,
        cluster=dataclasses.replace(cluster, time_limit_min=min(cluster.time_limit_min, limit_min)),
        optim=dataclasses.replace(config.optim, warmup_steps=min(config.optim.warmup_steps, plan.steps)),
    )
    scratch_one = scratch_config(changed, None, folder)
    return dataclasses.replace(
        scratch_one,
        job=dataclasses.replace(scratch_one.job, name="drill-stopped" if stopped else "drill-undisturbed"),
        requeue=dataclasses.replace(scratch_one.requeue, mode=RequeueMode.OFF, in_place=False, standby_ranks=False),
    )


def drill_config(config: Config, plan: OwnPlan, overrides: Sequence[str], cwd: Path) -> OwnDrill:
    """Drill a composed config, with the code of the folder `cwd`.

    Raises:
        ConfigError, ClusterError: a run cannot be prepared or submitted.
    """
    config = with_absolute_paths(config, cwd)
    in_place = config.job.snapshot == SnapshotMode.AUTO and find_source(config.job, cwd).root is None
    if config.job.kind == JobKind.COMMAND and in_place:
        # Outside of git a program would run in place, where both runs would find the files of each other.
        config = dataclasses.replace(config, job=dataclasses.replace(config.job, snapshot=SnapshotMode.CWD))
    return _drill(config, plan, overrides, cwd, None)


def drill_run(run_dir: RunDir, plan: OwnPlan, overrides: Sequence[str], cwd: Path) -> OwnDrill:
    """Drill a run that exists, with its config and the copy of its code, and leave it as it is.

    Raises:
        ConfigError, ClusterError, UsageError: a run cannot be prepared or submitted, or an override cannot be read.
    """
    config = load_frozen(run_dir.config_file)
    if overrides:
        from slurmtrain.launch.changes import changed

        config, _ = changed(config, overrides, cwd)
    return _drill(config, plan, overrides, cwd, run_dir)


def _drill(config: Config, plan: OwnPlan, overrides: Sequence[str], cwd: Path, of: RunDir | None) -> OwnDrill:
    began = time.monotonic()
    _refuse(config)
    client = None if config.cluster.backend == Backend.LOCAL else client_of(config)
    with scratch.drilling(Path(config.job.runs_dir), client) as drill:
        for name in ("undisturbed", "stopped"):
            its = own_config(config, plan, drill.folder, stopped=name == "stopped")
            drill.runs.append(_start(name, its, overrides, cwd, of, client))
        stop_and_resume = StopAndResume(plan, client)
        within_s = 60 * plan.within_min - (time.monotonic() - began)
        scratch.follow(drill.runs, stop_and_resume.act, within_s=within_s, is_to_come=stop_and_resume.is_to_resume)
        found = judge_own(_evidence(drill.runs[0], drill.runs[1], stop_and_resume, plan), plan)
        drill.keep = plan.keep or found.result is not Result.PASSED
    return dataclasses.replace(found, took_s=time.monotonic() - began, leftovers=drill.leftovers)


def _refuse(config: Config) -> None:
    """Refuse what a drill could not judge, or what would write where runs of the user's own do.

    Raises:
        ConfigError: the config is such a one.
    """
    if config.job.kind not in (JobKind.TRAIN, JobKind.COMMAND):
        raise ConfigError(f"drill works with runs that train, but job.kind is {config.job.kind}")
    pattern = config.job.checkpoints
    if pattern is not None and pattern.startswith(("/", "~")):
        raise ConfigError(
            f"job.checkpoints={pattern} is outside of the run directory: the runs of the drill would also write there",
            hint="make the program write below $SLURMTRAIN_RUN_DIR, and give job.checkpoints relative to it",
        )


def _start(
    name: str, config: Config, overrides: Sequence[str], cwd: Path, of: RunDir | None, client: SlurmClient | None
) -> Watched:
    dims = validate(config)
    if of is None:
        check(config, dims, cwd)
    with _preparing(config, overrides, cwd, of) as run_dir:
        there = newest_complete(_own_checkpoints(run_dir, config))
        if there is not None:
            raise ConfigError(
                f"{there.path} is there before the program has begun: both runs would resume from it",
                hint="move it away; from a git work tree, only files that git tracks or does not ignore are copied",
            )
        return scratch.start(name, run_dir, config, client)


def _preparing(
    config: Config, overrides: Sequence[str], cwd: Path, of: RunDir | None
) -> contextlib.AbstractContextManager[RunDir]:
    if of is None:
        return preparing(config, overrides, cwd)
    if config.job.kind == JobKind.COMMAND and str(of.info().get("workdir", "/")).startswith("/"):
        log.warning("run %s runs in place: both runs of the drill share what the program writes there", of.id)
    written = [each.path for each in _own_checkpoints(of, config)]
    return preparing_with_code_of(of, config, overrides, cwd, without=written)


def _own_checkpoints(run_dir: RunDir, config: Config) -> list[ProgramCheckpoint]:
    return find_checkpoints(run_dir.program_folders, config.job.checkpoints, config.job.checkpoint_complete)


class StopAndResume:
    """The stop and the resume of one of the two runs, and the end of programs that have gone far enough."""

    def __init__(self, plan: OwnPlan, client: SlurmClient | None):
        self._plan, self._client = plan, client
        self._tried = 0.0
        self.stopped_at: int | None = None
        self.lines_before = 0  # lines of the log when it had stopped: those of the resumed part come after
        self.resumed = False
        self.not_resumed: str | None = None  # why it could not be resumed, which is no fault of its program
        self.ended_on_purpose: set[str] = set()

    def act(self, run: Watched) -> None:
        """Do what is due for a run that has not ended. Called by `follow`, again and again."""
        if time.monotonic() - self._tried < RETRY_S and run.refused is not None:
            return
        try:
            if run.name == "stopped" and run.told_at is None:
                self._stop(run)
            elif run.name == "stopped" and not self.resumed:
                self._resume(run)
            elif run.config.job.kind == JobKind.COMMAND:
                self._end(run)
            run.refused = None
        except SlurmtrainError as error:  # it is still setting up, or has just left
            run.refused, self._tried = error.message, time.monotonic()
            if run.name == "stopped" and self.resumed and len(run.run_dir.attempt_numbers()) == 1:
                self.not_resumed = error.message

    def is_to_resume(self, run: Watched) -> bool:
        """Return whether a run that has stopped will be resumed."""
        return run.name == "stopped" and run.told_at is not None and not self.resumed

    def _stop(self, run: Watched) -> None:
        tries = records.attempts_of(run.run_dir)
        if not tries or not tries[0].started or tries[0].ended is not None:
            return
        if run.config.job.kind == JobKind.TRAIN:
            due = run.run_dir.interrupted_file.exists()
        else:
            due = is_due(shown_step(run), self._plan, tries[0], run.config, time.time())
        if due:
            told_at = time.time()
            stop.requeue(run.run_dir)
            run.told_at = told_at

    def _resume(self, run: Watched) -> None:
        """Resume it as soon as its first attempt has ended; it must not count as over before."""
        tries = records.attempts_of(run.run_dir)
        if not tries or tries[0].ended is None:
            return
        self.resumed = True
        if tries[0].verdict == Next.DONE:
            return
        self.stopped_at = max(shown_step(run), tries[0].last_step or 0) or None
        self.lines_before = len(read_metrics(run.run_dir.metrics_file))
        run.run_dir.request_file.unlink(missing_ok=True)
        if self._client is None:
            scratch.start_again(run)
        else:
            further_jobs.resume(run.run_dir, self._client)

    def _end(self, run: Watched) -> None:
        """End a program that has gone as far as it is to be compared."""
        if run.run_dir.id in self.ended_on_purpose or not self.is_far_enough(run):
            return
        tries = records.attempts_of(run.run_dir)
        if tries and tries[-1].ended is None:
            stop.cancel(run.run_dir)
            self.ended_on_purpose.add(run.run_dir.id)

    def is_far_enough(self, run: Watched) -> bool:
        """Return whether a run has done the steps of the plan, and the first one after the stop, too.

        A program that shows steps only by its checkpoints may be far beyond the plan when it is stopped. Only one that logs
        its steps will certainly be stopped in time.
        """
        if self.stopped_at is not None:
            return shown_step(run) >= max(self._plan.steps, self.stopped_at + 1)
        return (shown_step(run) if self.resumed else logged_step(run)) >= self._plan.steps


def is_due(step: int, plan: OwnPlan, attempt: attempts.Attempt, config: Config, now: float) -> bool:
    """Return whether it is time to stop a program: by the step that it shows, or if it shows none, by the clock.

    Args:
        step: the furthest step that it shows; 0 if it shows none.
        now: unix seconds.
    """
    if step:
        return step >= plan.stop_at
    after_s = plan.stop_after_s
    if after_s is None:
        if config.job.checkpoints is not None:
            return False
        after_s = STOP_AFTER_S
    # A program that restores with our Checkpointer has loaded its libraries and its model by then.
    return attempt.started > 0 and now - (attempt.stepping or attempt.started) >= after_s


def shown_step(run: Watched) -> int:
    """Return the furthest step that a run shows, in its log or by its checkpoints; 0 if it shows none."""
    try:
        steps = [logged_step(run), reached_step.newest_checkpoint_step(run.run_dir)]
        if run.config.job.checkpoints is not None:
            newest = newest_complete(_own_checkpoints(run.run_dir, run.config))
            steps.append(newest.step if newest is not None else None)
    except (UnreadableRecordError, OSError):
        return 0
    return max((step for step in steps if step is not None), default=0)


def logged_step(run: Watched) -> int:
    """Return the furthest step in the log of a run; 0 if there is none."""
    try:
        return reached_step.last_logged_step(run.run_dir) or 0
    except (UnreadableRecordError, OSError):
        return 0


def _evidence(undisturbed: Watched, stopped: Watched, stop_and_resume: StopAndResume, plan: OwnPlan) -> OwnEvidence:
    """Return what the records say of the two runs."""
    tries = [records.attempts_of(run.run_dir) for run in (undisturbed, stopped)]

    def fine(run: Watched, attempts_of_it: Sequence[attempts.Attempt]) -> bool:
        done = bool(attempts_of_it) and attempts_of_it[-1].verdict == Next.DONE
        return done or run.run_dir.id in stop_and_resume.ended_on_purpose

    first = tries[1][0] if tries[1] else None
    second = tries[1][1] if len(tries[1]) > 1 else None
    failed = None
    if first is not None and first.ended is not None and first.verdict == Next.DONE:
        return OwnEvidence(finished_first=True)
    if stopped.told_at is None:
        failed = f"it could not be told to stop: {stopped.refused or stopped.explanation}"
    elif second is None and stop_and_resume.not_resumed is not None:
        failed = f"it could not be resumed: {stop_and_resume.not_resumed}"
    elif second is None:
        failed = f"it was told to stop, and did not begin again: {(first.sentence if first else None) or stopped.explanation}"
    elif not fine(stopped, tries[1]):
        failed = f"it was resumed, and has not finished: {second.sentence or stopped.explanation}"
    why_no_reference = None if fine(undisturbed, tries[0]) else f"has not finished ({undisturbed.explanation})"
    resumed_at = second.first_step if second is not None else None
    if resumed_at is None and stop_and_resume.resumed:
        resumed_at = first_step_after(stopped.run_dir, stop_and_resume.lines_before)
    same = None
    if failed is None and why_no_reference is None:
        at = stop_and_resume.stopped_at
        cut = stopped.config.job.kind == JobKind.COMMAND and (at is None or at < plan.steps)
        same = records.compare_runs(
            undisturbed.run_dir, stopped.run_dir, up_to=plan.steps if cut else None, stopped_at=at
        )
        if stopped.config.job.checkpoints is not None:
            saved = [_own_checkpoints(run.run_dir, run.config) for run in (undisturbed, stopped)]
            same = records.with_own_checkpoints(same, saved[0], saved[1], stopped_at=at)
    return OwnEvidence(
        undisturbed=why_no_reference,
        told=stopped.told_at is not None and stop_and_resume.not_resumed is None,
        failed=failed,
        stopped_at=stop_and_resume.stopped_at,
        resumed_at=resumed_at,
        comparison=same,
    )


def first_step_after(run_dir: RunDir, lines: int) -> int | None:
    """Return the steps done when the part of a log after `lines` lines began; None if there is none."""
    try:
        later = read_metrics(run_dir.metrics_file)[lines:]
    except UnreadableRecordError:
        return None
    return max(0, int(later[0]["step"]) - 1) if later else None
