"""Read values as SLURM's commands print them: lines of NAME = VALUE, durations and times."""

from __future__ import annotations

import re
import time


def parse_show_config(text: str) -> dict[str, str]:
    """Read `scontrol show config`: a line each, NAME = VALUE."""
    pairs = (line.partition("=") for line in text.splitlines())
    return {name.strip(): value.strip() for name, equals, value in pairs if equals}


def parse_duration(text: str) -> float | None:
    """Return seconds from a duration as SLURM writes it: "30 sec", "30", "00:00:30", "1-00:00:00"; None if it is none."""
    match = re.fullmatch(r"(?:(?:(\d+)-)?(\d+):(\d+):)?(\d+)(?: sec)?", text.strip())
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def parse_time(text: str) -> float | None:
    """Return unix seconds from SLURM's time stamps, local or in unix seconds; "Unknown", "None" and "N/A" are None."""
    if text.isascii() and text.isdecimal():
        return float(text)
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None
