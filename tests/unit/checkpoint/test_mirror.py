"""Copies in an object store: whatever fails there or here, what is seen is whole, and nothing committed is written again."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from slurmtrain.checkpoint.errors import CheckpointError
from slurmtrain.checkpoint.format.blocks import write_file
from slurmtrain.checkpoint.store import commit
from slurmtrain.checkpoint.store.commit import Incarnation, claim
from slurmtrain.checkpoint.store.mirror import Mirror, copy_name
from slurmtrain.checkpoint.store.retention import Keep
from tests.support.checkpoint_files import manifest_of, text_of

WORLD = 5
FILES = {f"rank{rank:05d}.safetensors": os.urandom(1000 + rank) for rank in range(WORLD - 1)} | {
    "rank00004.safetensors": b""
}


class FaultyFileSystem(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A store whose k-th call of one kind, and those after it, fail."""

    protocol = "faulty"
    store: dict[str, Any] = {}  # noqa: RUF012 (of all instances, like MemoryFileSystem's)
    pseudo_dirs: list[str] = [""]  # noqa: RUF012
    fails: tuple[str, int, type[BaseException]] = ("", 0, OSError)
    asked: list[str] = []  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        return MemoryFileSystem._strip_protocol(path.removeprefix("faulty://"))

    def _asked(self, call: str) -> None:
        type(self).asked.append(call)
        kind, first, error = type(self).fails
        if call == kind and self.asked.count(call) >= first:
            raise error("503 Slow Down")

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        self._asked("write" if "w" in mode else "read")
        return super()._open(path, mode, **options)

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        self._asked("ls")
        return super().ls(path, detail, **options)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        self._asked("read")
        content: bytes = super().cat_file(path, start, end, **options)
        return content

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        self._asked("rm")
        super().rm(path, recursive, maxdepth)


def fail(call: str = "", first: int = 1, error: type[BaseException] = OSError) -> None:
    FaultyFileSystem.fails, FaultyFileSystem.asked = (call, first, error), []


@pytest.fixture
def faulty() -> Iterator[Mirror]:
    fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)
    FaultyFileSystem.store = {}
    fail()
    yield Mirror("faulty://bucket/run")
    fail()


@pytest.fixture
def store() -> Mirror:
    return Mirror(f"memory://{uuid.uuid4().hex}/run")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


FIRST, SECOND = Incarnation(1, "first"), Incarnation(2, "second")


def checkpoint(directory: Path, step: int, incarnation: Incarnation = FIRST, *, loss: float = 0.0) -> Path:
    claim(directory, incarnation)
    temporary = commit.begin(directory, step, incarnation)
    records = {name: write_file(temporary / name, memoryview(data)) for name, data in FILES.items()}
    manifest = manifest_of(step, records, incarnation, world_size=WORLD, metrics={"valid_loss": loss})
    return commit.commit(temporary, text_of(manifest), step, incarnation)


def copy(store: Mirror, path: Path, order: int = 1) -> str:
    upload(store, path, order, 0, WORLD)
    store.complete(path, order)
    return copy_name(path, order)


def upload(store: Mirror, path: Path, order: int, first: int, end: int) -> None:
    for rank in range(first, end):
        store.upload(path, f"rank{rank:05d}.safetensors", order)


def at(store: Mirror, what: str) -> str:
    protocol, _, path = store.url.partition("://")
    return f"{protocol}://{path}/{what}"


def objects(store: Mirror, name: str = "") -> list[str]:
    files, _ = fsspec.core.url_to_fs(store.url)
    return sorted(files.find(at(store, name)))


def change(store: Mirror, what: str, by: Callable[[bytes], bytes]) -> None:
    files, _ = fsspec.core.url_to_fs(store.url)
    before = files.cat_file(at(store, what)) if files.exists(at(store, what)) else b""
    files.makedirs(at(store, what).rpartition("/")[0], exist_ok=True)
    files.pipe_file(at(store, what), by(before))


def flipped(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


# ------------------------------------------------------------------------------------------------------ there and back


def test_the_newest_is_last_by_number_and_not_by_letter(store: Mirror, directory: Path) -> None:
    made = [copy(store, checkpoint(directory, step), order) for step, order in ((200, 9), (200, 10), (99999999, 1))]
    first = copy(store, checkpoint(directory, 100), 11)
    assert store.committed() == [first, *made]


# ------------------------------------------------------------------------------------------ only what is whole is seen


@pytest.mark.parametrize("written", range(len(FILES) + 2))
def test_killed_after_any_object_it_is_not_there(faulty: Mirror, directory: Path, written: int) -> None:
    path = checkpoint(directory, 1)
    fail("write", written + 1, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        copy(faulty, path)
    fail()
    assert len(objects(faulty)) == written
    assert faulty.committed() == []
    name = copy(faulty, path)  # once more from the beginning
    assert faulty.committed() == [name]


@pytest.mark.parametrize("lost", ["missing", "short"])
def test_it_is_not_committed_while_a_file_of_any_rank_is_missing_or_short(
    store: Mirror, directory: Path, lost: str
) -> None:
    path = checkpoint(directory, 1)
    upload(store, path, 1, 0, 2)
    upload(store, path, 1, 3, WORLD)
    if lost == "short":
        change(store, f"{copy_name(path, 1)}/rank00002.safetensors", lambda data: b"half of it")
    with pytest.raises(CheckpointError, match=r"rank00002.safetensors (is missing|has 10 bytes instead of 1002)"):
        store.complete(path, 1)
    assert store.committed() == []


def test_two_incarnations_copy_the_same_step_side_by_side(store: Mirror, directory: Path) -> None:
    old, new = checkpoint(directory, 10, FIRST), checkpoint(directory, 10, SECOND)
    # One after the other has begun, the older one ends last.
    upload(store, old, 1, 0, 2)
    newer = copy(store, new, 2)
    upload(store, old, 1, 2, WORLD)
    store.complete(old, 1)
    older = copy_name(old, 1)
    assert store.committed() == [older, newer]
    # A run that has moved counts from the beginning: its copy of the step overwrites nothing either.
    moved = copy(store, checkpoint(directory.parent / "there", 10, Incarnation(1, "there")), 1)
    assert sorted(store.committed()) == sorted([older, newer, moved])
    labels = [store.manifest(name)[1].incarnation_label for name in (older, newer, moved)]
    assert labels == ["first", "second", "there"]


# ------------------------------------------------------------------------------------------ nothing in a store is trusted


def test_what_else_lies_there_is_neither_read_nor_removed(store: Mirror, directory: Path) -> None:
    name = copy(store, checkpoint(directory, 1))
    for other in ("notes/COMPLETE", "checkpoint_0000009/COMPLETE", f"{name}.bak/COMPLETE", "checkpoint_0000007.1-zz/x"):
        change(store, other, lambda data: b"0" * 65)
    assert store.committed() == [name]
    before = objects(store)
    assert store.prune(Keep(), spare=name) == []
    assert objects(store) == before


# ------------------------------------------------------------------------------------------------------ stores that fail

OF_A_PACKAGE = type("EndpointConnectionError", (Exception,), {"__module__": "botocore.exceptions"})


@pytest.mark.parametrize(
    ("call", "work", "error"),
    [("write", "copy", TimeoutError), ("ls", "list", OF_A_PACKAGE), ("read", "fetch", PermissionError)],
)
def test_a_store_that_fails_is_one_sentence_and_never_taken_for_an_empty_one(
    faulty: Mirror, directory: Path, tmp_path: Path, call: str, work: str, error: type[Exception]
) -> None:
    path = checkpoint(directory, 1)
    name = copy(faulty, path)
    fail(call, error=error)
    works: dict[str, Callable[[], object]] = {
        "copy": lambda: faulty.upload(path, "rank00004.safetensors", 2),
        "list": faulty.committed,
        "fetch": lambda: faulty.download(name, tmp_path, ["rank00004.safetensors"]),
    }
    with pytest.raises(CheckpointError, match=rf"^{faulty.url}.*: {error.__name__}: 503 Slow Down"):
        works[work]()


def test_a_url_that_cannot_work_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)  # importing it is an ImportError
    for url, sentence in {
        "s3:/bucket/run": "is not a URL",
        "nowhere://bucket": "Protocol not known",
        "file:///": "names no folder",
        "s3://bucket/run": "cannot be copied to s3://: .*nstall s3fs",
    }.items():
        with pytest.raises(CheckpointError, match=sentence) as error:
            Mirror(url)
        assert error.value.hint


# ------------------------------------------------------------------------------------------------------------ removing


def test_the_best_stay(store: Mirror, directory: Path) -> None:
    losses = {10: 1.0, 20: 0.5, 30: 2.0, 40: 3.0, 50: 4.0}
    names = [copy(store, checkpoint(directory, step, loss=loss)) for step, loss in losses.items()]
    assert store.prune(Keep(last=2, best=1), spare=names[-1]) == [names[0], names[2]]
    assert store.committed() == [names[1], names[3], names[4]]


def test_what_need_not_be_kept_is_removed_and_copies_of_one_step_stay_or_go_together(
    store: Mirror, directory: Path
) -> None:
    names = [copy(store, checkpoint(directory, 10, each), each.order) for each in (FIRST, SECOND)]
    names += [copy(store, checkpoint(directory, step, SECOND), 2) for step in (20, 30, 40)]
    assert store.prune(Keep(last=4), spare=names[-1]) == []
    assert store.prune(Keep(last=2), spare=names[2]) == names[:2]  # spared: the last one saved, after a step back
    assert store.committed() == names[2:]
    assert store.prune(Keep(last=2, every=20), spare=names[-1]) == []


def test_a_store_that_fails_while_it_removes_leaves_every_copy_whole_or_out_of_sight(
    faulty: Mirror, directory: Path
) -> None:
    names = [copy(faulty, checkpoint(directory, step, loss=float(step))) for step in (10, 20, 30, 40)]
    # It does not say which is the best; a marker cannot be removed; what lies behind the first marker cannot.
    for call, first, whole in (("read", 1, names), ("rm", 1, names), ("rm", 2, names[1:])):
        fail(call, first)
        with pytest.raises(CheckpointError, match="503 Slow Down"):
            faulty.prune(Keep(last=2, best=1) if call == "read" else Keep(last=2), spare=names[-1])
        fail()
        assert faulty.committed() == whole
        assert all(len(objects(faulty, name)) == len(FILES) + 2 for name in whole)


def test_leftovers_go_and_an_upload_of_a_newer_incarnation_stays(store: Mirror, directory: Path) -> None:
    left, done, going = (checkpoint(directory, step) for step in (10, 20, 30))
    upload(store, left, 1, 0, 3)
    upload(store, going, 3, 0, 3)
    name = copy(store, done, 2)
    assert store.prune(Keep(), spare=name) == [copy_name(left, 1)]
    assert objects(store, copy_name(left, 1)) == []
    upload(store, going, 3, 3, WORLD)
    store.complete(going, 3)
    assert store.committed() == [name, copy_name(going, 3)]
