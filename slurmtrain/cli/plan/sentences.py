"""Sentences of a plan that a person and a program get alike: whether more nodes are worth it, and what was assumed."""

from __future__ import annotations

from slurmtrain.cli.plan.calibration import Calibration
from slurmtrain.config.parallel_dims import sequence_lengths
from slurmtrain.planner.fit import in_gb
from slurmtrain.planner.hardware import EFFICIENCY
from slurmtrain.planner.plan import Plan
from slurmtrain.planner.scaling import WORTH_IT, Doubling, first_not_worth_it

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


def more_nodes_sentence(plan: Plan) -> str:
    """Say up to how many nodes more of them are worth it with this global batch, and why no more are."""
    wasted = first_not_worth_it(plan.more_nodes)
    batch = f"train.global_batch_size={plan.config.train.global_batch_size}"
    if wasted is not None:
        return (
            f"Using more than {nodes_text(wasted.before.nodes)} is not worth it with {batch}: {wasted.after.nodes} reach "
            f"{wasted.efficiency:.1%} of twice the speed, below {WORTH_IT:.0%}{_because(wasted)}"
        )
    most = plan.more_nodes[-1].after.nodes if plan.more_nodes else plan.nodes
    if plan.no_further is not None:
        return f"More than {nodes_text(most)} cannot share this step. {plan.no_further[0].upper()}{plan.no_further[1:]}"
    return f"Up to {nodes_text(most)} each doubling is worth it: at least {WORTH_IT:.0%} of twice the speed"


def _because(doubling: Doubling) -> str:
    if doubling.cause is None:
        return ""
    return f", since {WHY.get(doubling.cause, doubling.cause)}"


def nodes_text(nodes: int) -> str:
    """Return "1 node" or "4 nodes"."""
    return f"{nodes} node{'s' if nodes != 1 else ''}"


def notes_of(plan: Plan, calibration: Calibration | None) -> list[str]:
    """Return what was assumed, and whose rates were taken, in sentences."""
    notes = list(plan.hardware.notes)
    if plan.fewest is not None:
        fits = ""
        if plan.memory_limit is not None and plan.fewest.memory > plan.memory_limit:
            fits = ", and it does not fit"
        notes.insert(
            0,
            f"the plan is for {nodes_text(plan.nodes)}; on {plan.fewest.nodes}, the fewest that SLURM may give, a rank has "
            f"{in_gb(plan.fewest.memory)} GB{fits}",
        )
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
