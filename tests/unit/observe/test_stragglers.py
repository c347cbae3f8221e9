"""Slow ranks: one that is slowed in one part is named with it, and noise names nobody."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest
from numpy.typing import NDArray

from slurmtrain.observe.phases import Phase
from slurmtrain.observe.stragglers import WATCHED, StragglerDetector, summary

# Seconds of a step's parts, in the proportions of a training whose data wait is hidden by half.
USUAL = {Phase.DATA: 0.04, Phase.FORWARD_BACKWARD: 0.3, Phase.OPTIMIZER: 0.05, Phase.OTHER: 0.005}
STEPS = 20  # of a window
Noise = Callable[[np.random.Generator, tuple[int, ...]], NDArray[np.float64]]


def normal(generator: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float64]:
    return np.maximum(0.1, 1 + 0.1 * generator.standard_normal(shape))


def heavy(generator: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """One step in twenty takes up to ten times as long, as on machines that do other things, too."""
    return np.exp(0.15 * generator.standard_normal(shape)) * np.where(
        generator.random(shape) < 0.05, generator.uniform(1, 10, shape), 1
    )


NOISES = {"normal": normal, "heavy": heavy}


def window(
    generator: np.random.Generator, ranks: int, noise: Noise, slow: Mapping[tuple[int, Phase], float]
) -> list[list[float]]:
    """What the ranks tell each other of one window."""
    times = {phase: USUAL[phase] * noise(generator, (ranks, STEPS)) for phase in WATCHED}
    for (rank, phase), ratio in slow.items():
        times[phase][rank] *= ratio
    # Each step takes as long as its slowest rank.
    whole = np.sum([times[phase] for phase in WATCHED], axis=0).max(axis=0)
    told = []
    for rank in range(ranks):
        own = [{phase: times[phase][rank, step] for phase in WATCHED} for step in range(STEPS)]
        told.append(
            summary([{**each, Phase.COMMUNICATION: whole[step] - sum(each.values())} for step, each in enumerate(own)])
        )
    return told


def named_after(
    detector: StragglerDetector,
    windows: int,
    seed: int,
    ranks: int,
    noise: Noise,
    slow: Mapping[tuple[int, Phase], float],
) -> dict[tuple[int, Phase], int]:
    """The windows after which ranks were named, by rank and part."""
    generator, found = np.random.default_rng(seed), dict[tuple[int, Phase], int]()
    for number in range(1, windows + 1):
        new, _ = detector.look(window(generator, ranks, noise, slow))
        found |= {(each.rank, each.phase): number for each in new}
    return found


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("phase", [Phase.DATA, Phase.FORWARD_BACKWARD, Phase.OPTIMIZER])
@pytest.mark.parametrize("ranks", [2, 8])
def test_a_rank_that_is_slowed_by_half_in_one_part_is_named_with_it_within_20_windows(
    noise: str, phase: Phase, ranks: int
) -> None:
    for seed in range(3):
        found = named_after(StragglerDetector([0] * ranks), 20, seed, ranks, NOISES[noise], {(ranks - 1, phase): 1.5})
        assert list(found) == [(ranks - 1, phase)]
        assert found[ranks - 1, phase] <= 20


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("ranks", [2, 8])
def test_none_is_named_in_500_windows_of_noise(noise: str, ranks: int) -> None:
    assert named_after(StragglerDetector([0] * ranks), 500, 7, ranks, NOISES[noise], {}) == {}


def test_a_rank_that_has_recovered_is_told_once_and_can_be_named_again() -> None:
    generator, detector, told = np.random.default_rng(2), StragglerDetector([0] * 4), []
    for number in range(40):
        slow = {(1, Phase.FORWARD_BACKWARD): 1.5} if number < 10 or number >= 25 else {}
        new, over = detector.look(window(generator, 4, normal, slow))
        told += [("slow", each.rank) for each in new] + [("over", each.rank) for each in over]
    assert told == [("slow", 1), ("over", 1), ("slow", 1)]
    assert [rank for rank, _ in detector.named] == [1]


def test_stages_with_different_work_are_compared_within_their_own_kind() -> None:
    groups = [0, 0, 1, 1]  # the last stage also predicts tokens
    work = {(2, Phase.FORWARD_BACKWARD): 2.0, (3, Phase.FORWARD_BACKWARD): 2.0}
    assert named_after(StragglerDetector(groups), 20, 4, 4, normal, work) == {}
    slow = {**work, (3, Phase.FORWARD_BACKWARD): 3.0}
    assert list(named_after(StragglerDetector(groups), 20, 4, 4, normal, slow)) == [(3, Phase.FORWARD_BACKWARD)]
