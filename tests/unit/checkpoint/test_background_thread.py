"""Work beside training that fails in a way that nobody has foreseen: the next piece is done, and nobody waits for ever."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slurmtrain.checkpoint.ranks import RankGroup
from slurmtrain.checkpoint.save.background_thread import BackgroundThread
from slurmtrain.checkpoint.store.mirror import Mirror
from slurmtrain.checkpoint.store.mirror_upload import MirrorUploader
from slurmtrain.checkpoint.store.retention import Keep

WAIT_S = 60.0


@pytest.mark.parametrize("error", [KeyError("a bug"), SystemExit(1)])
def test_an_error_of_a_piece_of_work_ends_that_piece_alone(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    thread, done = BackgroundThread("worker"), []

    def fail() -> None:
        raise error

    thread.run(fail)
    thread.run(lambda: done.append(1))  # after the first
    assert thread.stop(WAIT_S) and done == [1] and thread.idle
    assert "worker: a piece of work has failed" in caplog.text


def test_an_error_that_a_store_alone_knows_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried: list[str] = []

    def upload(self: Mirror, path: Path, *args: Any, **options: Any) -> None:
        tried.append(path.name)
        raise KeyError("ETag")

    monkeypatch.setattr(Mirror, "upload", upload)
    identity: Any = SimpleNamespace(incarnation=SimpleNamespace(order=1))
    ranks = RankGroup(None)
    uploader = MirrorUploader(f"file://{tmp_path}/store", ranks, identity, Keep(last=2))
    uploader.offer(ranks, tmp_path / "checkpoint_0000001", [])
    uploader._thread.wait_idle()
    uploader.offer(ranks, tmp_path / "checkpoint_0000002", [])
    uploader.close(ranks, None)
    assert tried == ["checkpoint_0000001", "checkpoint_0000002"]
    assert caplog.text.count("was not copied to") == 2 and "KeyError: 'ETag'" in caplog.text
