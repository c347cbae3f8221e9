"""A rank that runs out of its GPU's memory says what takes it, and starts again only where that may help."""

from __future__ import annotations

import pytest
import torch

from slurmtrain.runtime.gpu_memory import GIB, explain_out_of_memory, out_of_memory
from slurmtrain.slurm.environment import Environment

RANK = Environment("slurm", rank=3, world_size=4, node_rank=1, nodes=("n0", "n1"), tasks_per_node=(2, 2))
SAID = "CUDA out of memory. Tried to allocate 64.00 GiB. GPU 0 has a total capacity of 80.00 GiB of which"


@pytest.mark.parametrize(
    ("steps_done", "free_gib", "exit_code", "message"),
    [
        (0, 9, 78, "in step 1, for 64.00 GiB more: of 80.0 GiB, its tensors take 69.5"),
        (0, 3, 1, "in step 1, for 64.00 GiB more: of 80.0 GiB, its tensors take 69.5 and other processes 7.0"),
        (120, 9, 1, "in step 121, for 64.00 GiB more: of 80.0 GiB, its tensors take 69.5"),
    ],
)
def test_it_ends_a_run_that_has_never_done_a_step_unless_others_take_the_memory(
    steps_done: int, free_gib: int, exit_code: int, message: str
) -> None:
    own = int(69.5 * GIB), 70 * GIB
    error = out_of_memory(SAID, RANK, steps_done, free=free_gib * GIB, total=80 * GIB, own=own)
    assert error.exit_code == exit_code
    assert error.message == f"rank 3 on n1 ran out of GPU memory {message}"
    assert error.hint is not None and "train.micro_batch_size" in error.hint
    assert ("nvidia-smi" in error.hint) == ("other processes" in message)


def test_on_a_cpu_the_error_stays_as_it_is() -> None:
    with pytest.raises(torch.OutOfMemoryError), explain_out_of_memory(RANK, torch.device("cpu"), lambda: 0):
        raise torch.OutOfMemoryError(SAID)
