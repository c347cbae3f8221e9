"""What a report says in words: what a run is, how far it got, what was lost and why, and what to do. Pure functions."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping

from slurmtrain.choices import Backend
from slurmtrain.report.collect import StepTimes, save_times
from slurmtrain.report.facts import RunFacts
from slurmtrain.report.findings import trouble, trouble_of_checkpoints
from slurmtrain.report.goodput import HOLDS_NO_GPUS, Cause, Goodput
from slurmtrain.report.page import units
from slurmtrain.report.page.charts import Series
from slurmtrain.report.progress import at_about
from slurmtrain.report.status.state import WAITING, RunStatus
from slurmtrain.runs.attempts import Attempt
from slurmtrain.runs.reasons import Event, Reason, Verdict
from slurmtrain.system.texts import roughly

WORTH_SAYING = 0.05  # share of the time that nodes were held: what took less needs no advice
SLOW_WORTH_SAYING = 0.01  # share of the time of all steps that slow ranks have cost
DATA_WAIT_SHARE = 0.1
COMMUNICATION_SHARE = 0.3
MOST_SLOW = 3  # findings of slow ranks, those that cost most
LONGEST_EXPLANATION = 2000  # characters; it ends with what to do
LONGEST_S = 10 * 365 * 86400.0  # a time that is further off says nothing
CAUSES: dict[Cause, str] = {
    Cause.QUEUE: "waiting in the queue",
    Cause.STOPPED: "stopped, until somebody resumed it",
    Cause.STARTUP: "starting up",
    Cause.PRODUCTIVE: "productive steps",
    Cause.REDONE: "repeated steps",
    Cause.CHECKPOINT: "waiting for checkpoints",
    Cause.EVALUATION: "evaluation",
    Cause.HUNG: "hangs",
    Cause.LOST: "steps lost since the last checkpoint",
    Cause.IDLE_END: "idle at the end of attempts",
    Cause.BETWEEN: "between attempts in the same job",
    Cause.UNKNOWN: "not known: the program reports no progress",
}
ADVICE: dict[Cause, str] = {
    Cause.REDONE: "save more often (checkpoint.every_minutes), or let checkpoint.auto=true choose the interval.",
    Cause.CHECKPOINT: "save less often (checkpoint.every_minutes), or let checkpoint.auto=true choose the interval.",
    Cause.EVALUATION: "evaluate less often (train.eval_every), or in separate jobs (eval.mode=job).",
    Cause.HUNG: "a shorter watchdog.min_s finds a hang sooner.",
    Cause.LOST: "save more often (checkpoint.every_minutes), so that an interruption loses fewer steps.",
}


def what_it_is(facts: RunFacts) -> str:
    """Say whose run this is, of what, and on which machines."""
    info, clean = facts.info, units.clean
    command, model = facts.setting("job.command"), facts.setting("model._target_")
    if facts.setting("job.kind") == "command" and isinstance(command, str):
        what = f"It runs the command {clean(command, 160)}"
    elif facts.setting("job.kind") == "prepare":
        what = "It prepares data"
    elif facts.config is None:
        what = "It is not known what it trains, because its config cannot be read"
    else:
        what = f"It trains {clean(str(model or 'a model').rpartition('.')[2], 60)}"
    if facts.attempts:
        last, gpus = facts.attempts[-1], facts.goodput.gpu_count if facts.goodput is not None else 0.0
        nodes = f"on {units.plural(len(last.nodes), 'node')}" if last.nodes else "on this machine"
        held = units.plural(round(gpus), "GPU") if gpus >= 1 else "no GPU"
        what += (
            f", with {units.plural(last.world_size, 'rank')} {nodes} and {held}" if last.world_size else f", {nodes}"
        )
    return (
        f"Run {clean(facts.run_dir.id, 80)} ({clean(info.get('name'), 80)}) was submitted on "
        f"{units.moment(info.get('created'))} by {clean(info.get('user'), 60)} on {clean(info.get('host'), 80)}. {what}."
    )


def how_far(facts: RunFacts, series: Mapping[str, Series], steps: StepTimes | None) -> str:
    """Say how far the run got, and what its loss is."""
    progress, status = facts.state.progress, facts.state.status
    sentence = "It failed" if status == RunStatus.FAILED else f"It is {status}"
    if progress.step is not None and progress.steps:
        share = units.percent(min(1.0, progress.step / progress.steps))
        sentence += f" and has done {progress.step:,} of {progress.steps:,} steps ({share})"
    elif progress.step is not None:
        sentence += f" and has done {progress.step:,} steps"
    sentence += "."
    if progress.eta_s is not None and progress.left and progress.eta_s < LONGEST_S:
        sentence += f" At this speed, it ends {at_about(facts.now + progress.eta_s, facts.now)}."
    if (loss := series.get("loss")) is not None:
        last = units.number(float(loss.values[-1]))
        sentence += f" The training loss was {last} nats per token at step {loss.steps[-1]:,.0f}."
    metric = str(facts.setting("checkpoint.best_metric") or "valid_loss")
    if metric in series and len(values := series[metric].finite.values):
        place = values.argmax() if facts.setting("checkpoint.best_mode") == "max" else values.argmin()
        value = units.number(float(values[place]), units.unit_of(metric))
        step = series[metric].finite.steps[place]
        sentence += f" The best {units.name_of(metric)} is {value}, at step {step:,.0f}."
    if steps is not None and steps.tokens_per_s is not None:
        of_peak = f" ({units.percent(steps.mfu)} MFU)" if steps.mfu is not None and facts.has_gpus else ""
        sentence += f" In its last steps, it trained on {units.brief(steps.tokens_per_s)} tokens per second{of_peak}."
    return sentence


_NOUNS: dict[str, str] = {
    Reason.PREEMPTED: "preemption",
    Reason.CANCELLED: "cancellation",
    Reason.REQUEUED: "scontrol requeue",
    Reason.ASKED: "request",
    Reason.PRUNED: "pruning",
    Reason.DIVERGED: "divergence",
    Reason.SUPERSEDED: "a newer attempt",
}


def attempts_sentence(tries: list[Attempt]) -> str:
    """Say how many attempts it took, and why the earlier ones ended."""
    if not tries:
        return "It has not started yet."
    reasons = Counter(units.clean(each.reason, 40) for each in tries if each.reason not in (None, Reason.FINISHED))
    ends = units.listed(f"{count} ended by {_NOUNS.get(reason, reason)}" for reason, count in reasons.most_common())
    in_place = sum(each.verdict == Verdict.IN_PLACE for each in tries)
    again = f" {units.plural(in_place, 'restart')} kept the same job." if in_place else ""
    return f"It took {units.plural(len(tries), 'attempt')}{f': {ends}' if ends else ''}.{again}"


def checkpoints_sentence(facts: RunFacts) -> str:
    """Say how many checkpoints were committed, how large they are, and how long training waited for them."""
    count = sum(event["event"] == Event.CHECKPOINT for event in facts.events)
    if not count:
        return ""
    sentence = f"{units.plural(count, 'checkpoint')} {'was' if count == 1 else 'were'} committed"
    if (usual := save_times(facts.events)) is None:
        return f"{sentence}."
    held, write_s, stall_s = usual
    size = f"{units.brief(held / 1e9)} GB" if held >= 1e9 else f"{units.brief(held / 1e6)} MB"
    took, waited = f"{units.brief(write_s)} s", f"{units.brief(stall_s)} s"
    return f"{sentence}. In the median: {size}, committed in {took}, and training waited {waited} for it."


def what_was_lost(goodput: Goodput | None) -> str:
    """Say what share of the time was productive, and what the rest went into."""
    if goodput is None or not (held := goodput.held_s) > 0:
        return ""
    sentence = f"It held its nodes for {roughly(held)}"
    if goodput.gpu_hours > 0:
        sentence += f" ({units.hours(3600 * goodput.gpu_hours)} GPU hours)"
    if goodput.share is None:
        sentence += ". How much of that was productive is not known, since the program reports no progress."
    else:
        sentence += f", of which {units.percent(goodput.share)} were productive (its goodput)."
        others = [
            (seconds, cause)
            for cause, seconds in goodput.seconds.items()
            if cause is not Cause.PRODUCTIVE and cause not in HOLDS_NO_GPUS and seconds >= max(0.5, 0.001 * held)
        ]
        lost = units.listed((f"{CAUSES[cause]} {roughly(each)}" for each, cause in sorted(others)[::-1]), 4)
        sentence += f" The rest: {lost}." if lost else ""
    words = {Cause.QUEUE: "waited for {} in the queue", Cause.STOPPED: "was stopped for {}, until somebody resumed it"}
    waits = [words[cause].format(roughly(s)) for cause in words if (s := goodput.seconds.get(cause, 0.0)) >= 1]
    return f"{sentence}{f' In addition, it {units.listed(waits)}.' if waits else ''}"


def what_to_do(facts: RunFacts, steps: StepTimes | None) -> list[str]:
    """Return advice, the most urgent first; it is never empty."""
    found = [*_about_state(facts), *_about_steps(facts, steps), *_about_time(facts), *_about_nodes(facts)]
    return found or ["Nothing needs to be done."]


def _about_state(facts: RunFacts) -> list[str]:
    now, found = facts.state, []
    if now.status in (RunStatus.FAILED, RunStatus.STOPPED, RunStatus.LOST, RunStatus.HELD, RunStatus.PREPARED):
        how = "failed" if now.status == RunStatus.FAILED else f"is {now.status}"
        found.append(f"It {how}: {_sentence(now.explanation, LONGEST_EXPLANATION)}")
    elif now.status in WAITING:
        found.append(f"It waits: {_sentence(now.explanation)}")
    if now.slurm_error:
        found.append(f"SLURM could not be asked: {_sentence(now.slurm_error)}")
    for attempt in facts.attempts:
        if attempt.reason == Reason.HANG:
            page = facts.hang_pages.get(attempt.number)
            where = f" Where each rank stood is in {units.clean(page)}." if page else ""
            said = (attempt.sentence or "").removeprefix("hung: ")
            found.append(f"Attempt {attempt.number} hung: {_sentence(said)}{where}")
    if numbers := trouble(facts.events):
        found.append(f"Training became numerically unstable: {_sentence(numbers)}")
    if checkpoints := trouble_of_checkpoints(facts.events):
        found.append(f"Checkpoints of the program: {_sentence(checkpoints)}")
    return found[:8]


def _about_steps(facts: RunFacts, steps: StepTimes | None) -> list[str]:
    found = []
    waiting, communication = (0.0 if steps is None else steps.share(part) for part in ("data", "communication"))
    if waiting > DATA_WAIT_SHARE:
        workers = units.clean(facts.setting("train.data_workers"), 20)
        found.append(
            f"Steps spend {units.percent(waiting)} of their time waiting for data: more workers may help "
            f"(train.data_workers={workers})."
        )
    if communication > COMMUNICATION_SHARE:
        over_nodes = bool(facts.attempts) and len(facts.attempts[-1].nodes) > 1
        shards_over_nodes = over_nodes and facts.setting("parallel.dp_shard") != 1
        ways = ["larger micro batches (train.micro_batch_size)"]
        ways += ["sharding only within a node (parallel.dp_shard, dp_replicate)"] * shards_over_nodes
        found.append(
            f"Steps spend {units.percent(communication)} of their time on communication that no computation hides: "
            f"{' or '.join(ways)} may reduce it."
        )
    return found


def _about_time(facts: RunFacts) -> list[str]:
    """Return what makes shorter or rarer what the time of the run went into, where a setting would."""
    shares, advice = facts.goodput.shares if facts.goodput is not None else {}, dict(ADVICE)
    limited = any(each.reason == Reason.TIME_LIMIT for each in facts.attempts)
    if limited and facts.setting("cluster.backend") != Backend.LOCAL:
        advice[Cause.STARTUP] = "a longer cluster.time_limit_min makes restarts rarer."
    return [
        f"{units.percent(shares[cause])} of the allocated time went into {CAUSES[cause]}: {advice[cause]}"
        for cause in Cause
        if cause in advice and shares.get(cause, 0.0) > WORTH_SAYING
    ]


def _about_nodes(facts: RunFacts) -> list[str]:
    done, newest = max(1, facts.state.step or 0), facts.attempts[-1].number if facts.attempts else None
    ends = {each.number: each.last_step for each in facts.attempts if each.number != newest}
    costs = []
    for each in facts.slow_ranks:
        until = each.until if each.until is not None else ends.get(each.attempt or 0)
        share = min(1.0, each.share or 0.0) * max(0, (done if until is None else until) - each.since) / done
        if share >= SLOW_WORTH_SAYING or until is None:
            costs.append((share, each))
    found = []
    for share, each in sorted(costs, key=lambda pair: -pair[0])[:MOST_SLOW]:
        lost = f" That cost {units.percent(share)} of the time of all steps." if share > 0 else ""
        found.append(f"{_sentence(units.capital(str(each)))}{lost} Check that node, and the load of its ranks.")
    if facts.left_out:
        nodes = units.listed(units.clean(each.node, 64) for each in facts.left_out)
        found.append(f"The job excludes {nodes}, where earlier attempts had problems: tell the cluster's admins.")
    return found


def _sentence(text: object, longest: int = units.LONGEST_TEXT) -> str:
    """Return a text as one sentence that ends with a full stop."""
    shown = units.clean(text or "the reason is not known", longest)
    return shown if shown.endswith((".", "!", "?", "…")) else f"{shown}."


def made(now: float) -> str:
    """Say when the report was made, and in which time zone its times are."""
    return f"Made on {units.moment(now)} {time.strftime('%Z', time.localtime(now))}; all times are in that time zone"
