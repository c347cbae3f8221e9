"""Points into arrays: nothing lost, nothing twice, no limit passed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.runs.sweep_dir import tasks_of
from slurmtrain.sweep.arrays import plan_arrays


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=80),
    st.none() | st.integers(1, 20),
    st.none() | st.integers(1, 30),
    st.integers(1, 5),
)
def test_every_point_is_in_one_array_and_no_limit_is_passed(
    shapes: list[int], max_size: int | None, parallelism: int | None, pack: int
) -> None:
    arrays = plan_arrays(shapes, max_size=max_size, parallelism=parallelism, pack=pack)
    tasks = [tasks_of(len(array.members), pack) for array in arrays]
    assert sorted(number for array in arrays for number in array.members) == list(range(len(shapes)))
    for array in arrays:
        assert len({shapes[number] for number in array.members}) == 1
        assert max_size is None or tasks_of(len(array.members), pack) <= max_size
        assert list(array.members) == sorted(array.members)
    if parallelism is None:
        assert all(array.parallelism is None and array.after is None for array in arrays)
        return
    allowed = max(1, parallelism // pack)  # tasks; there is no part of one
    at_once = [array for array in arrays if array.after is None]
    assert sum(array.parallelism or 0 for array in at_once) <= allowed
    # Those that wait form one chain: no two of them at the same time.
    assert [array.after for array in arrays if array.after is not None] in ([], list(range(len(arrays) - 1)))
    assert all(1 <= (array.parallelism or 0) <= min(allowed, size) for array, size in zip(arrays, tasks, strict=True))
    if not any(array.after is not None for array in arrays):  # nothing of the allowance is left unused
        assert sum(array.parallelism or 0 for array in arrays) == min(allowed, sum(tasks))


def test_the_index_begins_at_0_in_every_array() -> None:
    arrays = plan_arrays(["a"] * 2500, max_size=1001)
    assert [len(array.members) for array in arrays] == [1001, 1001, 498]


def test_a_pack_is_one_task() -> None:
    arrays = plan_arrays(["a"] * 10 + ["b"], pack=4)
    assert [array.members for array in arrays] == [tuple(range(10)), (10,)]
    assert [tasks_of(len(array.members), 4) for array in arrays] == [3, 1]


def test_the_limit_is_shared_in_proportion() -> None:
    arrays = plan_arrays(["a"] * 300 + ["b"] * 100, parallelism=8)
    assert [array.parallelism for array in arrays] == [6, 2]
