"""The distribution of runs to array jobs: pure arithmetic, before anything is submitted.

An array has one script, so runs that ask for different resources need different arrays. MaxArraySize limits the *index*
(slurm.conf(5): the largest index is one less), so the second half of a long array has to begin at 0 again. One task of
an array is one run, or a pack of runs that share it: the members 0 to pack - 1 are task 0, and so on.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from slurmtrain.runs.sweep_dir import tasks_of


@dataclass(frozen=True)
class Array:
    """One array job.

    Attributes:
        members: numbers of the points, in the order of the array's tasks.
        parallelism: number of its tasks that may run at the same time; None: no limit.
        after: number of the array that has to end before this one begins, so that the limit holds for both together.
    """

    members: tuple[int, ...]
    parallelism: int | None = None
    after: int | None = None


def plan_arrays(
    shapes: Sequence[Hashable], *, max_size: int | None = None, parallelism: int | None = None, pack: int = 1
) -> list[Array]:
    """Return the arrays for points 0 to len(shapes) - 1.

    Args:
        shapes: what each point asks for; points of one array have the same shape.
        max_size: greatest number of tasks of an array.
        parallelism: number of points that may run at the same time, in all arrays together; at least one pack does.
        pack: number of points that share a task.
    """
    by_shape: dict[Hashable, list[int]] = {}
    for number, shape in enumerate(shapes):
        by_shape.setdefault(shape, []).append(number)
    members = []
    for numbers in by_shape.values():
        size = (max_size or len(numbers)) * pack
        members += [tuple(numbers[begin : begin + size]) for begin in range(0, len(numbers), size)]
    limits = limits_of([len(each) for each in members], parallelism, pack=pack)
    together = parallelism is None or sum(limit or 0 for limit in limits) <= max(1, parallelism // pack)
    return [
        Array(each, limit, None if together or number == 0 else number - 1)
        for number, (each, limit) in enumerate(zip(members, limits, strict=True))
    ]


def limits_of(members: Sequence[int], parallelism: int | None, *, pack: int = 1) -> list[int | None]:
    """Return how many tasks of each array may run at the same time, so that all together run `parallelism` points.

    If that is less than one task for each array, the limits are those of one array after the other.

    Args:
        members: number of runs of each array.
    """
    if parallelism is None:
        return [None] * len(members)
    tasks = [tasks_of(each, pack) for each in members]
    allowed = max(1, parallelism // pack)
    if allowed < len(tasks):
        return [min(allowed, each) for each in tasks]
    return list(_share(allowed, tasks))


def _share(total: int, sizes: Sequence[int]) -> list[int]:
    """Divide `total` in proportion to `sizes`: each part is at least 1 and at most its size, and their sum at most `total`."""
    shares = [1] * len(sizes)
    for _ in range(min(total, sum(sizes)) - len(sizes)):
        # The array that is furthest behind its proportion gets the next task (Sainte-Lague).
        open_ones = [number for number, size in enumerate(sizes) if shares[number] < size]
        best = max(open_ones, key=lambda number: sizes[number] / (2 * shares[number] + 1))
        shares[best] += 1
    return shares
