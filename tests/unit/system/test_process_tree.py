from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from slurmtrain.system.process_tree import Process, kill_trees

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
    deadline = time.monotonic() + 60
    while not ready.exists() or len(ready.read_text().splitlines()) < 8:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    own = Process.of(shell.pid)
    assert own is not None
    kill_trees([own])
    shell.wait()
    assert not (tmp_path / "told").exists()
