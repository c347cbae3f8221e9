"""A plan as JSON, for a program."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from slurmtrain.cli.plan.calibration import Calibration
from slurmtrain.cli.plan.sentences import more_nodes_sentence, notes_of
from slurmtrain.config.parallel_dims import AXES
from slurmtrain.planner.plan import Candidate, Plan, scaled_learning_rate
from slurmtrain.planner.scaling import Doubling
from slurmtrain.planner.shape import DecoderShape
from slurmtrain.planner.step_time import StepTime


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
        "nodes": plan.nodes,
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
        "notes": notes_of(plan, calibration),
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


def search_object(plan: Plan, found: list[Candidate]) -> list[dict[str, Any]]:
    """Return all layouts that fit, as `plan --search --json` prints them."""
    return [
        {
            "overrides": each.overrides,
            "layout": str(each.dims),
            "memory": each.memory,
            "step": _step_object(plan, each.step),
        }
        for each in found
    ]
