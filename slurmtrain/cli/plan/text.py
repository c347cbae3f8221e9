"""A plan as text: a row for each thing that is planned, tables of communication and of more nodes, and notes."""

from __future__ import annotations

from slurmtrain.cli.columns import print_sentence, print_table
from slurmtrain.cli.plan.calibration import Calibration
from slurmtrain.cli.plan.quantities import count_text, hours_text, interval_text, seconds_text, size_text
from slurmtrain.cli.plan.sentences import more_nodes_sentence, nodes_text, notes_of
from slurmtrain.config.schema import Config
from slurmtrain.planner.fit import in_gb
from slurmtrain.planner.plan import CHINCHILLA, Plan, scaled_learning_rate
from slurmtrain.planner.saving import PARAMETER_BYTES, Saving
from slurmtrain.planner.shape import DecoderShape
from slurmtrain.planner.step_time import StepTime, sequence_length
from slurmtrain.report.progress import roughly


def print_plan(plan: Plan, calibration: Calibration | None) -> None:
    """Print a plan.

    Args:
        calibration: whose rates it takes; None: those of data sheets.
    """
    config, shape = plan.config, DecoderShape.of(plan.config.model)
    batch, cluster = plan.config.train.global_batch_size, plan.config.cluster
    count, size = plan.dims.micro_batches(config.train), plan.dims.micro_batch_size(config.train)
    micro = f"{count} micro batch{'es' if count > 1 else ''} of {size} on each rank"
    cpus = "CPU rank" if cluster.tasks_per_node == 1 else "CPU ranks"
    what = plan.hardware.gpu or ((cluster.gpu_type or "GPU") if cluster.gpus_per_node else cpus)
    rows = [
        ("layout", f"{nodes_text(plan.nodes)} x {cluster.tasks_per_node} {what}: {plan.dims}"),
        ("model", f"{count_text(shape.num_parameters())} parameters, computed in {plan.hardware.dtype}"),
        (
            "global batch",
            f"{batch} sequences of {sequence_length(config):,} tokens = {count_text(plan.tokens_per_step)} tokens; {micro}",
        ),
        ("memory", _memory_sentence(plan)),
    ]
    if plan.step is not None:
        rows += _step_rows(plan, plan.step)
    rows += [("checkpoint", _checkpoint_sentence(plan.saving)), ("save every", _interval_sentence(plan))]
    rows += [("goodput", _goodput_sentence(plan))]
    if plan.step is not None:
        rows.append(("cost", _cost_sentence(plan, shape)))
    rows.append(("learning rate", _rate_sentence(config, calibration)))
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        print_sentence(f"{name:<{width}}  {text}", width + 2)
    if plan.step is not None and plan.step.traffic:
        print()
        _print_traffic(plan.step)
    if plan.step is not None:
        print()
        _print_more_nodes(plan)
    print()
    for note in notes_of(plan, calibration):
        print_sentence(f"note: {note}", len("note: "))


def _memory_sentence(plan: Plan) -> str:
    limit = f" of {in_gb(plan.memory_limit)}" if plan.memory_limit is not None else ""
    fullest = plan.fullest
    where = f" on stage {fullest.stage}" if plan.dims.pp > 1 else ""
    fits = ""
    if plan.memory_limit is not None and fullest.total > plan.memory_limit:
        fits = "; it does not fit: plan --search shows what does"
    total, _, parts = str(fullest).partition(" GB ")
    return f"{total} GB{limit} on a rank{where} {parts}{fits}"


def _step_rows(plan: Plan, step: StepTime) -> list[tuple[str, str]]:
    parts = sorted(step.seconds.items(), key=lambda item: -item[1])
    shares = ", ".join(f"{name} {seconds / step.expected_s:.1%}" for name, seconds in parts if seconds > 0)
    bound = (
        "" if step.at_best_s is None else f"; not below {seconds_text(step.at_best_s)}, at the peak of GPUs and links"
    )
    rows = [("step", f"{seconds_text(step.expected_s)} expected: {shares}{bound}")]
    speed = f"{count_text(step.tokens_per_s)} tokens/s, {step.tokens_per_s / step.ranks:,.0f} on each rank"
    if plan.hardware.peak_flops is not None:
        peak = plan.hardware.peak_flops
        speed += f"; mfu {step.mfu(peak):.1%}, mfu_attended {step.mfu_attended(peak, step.expected_s):.1%}"
        if step.at_best_s is not None:
            speed += f" of at most {step.mfu_attended(peak, step.at_best_s):.1%}"
    rows.append(("speed", speed))
    if plan.dims.pp > 1:
        rows.append(("bubble", f"{step.bubble_share:.1%} of a pipeline's time ({plan.config.parallel.pp_schedule})"))
    return rows


def _checkpoint_sentence(saving: Saving) -> str:
    return (
        f"{size_text(saving.size)} ({PARAMETER_BYTES * 3} bytes a parameter), complete after {seconds_text(saving.write_s)}; "
        f"holds training up for {seconds_text(saving.stall_s)}. The weights alone in 16 bit: {size_text(saving.weights)}"
    )


def _interval_sentence(plan: Plan) -> str:
    saving, best = plan.saving, plan.interval_s
    count = 0 if plan.step is None else max(1, round(best / plan.step.expected_s))
    steps = f" = {count:,} step{'s' if count > 1 else ''}" if count else ""
    why = "Daly 2006" if best == saving.daly_s else "as long as one takes to write"
    text = f"{interval_text(best)}{steps} is best ({why}), for a failure every {roughly(saving.mtbf_s)}"
    if saving.interval_s is not None:
        text += f"; the config saves every {interval_text(saving.interval_s)}"
    return text


def _goodput_sentence(plan: Plan) -> str:
    saving = plan.saving
    text = f"{saving.goodput(plan.interval_s):.2%} of the time at best, with restarts of {roughly(saving.restart_s)}"
    if saving.interval_s is not None:
        text += f"; {saving.goodput(saving.interval_s):.2%} as configured"
    return text


def _cost_sentence(plan: Plan, shape: DecoderShape) -> str:
    hours = plan.gpu_hours
    if hours is None:
        return "failures come faster than restarts: nothing is left for training"
    assert plan.step is not None
    seconds = hours / plan.step.ranks * 3600
    best = CHINCHILLA * shape.num_parameters()
    unit = "GPU" if plan.config.cluster.gpus_per_node else "rank"
    return (
        f"{count_text(plan.tokens)} tokens take {hours_text(hours)} {unit} hours, {interval_text(seconds)}. "
        f"About {CHINCHILLA} tokens a parameter, {count_text(best)}, use computation best (arXiv:2203.15556)"
    )


def _rate_sentence(config: Config, calibration: Calibration | None) -> str:
    """Return advice on the learning rate. What counts is the tokens of a step: sequences may be of another length."""
    tokens, rate = config.train.global_batch_size * sequence_length(config), config.optim.lr
    if calibration is not None and calibration.tokens != tokens:
        scaled = scaled_learning_rate(calibration.rate, calibration.tokens, tokens)["sqrt"]
        return (
            f"{calibration.rate:.3g} with batches of {calibration.tokens:,} tokens in {calibration.run} is about {scaled:.3g} "
            f"with {tokens:,}: the square root of the batch, for Adam (arXiv:2205.10782); here it is {rate:.3g}"
        )
    doubled = scaled_learning_rate(rate, tokens, 2 * tokens)["sqrt"]
    return (
        f"{rate:.3g} with batches of {tokens:,} tokens is about {doubled:.3g} with {2 * tokens:,}: the square root of the "
        "batch, for Adam (arXiv:2205.10782)"
    )


def _print_traffic(step: StepTime) -> None:
    rows = [
        [
            each.axis,
            str(each.ranks),
            str(each.nodes),
            size_text(each.bytes_sent),
            seconds_text(step.traffic_s[each.axis]),
            seconds_text(step.seconds.get(each.axis, 0.0)),
            each.kind,
        ]
        for each in step.traffic
    ]
    print_table(["axis", "ranks", "nodes", "sent by a rank", "time", "exposed", "communication"], rows)


def _print_more_nodes(plan: Plan) -> None:
    if plan.more_nodes:
        rows = []
        for each in plan.more_nodes:
            worst = f"{each.cause} +{each.share:.0%}" if each.cause is not None else ""
            rows.append(
                [
                    str(each.after.nodes),
                    seconds_text(each.after.step_s),
                    count_text(each.after.tokens_per_s),
                    f"{each.efficiency:.1%}",
                    f"{each.total:.1%}",
                    worst,
                ]
            )
        print_table(["nodes", "step", "tokens/s", "efficiency", f"against {plan.nodes}", "costs more"], rows)
    print_sentence(more_nodes_sentence(plan), 0)
