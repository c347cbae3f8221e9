from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from slurmtrain.data.loading.shared_memory import SLOT_BYTES
from slurmtrain.data.loading.workers import Workers
from slurmtrain.errors import SlurmtrainError

MANY = SLOT_BYTES // 4 + 1
KINDS = {
    "int64": torch.arange(6).reshape(2, 3),
    "not contiguous": torch.arange(6).reshape(2, 3).T,
    "bfloat16": torch.ones(3, dtype=torch.bfloat16),
    "bool": torch.tensor([True, False]),
    "a number": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "gradient wanted": torch.ones(2, requires_grad=True),
    "sparse": torch.eye(3).to_sparse(),
    "negated": torch.tensor([1 + 2j]).conj().imag,
    "conjugated": torch.tensor([1 + 2j]).conj(),
    "one of a column": torch.arange(6).reshape(3, 2)[:1, 1],
    "complex": torch.tensor([1 + 2j]),
    "unsigned": torch.tensor([65535], dtype=torch.uint16),
    "channels last": torch.arange(24).reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
    "expanded": torch.arange(3).expand(2, 3),
    "large": torch.arange(MANY, dtype=torch.int32),
    "large and bfloat16": torch.ones(2 * MANY, dtype=torch.bfloat16),
}


def workers_on(
    work: Callable[[Any], Any], jobs: Iterable[Any], *, count: int = 1, ahead: int = 2, pin_memory: bool = False
) -> Workers[list[Any], Any]:
    """Each job's result by itself."""
    coming = iter(jobs)
    return Workers(
        lambda some: map(work, some),
        lambda number: list(itertools.islice(coming, number)),
        count=count,
        ahead=ahead,
        seed=0,
        pin_memory=pin_memory,
    )


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    "pin_memory", [False, pytest.param(True, marks=pytest.mark.skipif("not torch.cuda.is_available()"))]
)
def test_tensors_of_any_kind_come_as_they_are(count: int, pin_memory: bool) -> None:
    results = workers_on(KINDS.__getitem__, KINDS, count=count, pin_memory=pin_memory)
    try:
        got = list(zip(KINDS.items(), results, strict=False))
    finally:
        results.close()
    assert len(got) == len(KINDS)
    for (name, expected), tensor in got:
        assert (tensor.dtype, tensor.shape, tensor.layout) == (expected.dtype, expected.shape, expected.layout), name
        assert torch.equal(dense(tensor), dense(expected)), name
        if expected.layout == torch.strided and "last" in name:
            assert tensor.stride() == expected.stride(), name
        if tensor.layout == torch.strided and tensor.dtype != torch.uint16:
            tensor.detach().add_(True if tensor.dtype == torch.bool else 1)  # nobody else's memory, and not read-only


def dense(tensor: Tensor) -> Tensor:
    return tensor.to_dense() if tensor.layout != torch.strided else tensor.detach()


@pytest.mark.parametrize(("count", "ahead"), [(1, 1), (1, 2), (2, 3), (3, 40)])
def test_results_stay_as_they_came_while_the_shared_memory_is_used_again(count: int, ahead: int) -> None:
    results = workers_on(lambda number: {"rows": torch.full((100,), number)}, range(500), count=count, ahead=ahead)
    kept = list(results)
    results.close()
    assert [rows["rows"].unique().tolist() for rows in kept] == [[number] for number in range(500)]


class PickyError(SlurmtrainError):
    """Cannot be made again from what it says."""

    def __init__(self, file: str, line: int):
        super().__init__(f"{file}, line {line}")


@pytest.mark.parametrize("plain", [False, True])
def test_what_cannot_be_sent_is_an_error_in_its_turn(plain: bool) -> None:
    class LocalError(Exception):
        pass

    def work(number: int) -> Any:
        if number == 7:
            return lambda: number
        if number == 15:
            raise PickyError("f", number)
        if number == 25:
            raise LocalError("only here")
        return number if plain else torch.tensor(number)

    for first, last, sentence in (
        (0, 7, "[Pp]ickle"),
        (8, 15, "PickyError: f, line 15"),
        (16, 25, "LocalError: only here"),
    ):
        results = workers_on(work, range(first, 40), ahead=40)
        assert [int(next(results)) for _ in range(first, last)] == list(range(first, last))
        with pytest.raises(Exception, match=sentence):
            next(results)
        results.close()


def test_memory_that_a_data_set_uses_again_is_sent_as_it_was() -> None:
    buffer = np.zeros(1000)

    def work(numbers: list[int]) -> Any:
        for number in numbers:
            buffer[:] = number
            yield number if number % 3 else torch.from_numpy(buffer)

    coming = iter(range(300))
    results: Workers[list[int], Any] = Workers(
        work, lambda some: list(itertools.islice(coming, some)), count=1, ahead=20, seed=0, pin_memory=False
    )
    assert [int(result if i % 3 else result.unique()) for i, result in enumerate(results)] == list(range(300))
    results.close()
