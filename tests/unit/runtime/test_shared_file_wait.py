"""How often ranks look into a shared folder while they wait for rank 0, and that each gets what it has published."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from slurmtrain.runtime import shared_file_wait as published_module
from slurmtrain.runtime.shared_file_wait import Pauses, Published
from slurmtrain.slurm.environment import Environment
from slurmtrain.system.files import write_json


def rank_on(node: int, local_rank: int, *, nodes: int, per_node: int) -> Environment:
    place: dict[str, Any] = {"rank": node * per_node + local_rank, "local_rank": local_rank, "node_rank": node}
    sizes: dict[str, Any] = {"world_size": nodes * per_node, "local_world_size": per_node}
    return Environment("slurm", **place, **sizes, nodes=tuple(f"n{each}" for each in range(nodes)))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(published_module, "Path", lambda path: tmp_path if path == "/dev/shm" else Path(path))
    (tmp_path / "attempt").mkdir()
    return tmp_path / "attempt"


def looks_within(seconds: float, environment: Environment, folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often a rank that waits so long in vain reads the shared directory."""
    now, looks = 0.0, 0

    def sleep(pause: float) -> None:
        nonlocal now
        now += pause

    def listdir(path: Path) -> list[str]:
        nonlocal looks
        looks += 1
        return []

    with monkeypatch.context() as patched:
        patched.setattr(os, "listdir", listdir)
        waits, pauses = Published(folder / "x.json", environment, clock=lambda: now), Pauses(sleep=sleep)
        while now < seconds:
            assert waits.look() is None
            pauses.pause()
    return looks


@pytest.mark.parametrize("nodes", [1, 16, 128])
def test_the_ranks_of_a_node_look_as_often_as_one_and_less_and_less(
    nodes: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 1,024 ranks that waited for a minute, each looked 50 times a second: 3 million times."""
    first = looks_within(60.0, rank_on(0, 0, nodes=nodes, per_node=8), folder, monkeypatch)
    other = looks_within(60.0, rank_on(0, 1, nodes=nodes, per_node=8), folder, monkeypatch)
    assert first <= 80 and other <= 4
    assert nodes * (first + 7 * other) <= nodes * 110  # 128 nodes: 14,000


def test_every_rank_gets_what_rank_0_has_published_through_the_first_of_its_node(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (Published(folder / "x.json", rank_on(1, each, nodes=2, per_node=2)) for each in (0, 1))
    assert first.look() is None and second.look() is None
    write_json(folder / "x.json", {"port": 7})
    assert second.look() is None
    assert first.look() == {"port": 7}
    with monkeypatch.context() as patched:
        patched.setattr(os, "listdir", lambda path: pytest.fail("looks into the shared folder"))
        assert second.look() == {"port": 7}
    first.forget()
    assert second.look() is None
    monkeypatch.undo()
    # A rank that the first of its node does not reach, as in another container, looks by itself after a while.
    now = 0.0
    alone = Published(folder / "x.json", rank_on(1, 1, nodes=2, per_node=2), clock=lambda: now)
    assert alone.look() is None
    now = 6.0
    assert alone.look() == {"port": 7}


def test_what_others_put_in_its_place_is_not_believed(folder: Path) -> None:
    waits = Published(folder / "x.json", rank_on(1, 1, nodes=2, per_node=2))
    mine = folder / "planted"
    mine.write_text('{"port": 1}')
    waits._on_node.symlink_to(mine)
    assert waits.look() is None
    if os.geteuid() == 0:
        waits._on_node.unlink()
        waits._on_node.write_text('{"port": 1}')
        os.chown(waits._on_node, 12345, 12345)
        assert waits.look() is None


@pytest.mark.parametrize("function", ["listdir", "pread"])
def test_a_storage_that_fails_for_moments_is_asked_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, function: str
) -> None:
    write_json(folder / "x.json", {"address": "n0"})
    waits, numbers = Published(folder / "x.json", rank_on(0, 0, nodes=1, per_node=1)), [errno.ETIMEDOUT, errno.EIO]
    real = getattr(os, function)

    def fail(*args: Any) -> Any:
        if numbers:
            raise OSError(number := numbers.pop(0), os.strerror(number))
        return real(*args)

    monkeypatch.setattr(os, function, fail)
    assert [waits.look(), waits.look(), waits.look()] == [None, None, {"address": "n0"}]
    assert caplog.text.count("is looked for again: Connection timed out") == 1 and "Input/output" not in caplog.text
    numbers.append(errno.EACCES)
    with pytest.raises(PermissionError if function == "listdir" else OSError):
        waits.look()
