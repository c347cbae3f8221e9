"""The distribution of runs to array jobs: pure arithmetic, before anything is submitted.

An array has one script, so runs that ask for different resources need different arrays. MaxArraySize limits the *index*
(slurm.conf(5): the largest index is one less), so the second half of a long array has to begin at 0 again. One task of
an array is one run, or a pack of runs that share it: the members 0 to pack - 1 are task 0, and so on.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def plan_arrays(shapes: Sequence[Hashable], *, max_size: int | None = None, pack: int = 1) -> list[list[int]]:
    """Return the numbers of the points of each array, out of points 0 to len(shapes) - 1.

    Args:
        shapes: what each point asks for; points of one array have the same shape.
        max_size: greatest number of tasks of an array.
        pack: number of points that share a task.
    """
    by_shape: dict[Hashable, list[int]] = {}
    for number, shape in enumerate(shapes):
        by_shape.setdefault(shape, []).append(number)
    size = (max_size or len(shapes)) * pack
    return [numbers[begin : begin + size] for numbers in by_shape.values() for begin in range(0, len(numbers), size)]


def tasks_at_once(parallelism: int | None, pack: int) -> int | None:
    """Return how many tasks of an array may run at the same time, so that at most `parallelism` points do; at least one."""
    return None if parallelism is None else max(1, parallelism // pack)
