"""Words of `probe`'s file: lists, times, nodes, and text that stays within its comment."""

from __future__ import annotations

from collections.abc import Iterable

from slurmtrain.slurm.facts import NodeGroup

DAY_MIN = 1440


def listed(words: Iterable[str]) -> str:
    """Return words as a list in a sentence, the first dozen of them."""
    found = list(words)
    shown = found[:12]
    return ", ".join(shown) + (f" and {len(found) - len(shown)} more" if len(found) > len(shown) else "")


def in_words(minutes: int) -> str:
    """Return a time in words: "1 d 6 h"."""
    days, rest = divmod(minutes, DAY_MIN)
    hours, rest = divmod(rest, 60)
    parts = [f"{days} d" if days else "", f"{hours} h" if hours else "", f"{rest} min" if rest else ""]
    return " ".join(part for part in parts if part) or "0 min"


def group_words(group: NodeGroup) -> str:
    """Describe nodes that are alike: "4 with 64 CPUs, 515000 MB and gpu:a100:4"."""
    gpus = " and " + ", ".join(f"gpu:{name}:{number}" if name else f"gpu:{number}" for name, number in group.gpus)
    return f"{group.count} with {group.cpus} CPUs, {group.memory_mb} MB{gpus if group.gpus else ''}"


def on_one_line(text: str) -> str:
    """Return the text on one line, without anything that could end a comment."""
    return " ".join("".join(each if each.isprintable() else " " for each in text).split())
