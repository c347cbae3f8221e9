"""SLURM's node lists and task counts."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.errors import EnvironmentMismatchError
from slurmtrain.slurm.nodelist import expand_counts, expand_nodelist


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n0", "n0"),
        ("localhost", "localhost"),
        ("n[0-2]", "n0 n1 n2"),
        ("n[3]", "n3"),
        ("node[08-11]", "node08 node09 node10 node11"),
        ("node[001,003,10-11]", "node001 node003 node10 node11"),
        ("node[99-101]", "node99 node100 node101"),
        ("rack[1-2]-node[01-02]", "rack1-node01 rack1-node02 rack2-node01 rack2-node02"),
        ("a[1],b[2-3]", "a1 b2 b3"),
        ("a,b[1,3]x,c", "a b1x b3x c"),
        ("gpu-[1-2].cluster.local", "gpu-1.cluster.local gpu-2.cluster.local"),
        ("n[1-2],n[1-2]", "n1 n2 n1 n2"),
        ("dgx-b200-[000-001]", "dgx-b200-000 dgx-b200-001"),
        ("x[1-2][3-4]", "x13 x14 x23 x24"),
        ("[1-2]n", "1n 2n"),
    ],
)
def test_the_odd_forms_too_are_expanded_in_order(text: str, hosts: str) -> None:
    assert expand_nodelist(text) == hosts.split()


@pytest.mark.parametrize("text", ["rack[1-2]-node[01-04]", "a[1],b[2-3]", "n[08-11,3],x", "node[99-101]"])
def test_scontrol_agrees(text: str, tmp_path: Path) -> None:
    conf = tmp_path / "slurm.conf"
    conf.write_text("ClusterName=none\nSlurmctldHost=localhost\n")
    environment = {**os.environ, "SLURM_CONF": str(conf)}
    answer = subprocess.run(
        ["scontrol", "show", "hostnames", text], env=environment, capture_output=True, text=True, check=True
    )
    assert expand_nodelist(text) == answer.stdout.split()


@pytest.mark.parametrize(
    "text",
    ["", ",", "n[", "n]", "n[1-", "n[1-2", "n[2-1]", "n[a-b]", "n[1,]", "n[]", "n[[1]]", "a,,b", "n[1]]", "n[-1]"],
)
def test_what_is_no_node_list_is_refused_and_shown(text: str) -> None:
    with pytest.raises(EnvironmentMismatchError, match="cannot read the node list") as caught:
        expand_nodelist(text)
    assert repr(text) in caught.value.message


NAME = st.from_regex(r"[a-z][a-z.\-]{0,6}", fullmatch=True)


@st.composite
def compressed(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A node list, and the hosts it stands for."""
    groups, hosts = [], []
    for _ in range(draw(st.integers(1, 4))):
        prefix, suffix = draw(NAME), draw(st.just("") | NAME)
        width = draw(st.integers(1, 4))
        parts, numbers = [], []
        for _ in range(draw(st.integers(1, 3))):
            first = draw(st.integers(0, 120))
            last = first + draw(st.integers(0, 5))
            numbers += [str(number).zfill(width) for number in range(first, last + 1)]
            parts.append(str(first).zfill(width) + (f"-{str(last).zfill(width)}" if last > first else ""))
        groups.append(f"{prefix}[{','.join(parts)}]{suffix}")
        hosts += [prefix + number + suffix for number in numbers]
    return ",".join(groups), hosts


@given(compressed())
def test_every_list_expands_to_the_hosts_it_was_made_of(pair: tuple[str, list[str]]) -> None:
    text, hosts = pair
    assert expand_nodelist(text) == hosts


@given(st.text("abn0123-[],", max_size=12))
def test_any_text_is_expanded_or_refused(text: str) -> None:
    try:
        hosts = expand_nodelist(text)
    except EnvironmentMismatchError:
        return
    assert hosts and all(host and not set(host) & set("[],") for host in hosts)


@pytest.mark.parametrize(("text", "counts"), [("2(x3),1", [2, 2, 2, 1]), ("4", [4]), ("1,2(x2),1", [1, 2, 2, 1])])
def test_task_counts(text: str, counts: list[int]) -> None:
    assert expand_counts(text) == counts


@pytest.mark.parametrize("text", ["", "x", "2(x", "2(xa)", "2,,1"])
def test_what_are_no_task_counts_is_refused(text: str) -> None:
    with pytest.raises(EnvironmentMismatchError, match="cannot read the task counts"):
        expand_counts(text)
