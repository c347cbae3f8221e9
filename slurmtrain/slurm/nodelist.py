"""SLURM's words on nodes: lists of their names, `rack[1-2]-node[01-04],gpu7`, and their states.

Lists are expanded here, since containers often have no `scontrol` to ask.
"""

from __future__ import annotations

import re

from slurmtrain.errors import EnvironmentMismatchError

AT_WORK = ("idle", "mixed", "allocated", "completing", "planned")  # states of nodes on which jobs can run now or soon


# A name or a pattern of names: what stands between two commas that are not in brackets.
GROUP = r"(?:[^\[\],]|\[[^\[\]]*\])+"


def expand_nodelist(text: str) -> list[str]:
    """Return all host names of a node list, in its order; zero padding is kept, several brackets multiply left to right.

    Raises:
        EnvironmentMismatchError: brackets do not close, or a range is not valid.
    """
    hosts: list[str] = []
    groups = [group.strip() for group in re.findall(GROUP, text)]
    if re.fullmatch(f"{GROUP}(?:,{GROUP})*", text) is None or not all(groups):
        raise _unreadable(text)
    for group in groups:
        names = [""]
        for fixed, inside in re.findall(r"([^\[\]]+)|\[([^\]]*)\]", group):
            items = [fixed] if fixed else _expand_range(inside, text)
            names = [name + item for name in names for item in items]
        hosts.extend(names)
    return hosts


def _expand_range(inside: str, whole: str) -> list[str]:
    items: list[str] = []
    for part in inside.split(","):
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and (not last.isdigit() or int(last) < int(first))):
            raise _unreadable(whole)
        if dash:
            items += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
        else:
            items.append(first)
    return items


def expand_counts(text: str) -> list[int]:
    """Expand SLURM_TASKS_PER_NODE and the like: `2(x3),1` -> [2, 2, 2, 1].

    Raises:
        EnvironmentMismatchError: it is not of that form.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise EnvironmentMismatchError(f"cannot read the task counts {text!r}", hint="expected e.g. 2(x3),1")
        counts += [int(match.group(1))] * int(match.group(2) or 1)
    return counts


def _unreadable(text: str) -> EnvironmentMismatchError:
    return EnvironmentMismatchError(f"cannot read the node list {text!r}", hint="expected e.g. node[01-04,7],gpu3")


# States, in the words of sinfo.


def is_dead(state: str) -> bool:
    """Return whether a node that a job has is dead, by sinfo's word for its state (`man sinfo`, NODE STATE CODES).

    A star says that it does not answer.
    """
    return "*" in state or state.startswith(("down", "error", "unknown", "no_respond", "power"))


def is_silent(state: str) -> bool:
    """Return whether a node only does not answer, as when its slurmd restarts: SLURM has not taken it out of service."""
    return state.endswith("*") and not is_dead(state.rstrip("*"))


def is_usable(state: str) -> bool:
    """Return whether ranks should be started on a node that a job has: it is not dead, and nobody wants it to be left alone.

    A node that has registered with less than slurm.conf says, as without one of its GPUs, is drained; but its state is then
    "inval", which hides that.
    """
    return not is_dead(state) and not state.startswith(("drain", "fail", "inval"))
