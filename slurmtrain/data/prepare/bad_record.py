"""A record that cannot be used."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BadRecord:
    """A record that is left out, with the reason."""

    reason: str
