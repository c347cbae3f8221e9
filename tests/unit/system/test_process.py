from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from slurmtrain.system import process
from slurmtrain.system.process import ProcessMark, kill_trees


def test_a_mark_is_alive_as_long_as_its_process_also_when_it_was_read_back() -> None:
    me = ProcessMark.own()
    assert me.pid == os.getpid() and me.lives() and ProcessMark.from_json(me.to_json()) == me
    with subprocess.Popen(["sleep", "60"]) as child:
        mark = replace(me, pid=child.pid, born=process.born(child.pid))
        assert mark.lives() and child.pid in process.living_descendants(os.getpid())
        child.kill()
    assert mark.lives() is False
    assert replace(me, born="1").lives() is False  # whose pid this process has got


def test_a_process_of_another_host_or_container_is_neither_alive_nor_dead() -> None:
    me = ProcessMark.own()
    assert replace(me, host="another-host").lives() is None
    assert replace(me, namespace="pid:[1]").lives() is None
    assert not replace(me, namespace="pid:[1]").can_be_seen


JOBS = """
set -m
for number in $(seq 8); do
  (trap 'echo told >> told' HUP; echo ready >> ready; while :; do sleep 0.02; done) &
done
wait
"""


@pytest.mark.parametrize("_", range(6))  # one of them may hear nothing by chance
def test_no_process_of_a_tree_hears_of_its_end(tmp_path: Path, _: int) -> None:
    """As in the power failure of a node: an srun that heard of its shell's end would tell SLURM to end its step."""
    shell = subprocess.Popen(["bash", "-c", JOBS], cwd=tmp_path, start_new_session=True)
    ready = tmp_path / "ready"
    assert process.wait_until(lambda: ready.exists() and len(ready.read_text().splitlines()) == 8, timeout_s=60)
    own = ProcessMark.of(shell.pid)
    assert own is not None
    kill_trees([own])
    shell.wait()
    assert not (tmp_path / "told").exists()
