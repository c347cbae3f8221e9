"""What a report says in words: what a run is, how far it got, what was lost and why, and what to do. Pure functions."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from slurmtrain.choices import Backend
from slurmtrain.report.goodput.causes import HOLDS_NO_GPUS, Cause, Goodput
from slurmtrain.report.page import units
from slurmtrain.report.page.run_facts import RunFacts
from slurmtrain.report.page.series import Series, aligned
from slurmtrain.report.progress import at_about
from slurmtrain.report.status.state import WAITING, RunStatus
from slurmtrain.report.trouble import SlowRanks, slow_ranks, trouble, trouble_of_checkpoints
from slurmtrain.runs.attempts import Attempt
from slurmtrain.runs.events import Event
from slurmtrain.runs.reasons import Reason, Verdict
from slurmtrain.system import records

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
REASONS: dict[str, tuple[str, str]] = {  # one, and several
    Reason.FINISHED: ("planned end", "planned ends"),
    Reason.TIME_LIMIT: ("time limit", "time limits"),
    Reason.PREEMPTED: ("preemption", "preemptions"),
    Reason.CANCELLED: ("cancellation", "cancellations"),
    Reason.NODE_FAILURE: ("failed node", "failed nodes"),
    Reason.REQUEUED: ("requeue from outside", "requeues from outside"),
    Reason.ASKED: ("request to stop", "requests to stop"),
    Reason.PRUNED: ("pruning", "prunings"),
    Reason.CONFIG: ("wrong config or environment", "wrong configs or environments"),
    Reason.DIVERGED: ("divergence", "divergences"),
    Reason.BAD_NODE: ("node on which the run could not start", "nodes on which the run could not start"),
    Reason.SUPERSEDED: ("newer attempt that took over", "newer attempts that took over"),
    Reason.CRASH: ("crash", "crashes"),
    Reason.HANG: ("hang", "hangs"),
}


def what_it_is(facts: RunFacts) -> str:
    """Say whose run this is, of what, and on which machines."""
    info, clean = facts.info, units.clean
    who = f"Run {clean(facts.run_dir.id, 80)} ({clean(facts.name, 80)})"
    person = f"{clean(info.get('user'), 60)} on {clean(info.get('host'), 80)}"
    return f"{who} was submitted on {units.moment(info.get('created'))} by {person}. {_subject(facts)}"


def _subject(facts: RunFacts) -> str:
    kind = facts.setting("job.kind")
    command = facts.setting("job.command")
    if kind == "command" and isinstance(command, str):
        what = f"It runs the command {units.clean(command, 160)}"
    elif kind == "prepare":
        what = "It prepares data"
    elif facts.config is None:
        what = "It is not known what it trains, because its config cannot be read"
    else:
        what = f"It trains {_model(facts)}"
    return f"{what}, {_machines(facts)}." if facts.attempts else f"{what}."


def _model(facts: RunFacts) -> str:
    model = facts.setting("model")
    if not isinstance(model, Mapping):
        return "a model"
    target = units.clean(str(model.get("_target_", "a model")).rpartition(".")[2], 60)
    sizes = [
        f"{name} {value}"
        for name in ("dim", "n_layers", "n_heads", "vocab_size")
        if isinstance(value := model.get(name), int)
    ]
    path = model.get("path")
    parts = [*sizes, *([units.clean(path, 80)] if isinstance(path, str) else [])]
    return f"{target} ({', '.join(parts)})" if parts else target


def _machines(facts: RunFacts) -> str:
    last = facts.attempts[-1]
    nodes = f"on {units.plural(len(last.nodes), 'node')}" if last.nodes else "on this machine"
    gpus = facts.goodput.gpu_count if facts.goodput is not None else 0.0
    held = units.plural(round(gpus), "GPU") if gpus >= 1 else "no GPU"
    return f"with {units.plural(last.world_size, 'rank')} {nodes} and {held}" if last.world_size else nodes


def how_far(facts: RunFacts) -> str:
    """Say how far the run got, and what its loss is."""
    progress = facts.state.progress
    status = facts.state.status
    parts = ["It failed" if status == RunStatus.FAILED else f"It is {status}"]
    if progress.step is not None and progress.steps:
        share = units.percent(min(1.0, progress.step / progress.steps))
        parts.append(f"and has done {progress.step:,} of {progress.steps:,} steps ({share})")
    elif progress.step is not None:
        parts.append(f"and has done {progress.step:,} steps")
    sentence = f"{' '.join(parts)}."
    if progress.eta_s is not None and progress.left and progress.eta_s < LONGEST_S:
        sentence += f" At this speed, it ends {at_about(facts.now + progress.eta_s, facts.now)}."
    if (loss := facts.series.get("loss")) is not None:
        last = units.number(float(loss.values[-1]))
        sentence += f" The training loss was {last} nats per token at step {loss.steps[-1]:,.0f}."
    if (best := best_of(facts)) is not None:
        metric, step, value = best
        shown = units.number(value, units.unit_of(metric))
        sentence += f" The best {units.name_of(metric)} is {shown}, at step {step:,.0f}."
    speed, mfu = (_mean_of_last_half(facts, name) for name in ("tokens_per_s", "mfu"))
    if speed is not None:
        of_peak = f" ({units.percent(mfu)} MFU)" if mfu is not None and facts.has_gpus else ""
        sentence += f" Over the last half of its log, it trained on {units.brief(speed)} tokens per second{of_peak}."
    return sentence


def _mean_of_last_half(facts: RunFacts, name: str) -> float | None:
    return facts.series[name].mean_of_last_half if name in facts.series else None


def best_of(facts: RunFacts) -> tuple[str, float, float] | None:
    """Return metric, step and value of the best evaluation so far, as checkpoints are compared; None if there is none."""
    metric = facts.setting("checkpoint.best_metric")
    metric = metric if isinstance(metric, str) else "valid_loss"
    if metric not in facts.series or not len((found := facts.series[metric].finite).values):
        return None
    place = int(found.values.argmax() if facts.setting("checkpoint.best_mode") == "max" else found.values.argmin())
    return metric, float(found.steps[place]), float(found.values[place])


def attempts_sentence(tries: list[Attempt]) -> str:
    """Say how many attempts it took, and why the earlier ones ended."""
    if not tries:
        return "It has not started yet."
    ended = [each for each in tries if each.reason not in (None, Reason.FINISHED)]
    if not ended:
        return "It took one attempt." if len(tries) == 1 else f"It took {len(tries)} attempts."
    reasons = Counter(str(each.reason) for each in ended)
    words = units.listed(f"{count} {reason_words(reason, count)}" for reason, count in reasons.most_common())
    in_place = sum(each.verdict == Verdict.IN_PLACE for each in tries)
    again = {0: "", 1: " One restart was in place, in the same job."}.get(
        in_place, f" {in_place} restarts were in place, in the same job."
    )
    return f"It took {units.plural(len(tries), 'attempt')}, with {words}.{again}"


def reason_words(reason: str, count: int = 1) -> str:
    """Return what ended attempts, as a noun: "preemption", "3 crashes" without its number."""
    one, several = REASONS.get(reason, (units.clean(reason, 40),) * 2)
    return one if count == 1 else several


def checkpoints_sentence(events: Iterable[Mapping[str, Any]]) -> str:
    """Say how many checkpoints were committed, how large they are, and how long training waited for them."""
    found = [event for event in events if event["event"] == Event.CHECKPOINT]
    if not found:
        return ""
    many = f"{units.plural(len(found), 'checkpoint')} {'was' if len(found) == 1 else 'were'} committed"
    step = found[-1].get("step")
    if isinstance(step, int) and records.is_count(step):
        many += f", the last at step {step:,}"
    size, took, stall = (_mean_of(found, name) for name in ("size", "seconds", "stall_s"))
    parts = [
        *([f"{units.brief(size / 1e9)} GB" if size >= 1e9 else f"{units.brief(size / 1e6)} MB"] if size else []),
        *([f"committed in {units.duration(took)}"] if took is not None else []),
        *([f"training waited {units.duration(stall)} for it"] if stall is not None else []),
    ]
    return f"{many}. On average: {', '.join(parts)}." if parts else f"{many}."


def _mean_of(events: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [value for event in events if (value := records.finite(event.get(name))) is not None and value >= 0]
    return sum(values) / len(values) if values else None


def what_was_lost(goodput: Goodput | None) -> str:
    """Say what share of the time was productive, and what the rest went into."""
    if goodput is None or not goodput.held_s > 0:
        return ""
    share = goodput.share
    held = goodput.held_s
    begin = f"It held its nodes for {units.duration(held)}"
    if goodput.gpu_hours > 0:
        begin += f" ({units.hours(3600 * goodput.gpu_hours)} GPU hours)"
    waits = [
        words.format(units.duration(seconds))
        for cause, words in _WAITS.items()
        if (seconds := goodput.seconds.get(cause, 0.0)) >= 1
    ]
    waited = f" In addition, it {units.listed(waits)}." if waits else ""
    if share is None:
        return f"{begin}. How much of that was productive is not known, since the program reports no progress.{waited}"
    others = [
        (seconds, cause)
        for cause, seconds in goodput.seconds.items()
        if cause is not Cause.PRODUCTIVE and cause not in HOLDS_NO_GPUS and seconds >= 0.001 * held
    ]
    most_first = sorted(others, reverse=True)
    lost = units.listed((f"{CAUSES[cause]} {units.duration(seconds)}" for seconds, cause in most_first), 4)
    sentence = f"{begin}, of which {units.percent(share)} were productive (its goodput)."
    return f"{sentence}{f' The rest: {lost}.' if lost else ''}{waited}"


_WAITS = {Cause.QUEUE: "waited for {} in the queue", Cause.STOPPED: "was stopped for {}, until somebody resumed it"}


def what_to_do(facts: RunFacts) -> list[str]:
    """Return advice, the most urgent first; it is never empty."""
    return [*_about_state(facts), *_about_numbers(facts), *_about_time(facts), *_about_nodes(facts)] or [
        "Nothing needs to be done."
    ]


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
    return found[:8]


def _about_numbers(facts: RunFacts) -> list[str]:
    found = []
    numbers, checkpoints = trouble(facts.events), trouble_of_checkpoints(facts.events)
    if numbers:
        found.append(f"Training became numerically unstable: {_sentence(numbers)}")
    if checkpoints:
        found.append(f"Checkpoints of the program: {_sentence(checkpoints)}")
    valid = facts.series.get("valid_loss")
    best = best_of(facts)
    if valid is not None and best is not None and best[0] == "valid_loss" and len(valid.values) >= 5:
        later = valid.finite.values[valid.finite.steps > best[1]]
        if len(later) >= 3 and bool((later > best[2] * 1.02).all()):
            found.append(
                f"The validation loss has been rising since its best value at step {best[1]:,.0f}, so the model may overfit. "
                "checkpoint.keep_best=1 keeps the best one."
            )
    return found


def data_wait_share(series: Mapping[str, Series]) -> float | None:
    """Return the mean share of a step's time that waits for data, over the last half of the log; None if not known."""
    waits, times = series.get("time_data_s") or series.get("data_wait_s"), series.get("step_time_s")
    if waits is None or times is None:
        return None
    steps, (waited, taken) = aligned((waits, times))
    half = len(steps) // 2
    total = float(taken[half:].sum())
    return float(waited[half:].sum()) / total if total > 0 else None


def _about_time(facts: RunFacts) -> list[str]:
    found = []
    share = data_wait_share(facts.series)
    if share is not None and share > DATA_WAIT_SHARE:
        workers = facts.setting("train.data_workers")
        found.append(
            f"Steps spend {units.percent(share)} of their time waiting for data: more workers may help "
            f"(train.data_workers={units.clean(workers, 20)})."
        )
    share = _mean_of_last_half(facts, "communication_share")
    if share is not None and share > COMMUNICATION_SHARE:
        over_nodes = bool(facts.attempts) and len(facts.attempts[-1].nodes) > 1
        shards_over_nodes = over_nodes and facts.setting("parallel.dp_shard") != 1
        ways = ["larger micro batches (train.micro_batch_size)"]
        ways += ["sharding only within a node (parallel.dp_shard, dp_replicate)"] * shards_over_nodes
        found.append(
            f"Steps spend {units.percent(share)} of their time on communication that no computation hides: "
            f"{' or '.join(ways)} may reduce it."
        )
    goodput = facts.goodput
    if goodput is None or not goodput.held_s > 0:
        return found
    for cause, advice in {Cause.STARTUP: _about_restarts(facts), **_ADVICE}.items():
        part = goodput.shares.get(cause, 0.0)
        if part > WORTH_SAYING and advice:
            found.append(f"{units.percent(part)} of the allocated time went into {CAUSES[cause]}: {advice}")
    return found


def _about_restarts(facts: RunFacts) -> str:
    """Return what makes the restarts that this run had shorter or rarer; "" if nothing of it can be configured."""
    if facts.setting("cluster.backend") == Backend.LOCAL:
        return ""
    ways = []
    if any(each.reason == Reason.TIME_LIMIT for each in facts.attempts):
        ways.append("a longer cluster.time_limit_min makes restarts rarer")
    return f"{units.listed(ways)}." if ways else ""


_ADVICE: dict[Cause, str] = {
    Cause.REDONE: "save more often (checkpoint.every_minutes), or let checkpoint.auto=true choose the interval.",
    Cause.CHECKPOINT: "save less often (checkpoint.every_minutes), or let checkpoint.auto=true choose the interval.",
    Cause.EVALUATION: "evaluate less often (train.eval_every), or in separate jobs (eval.mode=job).",
    Cause.HUNG: "a shorter watchdog.min_s finds a hang sooner.",
    Cause.LOST: "save more often (checkpoint.every_minutes), so that an interruption loses fewer steps.",
}


def _about_nodes(facts: RunFacts) -> list[str]:
    left_out = {each.node for each in facts.left_out}
    slow = [(cost, each) for each in slow_ranks(facts.events) if (cost := _cost(each, facts)) is not None]
    slow.sort(key=lambda pair: -pair[0])
    found = []
    for cost, each in slow[:MOST_SLOW]:
        lost = f" That cost {units.percent(cost)} of the time of all steps." if cost > 0 else ""
        advice = " Check that node, and the load of its ranks." if each.node not in left_out else ""
        found.append(f"{_sentence(f'{str(each)[:1].upper()}{str(each)[1:]}')}{lost}{advice}")
    if facts.left_out:
        nodes = units.listed(units.clean(each.node, 64) for each in facts.left_out)
        found.append(f"The job excludes {nodes}, where earlier attempts had problems: tell the cluster's admins.")
    return found


def _cost(slow: SlowRanks, facts: RunFacts) -> float | None:
    """Return the share of the time of all steps that slow ranks have cost; None: it is over, and was next to nothing.

    What was not said to be over ended with its attempt.
    """
    attempt = next((each for each in facts.attempts if each.number == slow.attempt), None)
    newest = attempt is None or attempt is facts.attempts[-1]
    done = max(facts.state.step or 0, slow.since)
    until = slow.until
    if until is None:
        until = done if newest or attempt is None or attempt.last_step is None else attempt.last_step
    share = min(1.0, slow.share or 0.0) * max(0, until - slow.since) / max(1, done)
    return share if share >= SLOW_WORTH_SAYING or (slow.until is None and newest) else None


def _sentence(text: object, longest: int = units.LONGEST_TEXT) -> str:
    """Return a text as one sentence that ends with a full stop."""
    shown = units.clean(text or "the reason is not known", longest)
    return shown if shown.endswith((".", "!", "?", "…")) else f"{shown}."


def made(now: float) -> str:
    """Say when the report was made, and in which time zone its times are."""
    return f"Made on {units.moment(now)} {time.strftime('%Z', time.localtime(now))}; all times are in that time zone"
