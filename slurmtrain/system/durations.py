"""Durations as a person says them."""

from __future__ import annotations


def roughly(seconds: float) -> str:
    """Format a duration roughly: 40 s, 12 min, 2 h 10 min, 3 d 4 h."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    hours, minute = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minute} min" if minute else f"{hours} h"
    days, hour = divmod(round(seconds / 3600), 24)
    return f"{days} d {hour} h" if hour else f"{days} d"
