"""The shares of a mixture's sources, from weights of any sum. Imports no torch, since submission checks them, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import lcm

from slurmtrain.errors import ConfigError

FINEST = 2**30  # shares are multiples of its inverse; products of two of them stay within 64 bits


def shares_of(names: Sequence[str], weights: Mapping[str, float] | None) -> list[Fraction] | None:
    """Return the weights of the sources `names` scaled to add up to one, exactly where possible; None for no weights.

    Raises:
        ConfigError: there are no sources, or the weights are not positive numbers for exactly these sources.
    """
    if not names:
        raise ConfigError("data.sources is empty", hint="name at least one, see conf/data/mixture.yaml")
    if weights is None:
        return None
    if set(weights) != set(names):
        odd = sorted(set(weights) ^ set(names))
        raise ConfigError(
            f"data.weights and data.sources differ in {', '.join(odd)}",
            hint="every source needs a weight, and no other name one",
        )
    values = [_fraction(name, weights[name]) for name in names]
    total = sum(values)
    exact = [value / total for value in values]
    if lcm(*(share.denominator for share in exact)) <= FINEST:
        return exact
    sums = [round(sum(exact[: count + 1]) * FINEST) for count in range(len(exact))]
    rounded = [Fraction(after - before, FINEST) for before, after in zip([0, *sums], sums, strict=False)]
    for name, share in zip(names, rounded, strict=True):
        if not share:
            raise ConfigError(f"data.weights.{name} is less than a billionth of all", hint="leave it out")
    return rounded


def _fraction(name: str, weight: float) -> Fraction:
    try:
        value = Fraction(str(weight))
    except (ValueError, ZeroDivisionError):
        value = Fraction(0)
    if value <= 0:
        raise ConfigError(
            f"data.weights.{name} is {weight}", hint="a weight is a number above 0; leave out what is not wanted"
        )
    return value
