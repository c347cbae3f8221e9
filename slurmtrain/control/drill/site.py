"""The drill of a site: tiny runs, one for each way, submitted at once, interrupted as a person or SLURM would, and judged."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmtrain.choices import Backend
from slurmtrain.config.parallel_dims import ParallelDims
from slurmtrain.config.schema import Config
from slurmtrain.config.validate import validate
from slurmtrain.control import stop
from slurmtrain.control.drill import evidence as records
from slurmtrain.control.drill import scratch
from slurmtrain.control.drill.judge import Evidence, Judgement, Result, judge
from slurmtrain.control.drill.preemptors import Preemptor, preemptors, script_of
from slurmtrain.control.drill.scratch import Remains, Watched
from slurmtrain.control.drill.ways import Way, site_config, why_not_here
from slurmtrain.control.submitting import check, client_of
from slurmtrain.errors import ClusterError, SlurmtrainError
from slurmtrain.launch.named_paths import with_absolute_paths
from slurmtrain.launch.submit import preparing
from slurmtrain.launch.submit_once import RefusedError, sbatch
from slurmtrain.launch.submit_once import check as check_accepted
from slurmtrain.report.leaving_time import time_to_leave
from slurmtrain.runs.outcome import Verdict as Next
from slurmtrain.slurm.client import PreemptionTimes, SlurmClient
from slurmtrain.slurm.read_facts import own_user
from slurmtrain.system import files

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SiteDrill:
    """What a drill of a site has shown, and what it has left behind."""

    judgements: Sequence[Judgement]
    took_s: float
    remains: Remains


def drill_site(
    config: Config,
    ways: Sequence[Way],
    overrides: Sequence[str],
    given: Collection[str],
    cwd: Path,
    *,
    within_min: float,
    leaving_s: float = 0.0,
    keep: bool = False,
) -> SiteDrill:
    """Drill a site, and return the verdicts in the order of `ways`.

    All jobs are cancelled at the end, also after Ctrl-C. The folder of the runs is removed, unless a way has failed,
    something is left in it, or `keep` is set.

    Args:
        config: a composed config, with a tiny model.
        given: keys that the person has set.
        within_min: minutes after which what has not ended is judged as it is.
        leaving_s: seconds that a run takes to leave, besides its own.

    Raises:
        ConfigError, ClusterError: a run cannot be prepared, or submitted.
    """
    began = time.monotonic()
    config = with_absolute_paths(config, cwd)
    local = config.cluster.backend == Backend.LOCAL
    client = None if local else client_of(config)
    folder = scratch.make_drill_folder(Path(config.job.runs_dir))
    runs: list[Watched] = []
    keep_runs = True  # of a drill that was broken off, too
    try:
        with scratch.interruptible():
            cannot, preemptor = _cannot(config, ways, client, folder)
            tried = [way for way in ways if way not in cannot]
            # A whole node is wanted for the preemption, so its job comes first.
            order: list[Way | None] = [
                *sorted(tried, key=lambda way: way is not Way.PREEMPTION),
                *([None] if tried else []),
            ]
            for way in order:
                its = site_config(config, way, folder, given=given, leaving_s=leaving_s)
                runs.append(_start(its, way, overrides, cwd, client))
            by_way = dict(zip(order, runs, strict=True))
            acting = {run.run_dir.id: way for way, run in by_way.items() if way is not None}

            def act(run: Watched) -> None:
                if run.run_dir.id in acting:
                    interrupt(run, acting[run.run_dir.id], client, preemptor)

            scratch.follow(runs, act, within_s=60 * within_min - (time.monotonic() - began))
            judgements = _judge_all(ways, by_way, cannot, client, within_min)
            keep_runs = keep or any(each.result is Result.FAILED for each in judgements)
    except BaseException:
        if runs:
            log.info("the drill is broken off; its jobs are cancelled, and its runs are kept: %s", folder)
        raise
    finally:
        remains = scratch.clean_up(folder, runs, client, keep=keep_runs)
    return SiteDrill(judgements, time.monotonic() - began, remains)


def _start(config: Config, way: Way | None, overrides: Sequence[str], cwd: Path, client: SlurmClient | None) -> Watched:
    dims: ParallelDims = validate(config)
    check(config, dims, cwd)
    with preparing(config, overrides, cwd) as run_dir:
        return scratch.start(way or "undisturbed", run_dir, config, client)


def _cannot(
    config: Config, ways: Sequence[Way], client: SlurmClient | None, folder: Path
) -> tuple[dict[Way, str], Preemptor | None]:
    """Return why ways cannot be tried here, and what preempts our job."""
    found = {way: why for way in ways if (why := why_not_here(way, config)) is not None}
    if Way.PREEMPTION not in ways or client is None:
        return found, None
    preemptor = find_preemptor(config, client, folder)
    if isinstance(preemptor, Preemptor):
        return found, preemptor
    return found | {Way.PREEMPTION: preemptor}, None


def find_preemptor(config: Config, client: SlurmClient, folder: Path) -> Preemptor | str:
    """Return what may preempt a job of this config, and accepts a job of this user; or why there is nothing."""
    cluster = config.cluster
    qos, own = client.qos_of(own_user())
    found = preemptors(
        client.configuration(), client.partitions(), qos, own, partition=cluster.partition, own_qos=cluster.qos
    )
    if isinstance(found, str):
        return found
    refusals = []
    for each in found:
        script = folder / "preemptor.sbatch"
        files.write_text(script, script_of(cluster.account, each.options))
        try:
            check_accepted(script, client)
        except RefusedError as error:
            refusals.append(f"you may not use {each.name} ({error.message})")
            continue
        return each
    return "; ".join(refusals)


def interrupt(run: Watched, way: Way, client: SlurmClient | None, preemptor: Preemptor | None = None) -> None:
    """Interrupt a run in its way as soon as it holds, once. What kills a rank does so from within."""
    if way.kills or run.told_at is not None or run.refused is not None or not run.run_dir.interrupted_file.exists():
        return
    told_at = time.time()
    try:
        if client is None:
            stop.requeue(run.run_dir)
        else:
            _interrupt_job(run, way, client, preemptor)
    except SlurmtrainError as error:
        run.refused, run.given_up = error.message, True
        return
    run.told_at = told_at


def _interrupt_job(run: Watched, way: Way, client: SlurmClient, preemptor: Preemptor | None) -> None:
    attempt = records.attempts_of(run.run_dir)[-1]
    job_id = attempt.job_id or str(run.run_dir.info()["job_ids"][0])
    if way is Way.EARLY_SIGNAL:
        client.signal(job_id, "USR2")
    elif way is Way.REQUEUE:
        client.requeue(job_id, ended=True)
    elif way is Way.PREEMPTION:
        if preemptor is None or not attempt.nodes:
            raise ClusterError("it is not known on which node its job runs")
        script = script_of(run.config.cluster.account, [*preemptor.options, f"--nodelist={attempt.nodes[0]}"])
        run.jobs.append(sbatch(script, run.run_dir.path / "submitit", client.slurm_conf, []))


def _judge_all(
    ways: Sequence[Way],
    runs: dict[Way | None, Watched],
    cannot: dict[Way, str],
    client: SlurmClient | None,
    within_min: float,
) -> list[Judgement]:
    undisturbed = runs.get(None)
    judgements = []
    for way in ways:
        if way in cannot:
            judgements.append(judge(Evidence(way, cannot=cannot[way])))
            continue
        run = runs[way]
        time_s, time_of = time_given(way, run.config, client)
        assert undisturbed is not None
        judgements.append(judge(evidence_of(run, way, undisturbed, time_s, time_of, within_min)))
    return judgements


def time_given(way: Way, config: Config, client: SlurmClient | None) -> tuple[float | None, str]:
    """Return the seconds from the signal until SLURM kills, and what gives them."""
    cluster = config.cluster
    if client is None:
        return None, ""
    if way is Way.EARLY_SIGNAL:
        return float(cluster.signal_lead_s), "cluster.signal_lead_s"
    times = client.preemption_times(cluster.partition, cluster.qos)
    if way is Way.PREEMPTION:
        return time_to_leave(times), (times.grace_of if times is not None else "") or "KillWait"
    return (times or PreemptionTimes()).kill_wait_s, "KillWait"


def evidence_of(
    run: Watched, way: Way, undisturbed: Watched, time_s: float | None, time_of: str, within_min: float
) -> Evidence:
    """Return what the records say of a run that was interrupted."""
    tries = records.from_interruption_on(run.run_dir, records.attempts_of(run.run_dir))
    finished = [
        bool(each) and each[-1].verdict == Next.DONE for each in (tries, records.attempts_of(undisturbed.run_dir))
    ]
    saved = tries[0].committed_step if tries else None
    return Evidence(
        way,
        mode=run.config.requeue.mode,
        attempts=tries,
        over=run.over,
        explanation=run.explanation,
        told_at=run.told_at,
        refused=run.refused,
        save_s=records.save_seconds(run.run_dir, saved) if saved else None,
        time_s=time_s,
        time_of=time_of,
        within_min=within_min,
        sameness=records.compare_runs(undisturbed.run_dir, run.run_dir) if all(finished) else None,
        undisturbed=None if finished[1] else f"the undisturbed run has not finished ({undisturbed.explanation})",
    )
