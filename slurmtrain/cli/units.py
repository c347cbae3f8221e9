"""Numbers with their units, as options take them from a command line; and sizes as answers show them."""

from __future__ import annotations

import argparse
import re
import time

_AGO = {"m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}  # seconds
_TOKENS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


def whole(text: str, least: int = 0) -> int:
    """Return a whole number."""
    if not (text.isascii() and text.isdigit() and len(text) < 20) or int(text) < least:
        bound = f" of at least {least}" if least else ""
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number{bound}")
    return int(text)


def number(text: str, least: float = 0.0) -> float:
    """Return a finite number."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not least <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least {least:g}")
    return value


def rank_or_all(text: str) -> int | None:
    """Return the number of a rank, or None for all."""
    if text == "all":
        return None
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a rank number nor all")
    return int(text)


def token_count(text: str) -> int:
    """Return a number of tokens such as 15T, 1.5e12 or 300_000_000."""
    found = re.fullmatch(r"([0-9][0-9_]*(?:\.[0-9]+)?(?:e[+]?[0-9]{1,2})?)([kmbt]?)", text.strip().lower())
    count = float(found[1].replace("_", "")) * _TOKENS[found[2]] if found is not None else 0.0
    if not 1 <= count < 1e18:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens such as 15T, 300B or 1.5e12, below 1e18")
    return round(count)


def moment(text: str) -> float:
    """Return the moment, in unix seconds, that "7d", "12h", "90m", "2w" (ago) or "2026-01-31" means."""
    now = time.time()
    ago = re.fullmatch(r"([0-9]{1,6}) ?([mhdwHDW])", text.strip())  # an M may mean months
    if ago is not None:
        return max(0.0, now - int(ago[1]) * _AGO[ago[2].lower()])
    try:
        then = time.mktime(time.strptime(text, "%Y-%m-%d"))
    except (ValueError, OverflowError):
        then = -1.0
    if not 0 <= then <= now:
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r} is not a time in the past, such as 7d, 12h, 90m, 2w or 2026-01-31"
        )
    return then


def with_unit(value: object, unit: str = "") -> str:
    """Format a number that some other process has recorded, with its unit; "" for anything else."""
    return f"{value:.4g}{unit}" if isinstance(value, int | float) and not isinstance(value, bool) else ""


def format_size(size: int) -> str:
    """Format a number of bytes in units of 10^9, 10^6, 10^3 or 1."""
    if size >= 1e5:
        return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
    return f"{size / 1e3:.1f} kB" if size >= 1e3 else f"{size} bytes"
