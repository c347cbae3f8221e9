"""plan: memory, time, communication, checkpoints and cost of a run, by arithmetic, before anything is submitted."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from slurmtrain.cli.arguments import Arguments
from slurmtrain.cli.columns import print_sentence, print_table
from slurmtrain.cli.json_output import print_json
from slurmtrain.cli.submit import compose_and_validate
from slurmtrain.config.elastic import at_most
from slurmtrain.config.parallel_dims import AXES, ParallelDims, parallel_dims_of, sequence_lengths
from slurmtrain.config.schema import Config
from slurmtrain.errors import ConfigError, UsageError
from slurmtrain.planner.calibration import calibrated
from slurmtrain.planner.fit import in_gb
from slurmtrain.planner.hardware import EFFICIENCY, hardware_of
from slurmtrain.planner.plan import (
    CHINCHILLA,
    Candidate,
    Plan,
    check_plannable,
    plan_of,
    scaled_learning_rate,
    search,
)
from slurmtrain.planner.saving import PARAMETER_BYTES, Saving
from slurmtrain.planner.scaling import WORTH_IT, Doubling, first_not_worth_it
from slurmtrain.planner.shape import DecoderShape
from slurmtrain.planner.step_time import Measured, StepTime, sequence_length
from slurmtrain.report.progress import roughly
from slurmtrain.report.step_times import config_of, read_save_times, read_step_times
from slurmtrain.runs import lookup

SHOWN = 10  # layouts of `--search` that are printed
SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
WHY = {
    "bubble": "stages of the pipeline wait longer for each other, since a rank has fewer micro batches",
    "imbalance": "stages of the pipeline have unequal work",
    "computation": "ranks compute more for each token",
    "data and optimiser": "the optimiser, or waiting for data, does not get shorter with more ranks",
    "tp": "tensor-parallel ranks exchange activations that nothing hides",
    "cp": "context-parallel ranks exchange parts of sequences that nothing hides",
    "pp": "activations travel through more stages",
    "dp_shard": "gathering parameters and scattering gradients takes longer than the computation that hides it",
    "dp_replicate": "adding up gradients takes longer than the backward pass that hides it",
}


@dataclasses.dataclass(frozen=True)
class Calibration:
    """What an earlier run has measured.

    Attributes:
        run: its id.
        write_per_byte_s, stall_per_byte_s: of its saves; the latter for a rank's share. None: it has recorded none.
        tokens, rate: its tokens per step, and its learning rate.
        missing: parts of a step that it has not measured.
    """

    run: str
    measured: Measured
    write_per_byte_s: float | None
    stall_per_byte_s: float | None
    tokens: int
    rate: float
    missing: list[str]


def main(arguments: Arguments) -> int:
    """Run the verb and return its exit code."""
    tokens = _count(arguments.options["--tokens"]) if "--tokens" in arguments.options else None
    asked, _ = compose_and_validate(arguments)
    config = at_most(asked)
    dims = parallel_dims_of(config)
    check_plannable(config)
    calibration = calibrate(arguments.options["--from"], config) if "--from" in arguments.options else None
    plan = _plan(config, dims, tokens, calibration)
    found = search(config, calibration.measured if calibration else None) if "--search" in arguments.options else None
    if "--json" in arguments.options:
        print_json(plan_object(plan, calibration) | ({} if found is None else {"search": _search_object(plan, found)}))
        return 0
    if found is not None:
        _print_search(plan, found)
    else:
        _print_plan(plan, calibration)
    return 0


def calibrate(reference: str, planned: Config) -> Calibration:
    """Return what a run has measured.

    Args:
        planned: what its rates are for, which has to be on the same kind of machine.

    Raises:
        UsageError: there is no such run, or it has logged no steps.
        ConfigError: the arithmetic does not know its model.
        UnreadableRecordError: its records cannot be read.
    """
    run_dir = lookup.find(reference, lookup.runs_root())
    config, times = at_most(config_of(run_dir)), read_step_times(run_dir)
    if times is None:
        raise UsageError(
            f"run {run_dir.id} has logged no steps, so its rates are unknown", hint="a run that has trained"
        )
    check_plannable(config)
    was, now = (_device(each) for each in (config, planned))
    if was != now:
        raise UsageError(
            f"run {run_dir.id} was computed on {was}, and the plan is for {now}",
            hint="--from a run on the same cluster",
        )
    dims = parallel_dims_of(config)
    measured = calibrated(config, dims, hardware_of(config), times.step_s, times.parts)
    saves = read_save_times(run_dir)
    return Calibration(
        run=run_dir.id,
        measured=measured,
        write_per_byte_s=saves.write_s / saves.size if saves else None,
        stall_per_byte_s=saves.stall_s / (saves.size / config.world_size) if saves else None,
        tokens=config.train.global_batch_size * sequence_length(config),
        rate=config.optim.lr,
        missing=times.missing,
    )


def _device(config: Config) -> str:
    """Return on what a config computes, and in which type: rates of one say nothing of another."""
    hardware, cluster = hardware_of(config), config.cluster
    kind = hardware.gpu or (cluster.gpu_type or "GPUs") if cluster.gpus_per_node else "CPUs"
    return f"{kind} in {hardware.dtype}"


def _plan(config: Config, dims: ParallelDims, tokens: int | None, calibration: Calibration | None) -> Plan:
    if calibration is None:
        return plan_of(config, dims, tokens=tokens)
    size = plan_of(config, dims).saving.size
    write, stall = calibration.write_per_byte_s, calibration.stall_per_byte_s
    return plan_of(
        config,
        dims,
        tokens=tokens,
        measured=calibration.measured,
        write_s=None if write is None else write * size,
        stall_s=None if stall is None else stall * size / config.world_size,
    )


def _count(text: str) -> int:
    """Return a number of tokens: 15T, 1.5e12, 300_000_000."""
    found = re.fullmatch(r"([0-9][0-9_]*(?:\.[0-9]+)?(?:e[+]?[0-9]{1,2})?)([kmbt]?)", text.strip().lower())
    count = float(found[1].replace("_", "")) * SUFFIXES[found[2]] if found is not None else 0.0
    if not 1 <= count < 1e18:
        raise UsageError(f"--tokens {text}: expected a number of tokens", hint="--tokens 15T, 300B or 1.5e12")
    return round(count)


# For a person.


def _print_plan(plan: Plan, calibration: Calibration | None) -> None:
    config, shape = plan.config, DecoderShape.of(plan.config.model)
    batch, cluster = plan.config.train.global_batch_size, plan.config.cluster
    count, size = plan.dims.micro_batches(config.train), plan.dims.micro_batch_size(config.train)
    micro = f"{count} micro batch{'es' if count > 1 else ''} of {size} on each rank"
    cpus = "CPU rank" if cluster.tasks_per_node == 1 else "CPU ranks"
    what = plan.hardware.gpu or ((cluster.gpu_type or "GPU") if cluster.gpus_per_node else cpus)
    rows = [
        ("layout", f"{nodes_text(_nodes(plan))} x {cluster.tasks_per_node} {what}: {plan.dims}"),
        ("model", f"{_large(shape.num_parameters())} parameters, computed in {plan.hardware.dtype}"),
        (
            "global batch",
            f"{batch} sequences of {sequence_length(config):,} tokens = {_large(plan.tokens_per_step)} tokens; {micro}",
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
    for note in _notes(plan, calibration):
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
    bound = "" if step.at_best_s is None else f"; not below {_seconds(step.at_best_s)}, at the peak of GPUs and links"
    rows = [("step", f"{_seconds(step.expected_s)} expected: {shares}{bound}")]
    speed = f"{_large(step.tokens_per_s)} tokens/s, {step.tokens_per_s / step.ranks:,.0f} on each rank"
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
        f"{_gb(saving.size)} ({PARAMETER_BYTES * 3} bytes a parameter), complete after {_seconds(saving.write_s)}; holds "
        f"training up for {_seconds(saving.stall_s)}. The weights alone in 16 bit: {_gb(saving.weights)}"
    )


def _interval_sentence(plan: Plan) -> str:
    saving, best = plan.saving, plan.interval_s
    count = 0 if plan.step is None else max(1, round(best / plan.step.expected_s))
    steps = f" = {count:,} step{'s' if count > 1 else ''}" if count else ""
    why = "Daly 2006" if best == saving.daly_s else "as long as one takes to write"
    text = f"{_interval(best)}{steps} is best ({why}), for a failure every {roughly(saving.mtbf_s)}"
    if saving.interval_s is not None:
        text += f"; the config saves every {_interval(saving.interval_s)}"
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
        f"{_large(plan.tokens)} tokens take {_hours(hours)} {unit} hours, {_interval(seconds)}. About {CHINCHILLA} tokens "
        f"a parameter, {_large(best)}, use computation best (arXiv:2203.15556)"
    )


def _hours(hours: float) -> str:
    return f"{hours:,.0f}" if hours >= 10 else f"{hours:.2g}"


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
            _gb(each.bytes_sent),
            _seconds(step.traffic_s[each.axis]),
            _seconds(step.seconds.get(each.axis, 0.0)),
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
                    _seconds(each.after.step_s),
                    _large(each.after.tokens_per_s),
                    f"{each.efficiency:.1%}",
                    f"{each.total:.1%}",
                    worst,
                ]
            )
        print_table(["nodes", "step", "tokens/s", "efficiency", f"against {_nodes(plan)}", "costs more"], rows)
    print_sentence(more_nodes_sentence(plan), 0)


def _nodes(plan: Plan) -> int:
    return plan.config.cluster.node_range.most


def nodes_text(nodes: int) -> str:
    """Return "1 node" or "4 nodes"."""
    return f"{nodes} node{'s' if nodes != 1 else ''}"


def more_nodes_sentence(plan: Plan) -> str:
    """Say up to how many nodes more of them are worth it with this global batch, and why no more are."""
    wasted = first_not_worth_it(plan.more_nodes)
    batch = f"train.global_batch_size={plan.config.train.global_batch_size}"
    if wasted is not None:
        return (
            f"Using more than {nodes_text(wasted.before.nodes)} is not worth it with {batch}: {wasted.after.nodes} reach "
            f"{wasted.efficiency:.1%} of twice the speed, below {WORTH_IT:.0%}{_because(wasted)}"
        )
    most = plan.more_nodes[-1].after.nodes if plan.more_nodes else _nodes(plan)
    if plan.no_further is not None:
        return f"More than {nodes_text(most)} cannot share this step. {plan.no_further[0].upper()}{plan.no_further[1:]}"
    return f"Up to {nodes_text(most)} each doubling is worth it: at least {WORTH_IT:.0%} of twice the speed"


def _because(doubling: Doubling) -> str:
    if doubling.cause is None:
        return ""
    return f", since {WHY.get(doubling.cause, doubling.cause)}"


def _notes(plan: Plan, calibration: Calibration | None) -> list[str]:
    """Return what was assumed, and whose rates were taken, in sentences."""
    notes = list(plan.hardware.notes)
    if not sequence_lengths(plan.config.data):
        length = plan.config.model["max_seq_len"]
        notes.append(
            f"the data do not say how long their sequences are: model.max_seq_len={length} assumed; no activations"
        )
    if plan.config.cluster.gpus_per_node and plan.hardware.dtype == "float32":
        notes.append("computed in float32: parallel.param_dtype=bfloat16 is faster, with parallel=fsdp")
    if calibration is not None:
        rate = calibration.measured.flops / 1e12
        notes.insert(0, f"rates of run {calibration.run}: {rate:.3g} TFLOP/s on each rank, as measured")
        if calibration.missing:
            notes.insert(1, f"it has not measured {', '.join(calibration.missing)}, which count as computation")
        notes = [note for note in notes if "--from RUN" not in note]
    elif plan.step is not None:
        notes.insert(
            0, f"{EFFICIENCY:.0%} of the peak assumed for computation; --from RUN takes what a run has measured"
        )
    return notes


def _print_search(plan: Plan, found: list[Candidate]) -> None:
    if not found:
        limit = "" if plan.memory_limit is None else f" into {in_gb(plan.memory_limit)} GB"
        raise ConfigError(
            f"no layout of {plan.dims.world_size} ranks fits{limit}", hint="more nodes, or a smaller model or batch"
        )
    rows = []
    for candidate in found[:SHOWN]:
        step = candidate.step
        mfu = ""
        if plan.hardware.peak_flops is not None:
            mfu = f"{step.mfu(plan.hardware.peak_flops):.1%}"
        rows.append(
            [
                _seconds(step.expected_s),
                _large(step.tokens_per_s),
                mfu,
                in_gb(candidate.memory),
                f"{step.bubble_share:.1%}" if candidate.dims.pp > 1 else "",
                f"{step.communication_s / step.expected_s:.1%}",
                " ".join(candidate.overrides) or "as it is",
            ]
        )
    count = "1 layout" if len(found) == 1 else f"{len(found)} layouts"
    fits = "fits" if len(found) == 1 else "fit; the fastest by arithmetic first"
    print(f"{count} of {'1 rank' if plan.dims.world_size == 1 else f'{plan.dims.world_size} ranks'} {fits}")
    print_table(["step", "tokens/s", "mfu", "GB", "bubble", "communication", "overrides"], rows)
    shown = f"{min(SHOWN, len(found))} of {len(found)}; --json has all"
    print_sentence(f"{shown}. What is within a few percent is worth measuring: scale", 0)


def _gb(count: float) -> str:
    """Format bytes in units of 10^9, as file systems and networks count, and their multiples and parts."""
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count / 1e3:.3g} kB"


def _interval(seconds: float) -> str:
    return roughly(seconds) if seconds >= 90 else _seconds(seconds)


def _seconds(seconds: float) -> str:
    if seconds >= 600:
        return roughly(seconds)
    if seconds >= 100:
        return f"{seconds:.0f} s"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _large(count: float) -> str:
    for size, name in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if count >= size:
            return f"{count / size:.3g} {name}"
    return f"{count:,.0f}"


# For a program.


def plan_object(plan: Plan, calibration: Calibration | None = None) -> dict[str, Any]:
    """Return a plan as `plan --json` prints it. Bytes, seconds and shares; null where something is not known.

    layout, axes, nodes, ranks
    parameters, global_batch_size, tokens_per_step, micro_batches, micro_batch_size
    memory           limit, and by pipeline stage what `layout --json` has
    step             expected_s, at_best_s, seconds (by what they are spent on), tokens_per_s, mfu, mfu_attended,
                     mfu_attended_at_most, bubble_share and flops_per_token; null if no peak is known and nothing was measured
    communication    by axis: kind, ranks, nodes, bytes_sent, messages, seconds, and shows_s
    checkpoint       size, weights_16_bit, write_s, stall_s
    interval         best_s, young_s, daly_s, configured_s, mtbf_s, restart_s
    goodput          with the best interval, and as configured
    cost             tokens, gpu_hours, days
    more_nodes       nodes, step_s, tokens_per_s, efficiency, total, worth_it, cause and share of each doubling
    sentence         whether more nodes are worth it, and why not
    learning_rate    lr, and what it would be with twice the batch, by rule
    run              the run whose rates were taken; null: none
    notes            what was assumed
    search           with --search: overrides, memory, and the step of each layout that fits, the fastest first
    """
    step, saving, config = plan.step, plan.saving, plan.config
    batch = config.train.global_batch_size
    return {
        "layout": str(plan.dims),
        "axes": dict(zip(AXES, plan.dims.shape, strict=True)),
        "nodes": config.cluster.node_range.most,
        "ranks": plan.dims.world_size,
        "parameters": DecoderShape.of(config.model).num_parameters(),
        "global_batch_size": batch,
        "tokens_per_step": plan.tokens_per_step,
        "micro_batches": plan.dims.micro_batches(config.train),
        "micro_batch_size": plan.dims.micro_batch_size(config.train),
        "memory": {
            "limit": plan.memory_limit,
            "stages": [dataclasses.asdict(stage) | {"total": stage.total} for stage in plan.memory],
        },
        "step": None if step is None else _step_object(plan, step),
        "communication": {} if step is None else _traffic_object(step),
        "checkpoint": {
            "size": saving.size,
            "weights_16_bit": saving.weights,
            "write_s": saving.write_s,
            "stall_s": saving.stall_s,
        },
        "interval": {
            "best_s": plan.interval_s,
            "young_s": saving.young_s,
            "daly_s": saving.daly_s,
            "configured_s": saving.interval_s,
            "mtbf_s": saving.mtbf_s,
            "restart_s": saving.restart_s,
        },
        "goodput": {
            "best": saving.goodput(plan.interval_s),
            "configured": None if saving.interval_s is None else saving.goodput(saving.interval_s),
        },
        "cost": {
            "tokens": plan.tokens,
            "gpu_hours": plan.gpu_hours,
            "days": None if plan.gpu_hours is None else plan.gpu_hours / plan.dims.world_size / 24,
        },
        "more_nodes": [doubling_object(each) for each in plan.more_nodes],
        "sentence": None if step is None else more_nodes_sentence(plan),
        "learning_rate": {
            "lr": config.optim.lr,
            "doubled_batch": scaled_learning_rate(config.optim.lr, batch, 2 * batch),
        },
        "run": None if calibration is None else calibration.run,
        "notes": _notes(plan, calibration),
    }


def _step_object(plan: Plan, step: StepTime) -> dict[str, Any]:
    peak, best = plan.hardware.peak_flops, step.at_best_s
    return {
        "expected_s": step.expected_s,
        "at_best_s": step.at_best_s,
        "seconds": dict(step.seconds),
        "tokens_per_s": step.tokens_per_s,
        "mfu": None if peak is None else step.mfu(peak),
        "mfu_attended": None if peak is None else step.mfu_attended(peak, step.expected_s),
        "mfu_attended_at_most": None if peak is None or best is None else step.mfu_attended(peak, best),
        "bubble_share": step.bubble_share,
        "flops_per_token": step.flops_per_token,
    }


def _traffic_object(step: StepTime) -> Mapping[str, Any]:
    return {
        each.axis: {
            "kind": each.kind,
            "ranks": each.ranks,
            "nodes": each.nodes,
            "bytes_sent": each.bytes_sent,
            "messages": each.messages,
            "seconds": step.traffic_s[each.axis],
            "shows_s": step.seconds.get(each.axis, 0.0),
        }
        for each in step.traffic
    }


def doubling_object(each: Doubling) -> dict[str, Any]:
    """Return a step to more nodes as `plan --json` and `scale --json` print it."""
    return {
        "nodes": each.after.nodes,
        "ranks": each.after.ranks,
        "step_s": each.after.step_s,
        "tokens_per_s": each.after.tokens_per_s,
        "efficiency": each.efficiency,
        "total": each.total,
        "worth_it": each.worth_it,
        "cause": each.cause,
        "share": each.share,
    }


def _search_object(plan: Plan, found: list[Candidate]) -> list[dict[str, Any]]:
    return [
        {
            "overrides": each.overrides,
            "layout": str(each.dims),
            "memory": each.memory,
            "step": _step_object(plan, each.step),
        }
        for each in found
    ]
