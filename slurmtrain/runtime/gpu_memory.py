"""What a person reads when a rank runs out of its GPU's memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from slurmtrain.errors import EXIT_CONFIG, SlurmtrainError
from slurmtrain.slurm.environment import Environment

GIB = 2**30
# Of the GPU: what CUDA itself, NCCL and the kernels of this process take beside its tensors is less.
OF_OTHERS = 0.05
HINT = (
    "a smaller train.micro_batch_size leaves the global batch as it is; parallel.activation_checkpointing=full and "
    "parallel=fsdp need less memory, too; `plan` shows what fits"
)


class GpuMemoryError(SlurmtrainError):
    """A rank ran out of its GPU's memory.

    Args:
        retry: whether the same config can do better the next time.
    """

    def __init__(self, message: str, *, hint: str, retry: bool):
        super().__init__(message, hint=hint)
        if not retry:
            self.exit_code = EXIT_CONFIG


@contextmanager
def explain_out_of_memory(
    environment: Environment, device: torch.device, steps_done: Callable[[], int]
) -> Iterator[None]:
    """Turn torch's error of the block into one that says what takes the memory, and what to change.

    Args:
        environment: this rank.
        device: its GPU; with a CPU, nothing is changed.
        steps_done: returns the number of steps that the run has done, over all attempts.

    Raises:
        GpuMemoryError: in place of torch.OutOfMemoryError.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        if device.type != "cuda":
            raise
        free, total = torch.cuda.mem_get_info(device)
        own = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        raise out_of_memory(str(error), environment, steps_done(), free=free, total=total, own=own) from error


def out_of_memory(
    said: str, environment: Environment, steps_done: int, *, free: int, total: int, own: tuple[int, int]
) -> GpuMemoryError:
    """Return the error of a rank that ran out of memory.

    A run that has never done a step would fail again in the same way, unless other processes take the memory.

    Args:
        said: torch's message.
        steps_done: number of steps that the run has done.
        free: bytes of the GPU that nobody has.
        total: its bytes.
        own: bytes that tensors of this rank take, and bytes that torch has reserved for them.
    """
    asked = re.search(r"Tried to allocate ([\d.]+ \w+)", said)
    others = total - free - own[1]
    shared = others > OF_OTHERS * total
    message = (
        f"rank {environment.rank} on {environment.node} ran out of GPU memory in step {steps_done + 1}"
        f"{f', for {asked.group(1)} more' if asked else ''}: of {total / GIB:.1f} GiB, its tensors take {own[0] / GIB:.1f}"
        f"{f' and other processes {others / GIB:.1f}' if shared else ''}"
    )
    hint = f"`nvidia-smi` on {environment.node} shows the other processes; {HINT}" if shared else HINT
    return GpuMemoryError(message, hint=hint, retry=shared or steps_done > 0)
