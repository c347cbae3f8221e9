"""Numbers of a plan as a person reads them: three digits, in the unit that suits them."""

from __future__ import annotations

from slurmtrain.report.progress import roughly


def count_text(count: float) -> str:
    """Format a number of tokens or parameters: 8.03 billion."""
    for size, name in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if count >= size:
            return f"{count / size:.3g} {name}"
    return f"{count:,.0f}"


def size_text(count: float) -> str:
    """Format bytes in units of 10^9, as file systems and networks count, and their multiples and parts."""
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count / 1e3:.3g} kB"


def seconds_text(seconds: float) -> str:
    """Format how long a step, or a part of one, takes."""
    if seconds >= 600:
        return roughly(seconds)
    if seconds >= 100:
        return f"{seconds:.0f} s"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def interval_text(seconds: float) -> str:
    """Format a time between two saves, or of a whole training."""
    return roughly(seconds) if seconds >= 90 else seconds_text(seconds)


def hours_text(hours: float) -> str:
    """Format GPU hours."""
    return f"{hours:,.0f}" if hours >= 10 else f"{hours:.2g}"
