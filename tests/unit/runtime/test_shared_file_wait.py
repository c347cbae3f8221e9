"""How often ranks look into a shared folder while they wait for rank 0, and that each gets what it has published."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from slurmtrain.runtime.shared_file_wait import Pauses, look
from slurmtrain.slurm.environment import Environment
from slurmtrain.system.files import write_json


def looks_within(seconds: float, local_rank: int) -> int:
    """How often a rank that waits so long in vain reads the shared directory."""
    now, looks = 0.0, 0

    def sleep(pause: float) -> None:
        nonlocal now
        now += pause

    pauses = Pauses.of_rank(Environment("slurm", local_rank=local_rank, local_world_size=8), sleep)
    while now < seconds:
        looks += 1
        pauses.pause()
    return looks


def test_the_ranks_of_a_node_look_less_and_less_and_all_but_the_first_seldom() -> None:
    """Of 1,024 ranks that waited for a minute, each looked 50 times a second: 3 million times."""
    first, other = looks_within(60.0, 0), looks_within(60.0, 1)
    assert first <= 80 and other <= 20
    assert 128 * (first + 7 * other) <= 60 * 500  # 500 a second


@pytest.mark.parametrize("function", ["listdir", "pread"])
def test_a_storage_that_fails_for_moments_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, function: str
) -> None:
    path = tmp_path / "x.json"
    assert look(path) is None
    write_json(path, {"address": "n0"})
    numbers = [errno.ETIMEDOUT]
    real = getattr(os, function)

    def fail(*args: Any) -> Any:
        if numbers:
            raise OSError(number := numbers.pop(0), os.strerror(number))
        return real(*args)

    monkeypatch.setattr(os, function, fail)
    assert [look(path), look(path)] == [None, {"address": "n0"}]
    assert "is looked for again: Connection timed out" in caplog.text
    numbers.append(errno.EACCES)
    with pytest.raises(PermissionError if function == "listdir" else OSError):
        look(path)
