"""Points into arrays: nothing lost, nothing twice, no limit passed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.runs.sweep_dir import tasks_of
from slurmtrain.sweep.plan import plan_arrays, tasks_at_once


@given(st.lists(st.integers(0, 3), min_size=1, max_size=80), st.none() | st.integers(1, 20), st.integers(1, 5))
def test_every_point_is_in_one_array_of_its_shape_and_no_limit_is_passed(
    shapes: list[int], max_size: int | None, pack: int
) -> None:
    arrays = plan_arrays(shapes, max_size=max_size, pack=pack)
    assert sorted(number for members in arrays for number in members) == list(range(len(shapes)))
    for members in arrays:
        assert len({shapes[number] for number in members}) == 1
        assert max_size is None or tasks_of(len(members), pack) <= max_size
        assert members == sorted(members)


def test_the_index_begins_at_0_in_every_array_and_a_pack_is_one_task() -> None:
    assert [len(members) for members in plan_arrays(["a"] * 2500, max_size=1001)] == [1001, 1001, 498]
    assert plan_arrays(["a"] * 10 + ["b"], pack=4) == [list(range(10)), [10]]
    assert [tasks_at_once(limit, 4) for limit in (None, 3, 8, 11)] == [None, 1, 2, 2]
