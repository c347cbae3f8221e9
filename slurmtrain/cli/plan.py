"""plan: memory, time, communication, checkpoints and cost of a run, before anything is submitted."""

from __future__ import annotations

import argparse

from slurmtrain.cli.columns import print_sentence, print_table
from slurmtrain.cli.json_output import fields_of, print_json
from slurmtrain.cli.submit import compose_and_validate
from slurmtrain.config.parallel_dims import (
    AXES,
    at_most,
    extreme_sizes,
    parallel_dims_of,
    sequence_lengths,
    usable_sizes,
)
from slurmtrain.config.schema import Config
from slurmtrain.planner.fit import ROOM, changes_that_fit, most_bytes
from slurmtrain.planner.memory import in_gb
from slurmtrain.planner.plan import PARAMETER_BYTES, WORTH_IT, Plan, first_not_worth_it, plan_of
from slurmtrain.planner.shape import DecoderShape
from slurmtrain.planner.step_time import StepTime, sequence_length
from slurmtrain.report.page.units import plural
from slurmtrain.system.texts import roughly

SCALES = {  # bytes in units of 10^9, as file systems and networks count them
    "count": ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")),
    "bytes": ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")),
    "seconds": ((1, "s"), (1e-3, "ms")),
}


def main(arguments: argparse.Namespace) -> int:
    """Run the verb and return its exit code."""
    asked, _ = compose_and_validate(arguments)
    config = at_most(asked)
    plan = plan_of(config, parallel_dims_of(config), tokens=arguments.tokens)
    notes = _notes(plan, asked)
    if arguments.json:
        names = (
            "nodes memory memory_limit fits step tokens_per_step saving interval_s goodput tokens gpu_hours more_nodes"
        )
        print_json(
            {
                "layout": str(plan.dims),
                "axes": dict(zip(AXES, plan.dims.shape, strict=True)),
                **fields_of(plan, names),
                "would_fit": _would_fit(plan),
                "sentence": None if plan.step is None else _more_nodes(plan),
                "notes": notes,
            }
        )
    else:
        _print(plan, notes)
    return 0


def _notes(plan: Plan, asked: Config) -> list[str]:
    """Return what was assumed, in sentences."""
    notes, config = list(plan.hardware.notes), plan.config
    if plan.step is not None:
        notes.insert(0, f"{plan.hardware.efficiency:.0%} of the peak assumed for computation")
    if len(sizes := usable_sizes(asked)) > 1:  # on the fewest nodes, ranks hold most of a sharded model
        fewest = next(extreme_sizes(asked))
        memory = most_bytes(fewest, parallel_dims_of(fewest))
        fits = ", and it does not fit" if plan.memory_limit is not None and memory > plan.memory_limit else ""
        notes.append(
            f"of cluster.nodes={asked.cluster.nodes}, the job can use {', '.join(map(str, sizes))}; "
            f"the plan is for {plural(plan.nodes, 'node')}; on {fewest.cluster.node_range.most}, the fewest that SLURM "
            f"may give, a rank has {in_gb(memory)} GB{fits}"
        )
    if not sequence_lengths(config.data):
        length = config.model["max_seq_len"]
        notes.append(
            f"the data do not say how long their sequences are: model.max_seq_len={length} assumed; no activations"
        )
    return notes


def quantity(value: float, kind: str) -> str:
    """Format a count, bytes or seconds with three digits in the unit that suits it: 8.03 billion, 395 kB, 250 ms, 2 h."""
    if kind == "seconds" and value >= 600:
        return roughly(value)
    if kind == "count" and value < 1e6:
        return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
    scale = SCALES[kind]
    size, unit = next((each for each in scale if value >= each[0]), scale[-1])
    return f"{value / size:.3g} {unit}"


def _print(plan: Plan, notes: list[str]) -> None:
    rows = {**_sizes(plan), **({} if plan.step is None else _speed(plan.step)), **_saving(plan)}
    if plan.step is not None:
        rows["cost"] = "failures come faster than restarts: nothing is left for training"
        if plan.gpu_hours is not None:
            unit = "GPU" if plan.config.cluster.gpus_per_node else "rank"
            time = quantity(plan.gpu_hours / plan.step.ranks * 3600, "seconds")
            hours = quantity(plan.gpu_hours, "count")
            rows["cost"] = f"{quantity(plan.tokens, 'count')} tokens take {hours} {unit} hours, {time}"
    width = max(map(len, rows))
    for name, text in rows.items():
        print_sentence(f"{name:<{width}}  {text}", width + 2)
    if plan.step is not None:
        traffic = [
            [
                *(each.axis, str(each.ranks), str(each.nodes), quantity(each.bytes_sent, "bytes")),
                quantity(plan.step.traffic_s[each.axis], "seconds"),
                quantity(plan.step.seconds.get(each.axis, 0.0), "seconds"),
                each.kind,
            ]
            for each in plan.step.traffic
        ]
        if traffic:
            print()
            print_table(["axis", "ranks", "nodes", "sent by a rank", "time", "exposed", "communication"], traffic)
        print()
        _print_more_nodes(plan)
    print()
    for note in notes:
        print_sentence(f"note: {note}", len("note: "))


def _sizes(plan: Plan) -> dict[str, str]:
    cluster, dims, train = plan.config.cluster, plan.dims, plan.config.train
    what = plan.hardware.gpu or cluster.gpu_type or "GPU"
    if not cluster.gpus_per_node:
        what = "CPU rank" if cluster.tasks_per_node == 1 else "CPU ranks"
    parameters = quantity(DecoderShape.of(plan.config.model).num_parameters(), "count")
    count = dims.micro_batches(train)
    batch = (
        f"{train.global_batch_size} sequences of {sequence_length(plan.config):,} tokens = "
        f"{quantity(plan.tokens_per_step, 'count')} tokens; "
        f"{count} micro batch{'es' if count > 1 else ''} of {dims.micro_batch_size(train)} on each rank"
    )
    total, _, parts = str(plan.fullest).partition(" GB ")
    of = f" of {in_gb(plan.memory_limit)}" if plan.memory_limit is not None else ""
    where = f" on stage {plan.fullest.stage}" if dims.pp > 1 else ""
    fits = ""
    if not plan.fits:
        fits = f"; it does not fit; what would: {'; or '.join(_would_fit(plan)) or 'a smaller model or batch'}"
    return {
        "layout": f"{plural(plan.nodes, 'node')} x {cluster.tasks_per_node} {what}: {dims}",
        "model": f"{parameters} parameters, computed in {plan.hardware.dtype}",
        "global batch": batch,
        "memory": f"{total} GB{of} on a rank{where} {parts}{fits}",
    }


def _would_fit(plan: Plan) -> list[str]:
    """Return changes with which a plan that does not fit would."""
    return [] if plan.fits or plan.memory_limit is None else changes_that_fit(plan.config, ROOM * plan.memory_limit)


def _speed(step: StepTime) -> dict[str, str]:
    parts = sorted(step.seconds.items(), key=lambda item: -item[1])
    shares = ", ".join(f"{name} {seconds / step.expected_s:.1%}" for name, seconds in parts if seconds > 0)
    text = f"{quantity(step.expected_s, 'seconds')} expected: {shares}"
    speed = f"{quantity(step.tokens_per_s, 'count')} tokens/s, {step.tokens_per_s / step.ranks:,.0f} on each rank"
    if step.mfu is not None:
        speed += f"; mfu {step.mfu:.1%}"
    return {"step": text, "speed": speed}


def _saving(plan: Plan) -> dict[str, str]:
    saving, best, every_s = plan.saving, plan.interval_s, plan.saving.interval_s
    steps = f" = {plural(max(1, round(best / plan.step.expected_s)), 'step')}" if plan.step is not None else ""
    why = "Daly 2006" if best == saving.daly_s else "as long as one takes to write"
    interval = f"{quantity(best, 'seconds')}{steps} is best ({why}), for a failure every {roughly(saving.mtbf_s)}"
    goodput = f"{saving.goodput(best):.2%} of the time at best, with restarts of {roughly(saving.restart_s)}"
    if every_s is not None:
        interval += f"; the config saves every {quantity(every_s, 'seconds')}"
        goodput += f"; {saving.goodput(every_s):.2%} as configured"
    checkpoint = (
        f"{quantity(saving.size, 'bytes')} ({PARAMETER_BYTES * 3} bytes a parameter), complete after "
        f"{quantity(saving.write_s, 'seconds')}; holds training up for {quantity(saving.stall_s, 'seconds')}. "
        f"The weights alone in 16 bit: {quantity(saving.weights, 'bytes')}"
    )
    return {"checkpoint": checkpoint, "save every": interval, "goodput": goodput}


def _print_more_nodes(plan: Plan) -> None:
    rows = []
    for each in plan.more_nodes:
        cause = "" if each.cause is None else f"{each.cause} +{each.share:.0%}"
        speed = [quantity(each.after.expected_s, "seconds"), quantity(each.after.tokens_per_s, "count")]
        rows.append([str(each.after.nodes), *speed, f"{each.efficiency:.1%}", f"{each.total:.1%}", cause])
    if rows:
        print_table(["nodes", "step", "tokens/s", "efficiency", f"against {plan.nodes}", "costs more"], rows)
    print_sentence(_more_nodes(plan), 0)


def _more_nodes(plan: Plan) -> str:
    """Say up to how many nodes more of them are worth it with this global batch, and why no more are."""
    wasted = first_not_worth_it(plan.more_nodes)
    if wasted is not None:
        why = "" if wasted.cause is None else f"; what costs most is {wasted.cause}"
        return (
            f"Using more than {plural(wasted.before.nodes, 'node')} is not worth it with train.global_batch_size="
            f"{plan.config.train.global_batch_size}: {wasted.after.nodes} reach {wasted.efficiency:.1%} of twice the speed, "
            f"below {WORTH_IT:.0%}{why}"
        )
    most = plural(plan.more_nodes[-1].after.nodes if plan.more_nodes else plan.nodes, "node")
    if plan.no_further is not None:
        return f"More than {most} cannot share this step. {plan.no_further[0].upper()}{plan.no_further[1:]}"
    return f"Up to {most} each doubling is worth it: at least {WORTH_IT:.0%} of twice the speed"
