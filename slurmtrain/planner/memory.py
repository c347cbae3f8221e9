"""The memory that a decoder takes on each GPU under a layout, by arithmetic.

Parameters, gradients and optimiser state are exact: the cuts of tensor parallelism and FSDP, to the last element.
Activations and temporarily gathered parameters are estimates. They count the tensors that autograd keeps, as
Korthikanti et al. 2022 do ("Reducing activation recomputation in large transformer models", arXiv:2205.05198, section
4), for this decoder instead of GPT: SwiGLU, shared key/value heads, no dropout, and attention that keeps no S x S
matrix (Dao et al. 2022, arXiv:2205.14135).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass

from slurmtrain.choices import ActivationCheckpointing
from slurmtrain.config.parallel_dims import ParallelDims
from slurmtrain.planner.shape import DecoderShape, Parameter, elements_per_rank

GIB = 2**30
ADAM_STATES = 2  # mean and mean square of the gradient, in the parameter's own element type
LOSS_BYTES = 4  # the loss is computed in float32


@dataclass(frozen=True)
class MemorySettings:
    """The settings that decide how much memory a rank needs for its part of the model.

    Attributes:
        micro_batch_size: sequences of a micro batch.
        seq_len: tokens of a whole sequence.
        parameter_bytes: bytes of an element of parameters, gradients and optimiser state.
        compute_bytes: bytes of an element of activations and of the parameters that are computed with.
        checkpointing: activations that are computed again in the backward pass: none; all but the results of matrix
            products and attention ("selective"); all but a block's input ("full").
        reshard_after_forward: True: FSDP gathers a block's parameters twice a step and keeps them only while it needs
            them. False: they stay gathered from the forward to the backward pass. A number: this rank's part in a group
            of this size stays.
        in_flight: number of micro batches whose activations each stage of a pipeline keeps at once; None: as many as in
            1F1B, one for itself and one for each stage after it (Narayanan et al. 2021, arXiv:2104.04473).
        fsdp: parameters are gathered into copies to compute with, also from a single shard; plain replicas need none.
        whole_gradients: gradients of all blocks stay whole over the micro batches of a step, as torch's pipelines leave
            them, before they are summed up and cut; otherwise those of one block do for a moment.
        reduce_bytes: bytes of an element of these gradients.
    """

    micro_batch_size: int
    seq_len: int
    parameter_bytes: int = 4
    compute_bytes: int = 2
    checkpointing: ActivationCheckpointing = ActivationCheckpointing.NONE
    reshard_after_forward: bool | int = True
    in_flight: tuple[float, ...] | None = None
    fsdp: bool = True
    whole_gradients: bool = False
    reduce_bytes: int = 4


@dataclass(frozen=True)
class StageMemory:
    """Bytes on the first rank of a pipeline's stage; the other ranks of the stage have as much, or less where cuts are uneven.

    Attributes:
        gathered: parameters that FSDP has gathered for the moment, and gradients that it has not yet cut (estimate); None:
            not known for this model.
        activations: tensors that autograd keeps (estimate); None: not known for this model, or its data.
    """

    stage: int
    rank: int
    parameters: int
    gradients: int
    optimizer: int
    gathered: int | None
    activations: int | None

    @property
    def kept(self) -> int:
        """The bytes that are kept from step to step; they are exact."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """The bytes of everything that is known."""
        return self.kept + (self.gathered or 0) + (self.activations or 0)

    def __str__(self) -> str:
        """Return a text such as "21.3 GB (parameters 4.0, gradients 4.0, optimiser 8.0, gathered 1.2, activations 4.1)"."""
        parts = {
            "parameters": self.parameters,
            "gradients": self.gradients,
            "optimiser": self.optimizer,
            "gathered": self.gathered,
            "activations": self.activations,
        }
        words = ", ".join(f"{name} {in_gb(count)}" for name, count in parts.items() if count is not None)
        return f"{in_gb(self.total)} GB ({words})"


def in_gb(count: float) -> str:
    """Format bytes in units of 2^30, as nvidia-smi and SLURM count."""
    return f"{count / GIB:.1f}"


def memory_per_rank(shape: DecoderShape, work: MemorySettings, dims: ParallelDims) -> list[StageMemory]:
    """Return one entry for each stage of the pipeline. Replicas do not matter, since they are alike.

    FSDP cuts over `dp_shard * cp` ranks, since those of context parallelism have the same parameters. Tensor
    parallelism includes sequence parallelism.
    """
    found, tp, pp, shard = [], dims.tp, dims.pp, dims.dp_shard * dims.cp
    tokens = work.micro_batch_size * work.seq_len // dims.cp
    for stage, layers in enumerate(layers_of_stages(shape.n_layers, pp)):
        ends = shape.ends(first=stage == 0, last=stage == pp - 1)
        held = (layers * block_elements(shape, tp, shard) + elements_per_rank(ends, tp, shard)) * work.parameter_bytes
        in_flight = pp - stage if work.in_flight is None else work.in_flight[stage]
        activations = round(in_flight * tokens * layers * _kept_of_block(shape, work, tp))
        activations += tokens * _kept_beside_blocks(shape, work, tp, last=stage == pp - 1)
        found.append(
            StageMemory(
                stage,
                stage * dims.world_size // pp,
                parameters=held,
                gradients=held,
                optimizer=held * ADAM_STATES,
                gathered=_gathered(shape, work, layers, ends, tp) if work.fsdp else 0,
                activations=activations if work.seq_len else None,
            )
        )
    return found


def layers_of_stages(layers: int, pp: int) -> list[int]:
    """Return the number of layers of each stage, as even as possible, with one more in the first stages."""
    return [layers // pp + (stage < layers % pp) for stage in range(pp)]


@functools.lru_cache(maxsize=1024)  # a search asks for the same cuts of a layer thousands of times
def block_elements(shape: DecoderShape, tp: int, shard: int) -> int:
    """Return the elements of one layer on the rank that has most."""
    return elements_per_rank(shape.block(), tp, shard)


def _gathered(shape: DecoderShape, work: MemorySettings, layers: int, ends: list[Parameter], tp: int) -> int:
    """Return the bytes of gathered parameters and of gradients that are not yet cut.

    FSDP keeps gathered copies of the parameters outside the blocks all the time, and those of the present and the next
    block, or of all. Gradients before they are summed up and cut are those of one block, or of all.
    """
    block, beside = block_elements(shape, tp, 1), elements_per_rank(ends, tp, 1)
    near = min(2, layers)
    group = math.inf if work.reshard_after_forward is True else work.reshard_after_forward or 1
    gradients = (beside + layers * block) * work.reduce_bytes if work.whole_gradients else block * work.compute_bytes
    return round((beside + (near + (layers - near) / group) * block) * work.compute_bytes) + gradients


def _kept_of_block(shape: DecoderShape, work: MemorySettings, tp: int) -> int:
    """Return the bytes of activations kept for one token in one block.

    All activations are divided among `tp` ranks except the inputs of projections, which were gathered, and the outputs
    at a branch's end, which are not yet summed up.
    """
    streams = shape.dim / tp
    heads = (2 * shape.query_width + 2 * shape.kv_width) / tp  # q, k, v and what attention makes of them
    ffn = shape.hidden_dim / tp
    if work.checkpointing == ActivationCheckpointing.FULL:
        kept = streams
    elif work.checkpointing == ActivationCheckpointing.SELECTIVE:
        kept = streams + heads + 2 * ffn + 2 * shape.dim
    else:
        normed = 2 * shape.dim
        heads_before_norm = (shape.query_width + shape.kv_width) / tp if shape.qk_norm else 0
        kept = 2 * streams + normed + heads_before_norm + heads + 4 * ffn  # gate, up, silu(gate) and their product
    return round(kept * work.compute_bytes)


def _kept_beside_blocks(shape: DecoderShape, work: MemorySettings, tp: int, *, last: bool) -> int:
    """Return the bytes of activations kept for one token outside the blocks.

    They are those of a block that is computed again, and in the last stage those of the logits, which weigh most.

    The logits count as log-probabilities and their gradients in the loss's type, and the gradients once more as they go
    back.
    """
    again = 0
    if work.checkpointing != ActivationCheckpointing.NONE:
        again = _kept_of_block(shape, dataclasses.replace(work, checkpointing=ActivationCheckpointing.NONE), tp)
    if not last:
        return again
    streams = (shape.dim / tp + shape.dim) * work.compute_bytes
    return again + round(streams + shape.vocab_size / tp * (2 * LOSS_BYTES + work.compute_bytes))
