"""The drill of a site: tiny runs, one for each way, submitted at once, interrupted as a person or SLURM would, and judged."""

from __future__ import annotations

import dataclasses
import functools
import os
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
from slurmtrain.control.drill.scratch import Leftovers, Watched
from slurmtrain.control.drill.ways import Way, site_config, why_not_here
from slurmtrain.control.submitting import ask_cluster, check, compare_all
from slurmtrain.errors import ClusterError, ConfigError, NoAnswerError, SlurmtrainError
from slurmtrain.launch.named_paths import with_absolute_paths
from slurmtrain.launch.queue_check.request import with_choices_of_the_shell
from slurmtrain.launch.submit import preparing
from slurmtrain.launch.submit_once import RefusedError, sbatch
from slurmtrain.launch.submit_once import check as check_accepted
from slurmtrain.report.leaving_time import time_to_leave
from slurmtrain.runs.reasons import Verdict as Next
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.slurm.facts import ClusterFacts
from slurmtrain.slurm.preemption import PreemptionTimes, preemption_times
from slurmtrain.system import files


@dataclass(frozen=True)
class SiteDrill:
    """What a drill of a site has shown, and what it has left behind."""

    judgements: Sequence[Judgement]
    took_s: float
    leftovers: Leftovers


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

    All jobs are cancelled at the end, also after Ctrl-C. The folder of the runs is removed, unless a way has failed
    or could not be judged, a job may still write there, the drill was broken off, or `keep` is set.

    Args:
        config: a composed config, with a tiny model.
        given: keys that the person has set.
        within_min: minutes after which what has not ended is judged as it is.
        leaving_s: seconds that a run takes to leave, besides its own.

    Raises:
        ConfigError, ClusterError: a run cannot be prepared, or submitted, or its job does not suit the cluster.
    """
    began = time.monotonic()
    config = with_absolute_paths(config, cwd)
    facts, client = ClusterFacts(), None
    if config.cluster.backend != Backend.LOCAL:
        config = dataclasses.replace(config, cluster=with_choices_of_the_shell(config.cluster, os.environ))
        client, facts = ask_cluster(config)
    node_mb = most_memory_mb(facts, config.cluster.partition)
    tiny = functools.partial(site_config, config, given=given, leaving_s=leaving_s, node_mb=node_mb)
    if client is not None:
        # Not the config's own jobs, which are larger, but those of the drill: one node can be too few, too.
        asking = [tiny(way, Path(config.job.runs_dir)) for way in ways]
        try:
            compare_all(facts, asking[0], asking[1:])
        except ConfigError as error:
            raise ConfigError(f"a tiny job of the drill cannot run: {error.message}", hint=error.hint) from None
    with scratch.drilling(Path(config.job.runs_dir), client) as drill:
        cannot, preemptor = _cannot(config, ways, client, facts, drill.folder)
        tried = [way for way in ways if way not in cannot]
        # A whole node is wanted for the preemption, so its job comes first.
        order: list[Way | None] = [
            *sorted(tried, key=lambda way: way is not Way.PREEMPTION),
            *([None] if tried else []),
        ]
        for way in order:
            drill.runs.append(_start(tiny(way, drill.folder), way, overrides, cwd, client))
        by_way = dict(zip(order, drill.runs, strict=True))
        acting = {run.run_dir.id: way for way, run in by_way.items() if way is not None}

        def act(run: Watched) -> None:
            if run.run_dir.id in acting:
                interrupt(run, acting[run.run_dir.id], client, preemptor)

        scratch.follow(drill.runs, act, within_s=60 * within_min - (time.monotonic() - began))
        judgements = _judge_all(ways, by_way, cannot, facts, within_min)
        drill.keep = keep or any(each.undecided or each.result is Result.FAILED for each in judgements)
    return SiteDrill(judgements, time.monotonic() - began, drill.leftovers)


def most_memory_mb(facts: ClusterFacts, partition: str | None) -> int | None:
    """Return the most memory of a node in a partition (of several: a list with commas), in MB; None: not known."""
    names = [each.name for each in map(facts.partition, partition.split(",") if partition else [None]) if each]
    return max((group.memory_mb for name in names for group in facts.nodes_of(name)), default=None)


def _start(config: Config, way: Way | None, overrides: Sequence[str], cwd: Path, client: SlurmClient | None) -> Watched:
    dims: ParallelDims = validate(config)
    check(config, dims, cwd)
    with preparing(config, overrides, cwd) as run_dir:
        return scratch.start(way or "undisturbed", run_dir, config, client)


def _cannot(
    config: Config, ways: Sequence[Way], client: SlurmClient | None, facts: ClusterFacts, folder: Path
) -> tuple[dict[Way, str], Preemptor | None]:
    """Return why ways cannot be tried here, and what preempts our job."""
    found = {way: why for way in ways if (why := why_not_here(way, config)) is not None}
    if Way.PREEMPTION not in ways or client is None:
        return found, None
    preemptor = find_preemptor(config, client, facts, folder)
    if isinstance(preemptor, Preemptor):
        return found, preemptor
    return found | {Way.PREEMPTION: preemptor}, None


def find_preemptor(config: Config, client: SlurmClient, facts: ClusterFacts, folder: Path) -> Preemptor | str:
    """Return what may preempt a job of this config, and accepts a job of this user; or why there is nothing."""
    cluster = config.cluster
    found = preemptors(facts, partition=cluster.partition, account=cluster.account, qos=cluster.qos)
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
    except NoAnswerError as error:  # it may have been done all the same: the run shows whether it was
        run.unanswered = error.message
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
    facts: ClusterFacts,
    within_min: float,
) -> list[Judgement]:
    undisturbed = runs.get(None)
    judgements = []
    for way in ways:
        if way in cannot:
            judgements.append(judge(Evidence(way, cannot=cannot[way])))
            continue
        run = runs[way]
        time_s, time_of = time_given(way, run.config, facts)
        assert undisturbed is not None
        judgements.append(judge(evidence_of(run, way, undisturbed, time_s, time_of, within_min)))
    return judgements


def time_given(way: Way, config: Config, facts: ClusterFacts) -> tuple[float | None, str]:
    """Return the seconds from the signal until SLURM kills, and what gives them."""
    cluster = config.cluster
    if cluster.backend == Backend.LOCAL:
        return None, ""
    if way is Way.EARLY_SIGNAL:
        return float(cluster.signal_lead_s), "cluster.signal_lead_s"
    times = preemption_times(facts, cluster.partition, account=cluster.account, qos=cluster.qos)
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
        unanswered=run.unanswered,
        save_s=records.save_seconds(run.run_dir, saved) if saved else None,
        time_s=time_s,
        time_of=time_of,
        within_min=within_min,
        comparison=records.compare_runs(undisturbed.run_dir, run.run_dir) if all(finished) else None,
        undisturbed=None if finished[1] else f"the undisturbed run has not finished ({undisturbed.explanation})",
    )
