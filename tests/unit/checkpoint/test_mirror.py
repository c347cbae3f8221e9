"""Copies in an object store: whatever fails there or here, what is seen is whole, and nothing committed is written again."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from slurmtrain.checkpoint.format import blocks
from slurmtrain.checkpoint.format.manifest import FORMAT, Manifest, read_manifest, read_manifest_bytes
from slurmtrain.checkpoint.ranks import RankGroup
from slurmtrain.checkpoint.store import commit, mirror
from slurmtrain.checkpoint.store.fencing import Incarnation, claim
from slurmtrain.checkpoint.store.mirror import Mirror, MissingError, copy_name
from slurmtrain.checkpoint.store.mirror_upload import MirrorUploader
from slurmtrain.checkpoint.store.retention import Keep
from slurmtrain.checkpoint.store.transfers import blocks_moved
from slurmtrain.errors import CheckpointError

DAY = 86400.0
WORLD = 4
FILES = {f"rank{rank:05d}.safetensors": os.urandom(1000 + rank) for rank in range(WORLD)} | {"index.bin": b"index"}


class FaultyFileSystem(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A store that fails when it is told to, and notes what it was asked for."""

    protocol = "faulty"
    store: dict[str, Any] = {}  # noqa: RUF012 (of all instances, like MemoryFileSystem's)
    pseudo_dirs: list[str] = [""]  # noqa: RUF012
    calls: list[tuple[str, str]] = []  # noqa: RUF012
    fault: Callable[[str, str], None] = staticmethod(lambda call, path: None)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        return MemoryFileSystem._strip_protocol(path.removeprefix("faulty://"))

    def _asked(self, call: str, path: str) -> None:
        type(self).calls.append((call, path.rpartition("/")[2]))
        type(self).fault(call, path)

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        self._asked("write" if "w" in mode else "read", path)
        return super()._open(path, mode, **options)

    def info(self, path: str, **options: Any) -> Any:
        self._asked("info", path)
        return super().info(path, **options)

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        self._asked("ls", path)
        return super().ls(path, detail, **options)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        self._asked("read", path)
        content: bytes = super().cat_file(path, start, end, **options)
        return content

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        self._asked("rm", path)
        super().rm(path, recursive, maxdepth)


class Failing:
    """From the k-th call of this kind on, so many fail."""

    def __init__(self, call: str, first: int = 1, count: int = 10**9, error: type[BaseException] = OSError):
        self.call, self.seen, self.failing, self.error = call, 0, range(first, first + count), error
        self.lock = threading.Lock()

    def __call__(self, call: str, path: str) -> None:
        if call == self.call:
            with self.lock:
                self.seen += 1
                if self.seen in self.failing:
                    raise self.error("503 Slow Down")


@pytest.fixture
def faulty() -> Iterator[type[FaultyFileSystem]]:
    fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)
    FaultyFileSystem.store, FaultyFileSystem.calls = {}, []
    FaultyFileSystem.fault = staticmethod(lambda call, path: None)
    yield FaultyFileSystem
    FaultyFileSystem.fault = staticmethod(lambda call, path: None)


def store_at(url: str) -> Mirror:
    return Mirror(url, sleep=lambda seconds: None)


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Mirror:
    where = f"file://{tmp_path}/store/run" if request.param == "file" else f"memory://{uuid.uuid4().hex}/run"
    return store_at(where)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def checkpoint(
    directory: Path,
    step: int,
    incarnation: Incarnation = Incarnation(1, "first"),  # noqa: B008 (it is frozen)
    *,
    files: dict[str, bytes] = FILES,
    metrics: dict[str, float] | None = None,
) -> Path:
    claim(directory, incarnation)
    temporary = commit.begin(directory, step, incarnation)
    with blocks.threads() as pool:
        records = {name: blocks.write(temporary / name, memoryview(data), pool)[0] for name, data in files.items()}
    manifest = Manifest(
        format=FORMAT,
        run_id="run",
        step=step,
        incarnation=incarnation.order,
        incarnation_label=incarnation.label,
        world_size=WORLD,
        torch_version="2",
        files=records,
        tensors={},
        state={},
        metrics=metrics or {},
    )
    return commit.commit(temporary, manifest, incarnation)


def copy(store: Mirror, path: Path, order: int = 1) -> str:
    store.upload(path, sorted(read_manifest(path).files), order)
    store.complete(path, order)
    return copy_name(path, order)


def objects(store: Mirror, name: str = "") -> list[str]:
    root = f"{store._root}/{name}".rstrip("/")
    return sorted(path.removeprefix(f"{root}/") for path in store._fs.find(root))


def contents(store: Mirror, what: str) -> bytes:
    data: bytes = store._fs.cat_file(f"{store._root}/{what}")
    return data


def put(store: Mirror, what: str, data: bytes) -> None:
    if isinstance(store._fs, MemoryFileSystem):
        store._fs.pipe_file(f"{store._root}/{what}", data)
    else:
        path = Path(f"{store._root}/{what}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def make_old(store: Mirror, name: str, seconds: float) -> None:
    then = datetime.now(tz=UTC) - timedelta(seconds=seconds)
    for path in store._fs.find(f"{store._root}/{name}"):
        if isinstance(store._fs, MemoryFileSystem):
            store._fs.store[path].modified = then
        else:
            os.utime(path, (then.timestamp(), then.timestamp()))


# ------------------------------------------------------------------------------------------------------ there and back


def test_what_comes_back_is_what_was_committed(store: Mirror, directory: Path, tmp_path: Path) -> None:
    path = checkpoint(directory, 1000)
    name = copy(store, path)
    assert store.committed() == [name]
    assert name.startswith("checkpoint_0001000.1-")

    text, expected = store.manifest_bytes(name)
    assert (text, expected) == read_manifest_bytes(path)
    manifest = store.manifest(name)
    assert manifest == read_manifest(path)

    back = tmp_path / "back"
    back.mkdir()
    store.download(name, back, manifest.sizes)
    assert {file.name: file.read_bytes() for file in back.iterdir()} == FILES
    assert blocks.find_damage(back, manifest.files.items()) == []


def test_files_of_many_blocks_and_of_none_come_back(
    store: Mirror, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (mirror, blocks):
        monkeypatch.setattr(module, "BLOCK_BYTES", 100)
    files = {"long": os.urandom(1001), "even": os.urandom(300), "none": b"", "index.bin": b"i"}
    path, before = checkpoint(directory, 1, files=files), blocks_moved()
    name = copy(store, path)
    assert blocks_moved() - before >= 11 + 3 + 1, "who waits for a slow store sees that it gets on"
    (tmp_path / "back").mkdir()
    store.download(name, tmp_path / "back", store.manifest(name).sizes)
    assert blocks_moved() - before >= 2 * (11 + 3 + 1)
    assert {file.name: file.read_bytes() for file in (tmp_path / "back").iterdir()} == files


def test_the_newest_is_last_by_number_and_not_by_letter(store: Mirror, directory: Path) -> None:
    made = [copy(store, checkpoint(directory, step), order) for step, order in ((200, 9), (200, 10), (99999999, 1))]
    first = copy(store, checkpoint(directory, 100), 11)
    assert store.committed() == [first, *made]


# ------------------------------------------------------------------------------------------ only what is whole is seen


@pytest.mark.parametrize("written", range(len(FILES) + 2))
def test_killed_after_any_object_it_is_not_there(faulty: type[FaultyFileSystem], directory: Path, written: int) -> None:
    class Killed(BaseException):
        pass

    path = checkpoint(directory, 1)
    store = store_at("faulty://bucket/run")
    faulty.fault = Failing("write", first=written + 1, error=Killed)
    with pytest.raises(Killed):
        copy(store, path)
    faulty.fault = staticmethod(lambda call, path: None)
    assert len(objects(store)) == written
    assert store.committed() == []
    assert store.committed() == [] == store.prune(Keep())

    name = copy(store, path)  # once more from the beginning
    assert store.committed() == [name]


def test_an_upload_that_is_told_to_end_ends(store: Mirror, directory: Path) -> None:
    path = checkpoint(directory, 1)

    def leave() -> None:
        raise CheckpointError("the save was given up")

    with pytest.raises(CheckpointError, match="given up"):
        store.upload(path, sorted(FILES), 1, check=leave)
    assert store.committed() == []


@pytest.mark.parametrize("lost", ["missing", "short"])
def test_it_is_not_committed_while_a_file_of_any_rank_is_missing_or_short(
    store: Mirror, directory: Path, lost: str
) -> None:
    path = checkpoint(directory, 1)
    store.upload(path, [name for name in FILES if name != "rank00002.safetensors"], 1)
    if lost == "short":
        put(store, f"{copy_name(path, 1)}/rank00002.safetensors", b"half of it")
    with pytest.raises(CheckpointError, match=r"rank00002.safetensors (is missing|has 10 bytes instead of 1002)"):
        store.complete(path, 1)
    assert store.committed() == []
    assert f"{copy_name(path, 1)}/manifest.json" not in objects(store)


@pytest.mark.parametrize(
    ("file", "damage", "listed"),
    [
        ("COMPLETE", lambda data: b"", False),
        ("COMPLETE", lambda data: b"0" * 30, False),
        ("COMPLETE", lambda data: b"0" * 200, False),
        ("COMPLETE", lambda data: bytes([data[0] ^ 1]) + data[1:], True),
        ("manifest.json", lambda data: bytes([data[0] ^ 1]) + data[1:], True),
    ],
)
def test_a_damaged_copy_is_none_or_is_told(
    store: Mirror, directory: Path, file: str, damage: Callable[[bytes], bytes], listed: bool
) -> None:
    name = copy(store, checkpoint(directory, 1))
    put(store, f"{name}/{file}", damage(contents(store, f"{name}/{file}")))
    if not listed:
        assert store.committed() == []
        return
    with pytest.raises(CheckpointError, match=rf"{store.url}.*{name}.*(damaged|another)"):
        store.manifest(name)


def test_what_was_committed_is_never_written_again(faulty: type[FaultyFileSystem], directory: Path) -> None:
    path = checkpoint(directory, 1)
    store = store_at("faulty://bucket/run")
    name = copy(store, path)
    faulty.calls.clear()
    assert copy(store, path) == name
    assert [call for call in faulty.calls if call[0] == "write"] == []


def test_two_incarnations_copy_the_same_step_side_by_side(store: Mirror, directory: Path) -> None:
    first, second = Incarnation(1, "job 7, restart 0"), Incarnation(2, "job 7, restart 1")
    old = checkpoint(directory, 10, first)
    new = checkpoint(directory, 10, second)
    assert new.name == "checkpoint_0000010.2"
    # One after the other has begun, the older one ends last.
    store.upload(old, sorted(FILES)[:2], first.order)
    newer = copy(store, new, second.order)
    store.upload(old, sorted(FILES)[2:], first.order)
    store.complete(old, first.order)
    older = copy_name(old, first.order)
    assert store.committed() == [older, newer]
    assert (store.manifest(older).incarnation, store.manifest(newer).incarnation) == (1, 2)
    # A run that has moved counts from the beginning: its copy of the step overwrites nothing either.
    moved = copy(store, checkpoint(directory.parent / "there", 10, Incarnation(1, "there")), 1)
    assert sorted([older, newer, moved]) == sorted(store.committed())
    assert (store.manifest(older).incarnation_label, store.manifest(moved).incarnation_label) == (first.label, "there")


def test_only_committed_checkpoints_are_copied(store: Mirror, directory: Path) -> None:
    path = checkpoint(directory, 10)
    (path / "COMPLETE").unlink()
    with pytest.raises(CheckpointError, match="COMPLETE"):
        store.upload(path, sorted(FILES), 1)
    with pytest.raises(CheckpointError):
        store.complete(path, 1)
    assert objects(store) == []


# ------------------------------------------------------------------------------------------ nothing in a store is trusted


@pytest.mark.parametrize("file", ["COMPLETE", "manifest.json", "../x", "a/b", "", ".hidden", "/etc/passwd"])
def test_only_files_of_a_checkpoint_are_copied(store: Mirror, directory: Path, tmp_path: Path, file: str) -> None:
    path = checkpoint(directory, 1)
    name = copy_name(path, 1)
    with pytest.raises(CheckpointError, match="not the name of a file"):
        store.upload(path, [file], 1)
    with pytest.raises(CheckpointError, match="not the name of a file"):
        store.download(name, tmp_path, {file: 1})


@pytest.mark.parametrize("name", ["", "..", "checkpoint_0000001", "checkpoint_0000001.1-1f0c9a3b/../x", "/tmp"])
def test_only_names_of_copies_are_read(store: Mirror, tmp_path: Path, name: str) -> None:
    for call in (
        lambda: store.manifest(name),
        lambda: store.manifest_bytes(name),
        lambda: store.download(name, tmp_path, {"shard": 1}),
    ):
        with pytest.raises(CheckpointError, match="not the name of a copy"):
            call()


def test_what_else_lies_there_is_neither_read_nor_removed(store: Mirror, directory: Path) -> None:
    name = copy(store, checkpoint(directory, 1))
    for other in ("notes/COMPLETE", "checkpoint_0000009/COMPLETE", f"{name}.bak/COMPLETE", "checkpoint_0000007.1-zz/x"):
        put(store, other, b"0" * 65)
        make_old(store, other.partition("/")[0], 30 * DAY)
    assert store.committed() == [name]
    before = objects(store)
    assert store.prune(Keep()) == []
    assert objects(store) == before


def test_a_copy_under_anothers_name_is_refused(store: Mirror, directory: Path) -> None:
    name = copy(store, checkpoint(directory, 1))
    digest = name[-8:]
    for other in (f"checkpoint_0000002.1-{digest}", f"checkpoint_0000001.1-{'0' * 8}"):
        for file in objects(store, name):
            put(store, f"{other}/{file}", contents(store, f"{name}/{file}"))
        with pytest.raises(CheckpointError, match="belongs to another checkpoint"):
            store.manifest(other)


def test_a_manifest_that_names_the_marker_as_a_file_is_refused(store: Mirror, directory: Path) -> None:
    path = checkpoint(directory, 1)
    text = (path / "manifest.json").read_bytes().replace(b'"index.bin"', b'"COMPLETE"')
    digest = hashlib.sha256(text).hexdigest()
    name = f"checkpoint_0000001.1-{digest[:8]}"
    put(store, f"{name}/manifest.json", text)
    put(store, f"{name}/COMPLETE", f"{digest}\n".encode())
    with pytest.raises(CheckpointError, match="'COMPLETE' is not the name of a file"):
        store.manifest(name)


def test_a_file_of_another_size_is_not_downloaded(store: Mirror, directory: Path, tmp_path: Path) -> None:
    name = copy(store, checkpoint(directory, 1))
    sizes = store.manifest(name).sizes
    put(store, f"{name}/index.bin", b"longer than before")
    with pytest.raises(CheckpointError, match=rf"{store.url}/{name}/index.bin has 18 bytes instead of 5"):
        store.download(name, tmp_path, sizes)


def test_a_copy_that_was_removed_meanwhile_is_missing(store: Mirror, directory: Path, tmp_path: Path) -> None:
    name = copy(store, checkpoint(directory, 1))
    sizes = store.manifest(name).sizes
    store._remove(name, recursive=True)
    with pytest.raises(MissingError, match=name):
        store.manifest(name)
    with pytest.raises(MissingError, match=name):
        store.download(name, tmp_path, sizes)


# ------------------------------------------------------------------------------------------------------ stores that fail


@pytest.mark.parametrize("call", ["write", "info", "ls", "read"])
@pytest.mark.parametrize("error", [OSError, TimeoutError, ConnectionResetError])
@pytest.mark.parametrize("first", [1, 2])
def test_a_store_that_recovers_is_asked_again(
    faulty: type[FaultyFileSystem], directory: Path, tmp_path: Path, call: str, error: type[OSError], first: int
) -> None:
    path = checkpoint(directory, 1)
    pauses: list[float] = []
    store = Mirror("faulty://bucket/run", sleep=pauses.append)
    faulty.fault = Failing(call, first=first, count=3, error=error)
    name = copy(store, path)
    (tmp_path / "back").mkdir()
    store.download(store.committed()[0], tmp_path / "back", store.manifest(name).sizes)
    assert {file.name: file.read_bytes() for file in (tmp_path / "back").iterdir()} == FILES
    assert len(pauses) == 3
    assert all(0.5 * 2**n <= pause <= 1.5 * 2**n for n, pause in enumerate(pauses))
    assert pauses[1] != 2 * pauses[0], "ranks do not try again all at once"


OF_A_PACKAGE = type("EndpointConnectionError", (Exception,), {"__module__": "botocore.exceptions"})


@pytest.mark.parametrize(
    ("call", "error", "told", "asked"),
    [
        ("write", TimeoutError, CheckpointError, 4),
        ("info", TimeoutError, CheckpointError, 4),
        ("write", OF_A_PACKAGE, CheckpointError, 4),
        ("write", PermissionError, CheckpointError, 1),  # trying again cannot help
        ("write", FileNotFoundError, CheckpointError, 1),
        ("write", AttributeError, AttributeError, 1),  # a bug
    ],
)
def test_a_store_that_never_recovers_is_one_sentence(
    faulty: type[FaultyFileSystem],
    directory: Path,
    call: str,
    error: type[BaseException],
    told: type[BaseException],
    asked: int,
) -> None:
    path = checkpoint(directory, 1)
    store = store_at("faulty://bucket/run")
    faulty.fault = failing = Failing(call, error=error)
    with pytest.raises(told) as caught:
        store.upload(path, ["index.bin"], 1)
    assert failing.seen == asked
    if isinstance(caught.value, CheckpointError):
        place = f"{store.url}/{copy_name(path, 1)}/{'index.bin' if call == 'write' else 'COMPLETE'}"
        often = "the store has failed 4 times: " if asked == 4 else ""
        assert caught.value.message.startswith(f"{place}: {often}") and "503 Slow Down" in caught.value.message
    faulty.fault = staticmethod(lambda call, path: None)
    assert store.committed() == []


def test_a_store_that_does_not_answer_is_not_taken_for_an_empty_one(
    faulty: type[FaultyFileSystem], directory: Path
) -> None:
    store = store_at("faulty://bucket/run")
    copy(store, checkpoint(directory, 1))
    for call in ("ls", "info"):
        faulty.fault = Failing(call)
        with pytest.raises(CheckpointError, match="failed 4 times"):
            store.committed()


def test_a_store_that_keeps_less_than_it_was_given_is_found_out(
    faulty: type[FaultyFileSystem], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint(directory, 1)
    store = store_at("faulty://bucket/run")
    honest = FaultyFileSystem.info

    def short(self: FaultyFileSystem, path: str, **options: Any) -> Any:
        found = honest(self, path, **options)
        return {**found, "size": found["size"] - 1} if path.endswith("index.bin") else found

    monkeypatch.setattr(FaultyFileSystem, "info", short)
    with pytest.raises(CheckpointError, match=r"index.bin: .* the store has 4 bytes instead of 5"):
        store.upload(path, ["index.bin"], 1)


def test_a_range_that_comes_short_is_fetched_again(
    faulty: type[FaultyFileSystem], directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_at("faulty://bucket/run")
    name = copy(store, checkpoint(directory, 1))
    whole, cuts = FaultyFileSystem.cat_file, iter([2, 0, 5])

    def cut(self: FaultyFileSystem, path: str, **options: Any) -> bytes:
        return whole(self, path, **options)[: next(cuts)]

    monkeypatch.setattr(FaultyFileSystem, "cat_file", cut)
    store.download(name, tmp_path, {"index.bin": 5})
    assert (tmp_path / "index.bin").read_bytes() == b"index"


def test_a_file_that_cannot_be_read_here_is_not_the_stores_fault(store: Mirror, directory: Path) -> None:
    path = checkpoint(directory, 1)
    (path / "index.bin").unlink()
    with pytest.raises(CheckpointError, match=rf"{path}/index.bin: No such file"):
        store.upload(path, ["index.bin"], 1)


# -------------------------------------------------------------------------------------------------------------- URLs


@pytest.mark.parametrize(
    ("url", "sentence", "hint"),
    [
        ("scratch/run", "is not a URL", ""),
        ("s3:/bucket/run", "is not a URL", ""),
        ("nowhere://bucket", "Protocol not known", ""),
        ("memory://", "names no folder", ""),
        ("file:///", "names no folder", ""),
        ("s3://bucket/run", "not installed", "pip install 's3fs'"),
        ("gs://bucket/run", "not installed", "pip install 'gcsfs'"),
    ],
)
def test_a_url_that_cannot_work_is_refused(monkeypatch: pytest.MonkeyPatch, url: str, sentence: str, hint: str) -> None:
    for package in ("s3fs", "gcsfs"):
        monkeypatch.setitem(sys.modules, package, None)  # importing it is an ImportError
    with pytest.raises(CheckpointError, match=sentence) as error:
        Mirror(url)
    assert error.value.hint and hint in error.value.hint


# ------------------------------------------------------------------------------------------------------------ removing


def test_the_best_stay_and_a_damaged_one_is_not_among_them(store: Mirror, directory: Path) -> None:
    losses = {10: 1.0, 20: 0.5, 30: 2.0, 40: 3.0, 50: 4.0}
    names = [copy(store, checkpoint(directory, step, metrics={"valid_loss": loss})) for step, loss in losses.items()]
    put(store, f"{names[1]}/manifest.json", b"{}")
    assert store.prune(Keep(last=2, best=1)) == [names[1], names[2]]
    assert store.committed() == [names[0], names[3], names[4]]


def test_what_need_not_be_kept_is_removed_and_copies_of_one_step_stay_or_go_together(
    store: Mirror, directory: Path
) -> None:
    names = [copy(store, checkpoint(directory, 10, Incarnation(order, f"{order}")), order) for order in (1, 2)]
    names += [copy(store, checkpoint(directory, step, Incarnation(2, "2")), 2) for step in (20, 30, 40)]
    assert store.prune(Keep(last=4)) == []
    assert store.prune(Keep(last=2), spare=[names[2]]) == names[:2]  # spared: the last one saved, after a step back
    assert store.committed() == names[2:]
    assert {name.partition("/")[0] for name in objects(store)} == set(names[2:])
    assert store.prune(Keep(last=2, every=20)) == []


def test_a_store_that_fails_while_it_removes_leaves_every_copy_whole_or_out_of_sight(
    faulty: type[FaultyFileSystem], directory: Path
) -> None:
    store = store_at("faulty://bucket/run")
    names = [copy(store, checkpoint(directory, step, metrics={"valid_loss": float(step)})) for step in (10, 20, 30, 40)]
    # It does not say which is the best; a marker cannot be removed; what lies behind the first marker cannot.
    for call, first, whole in (("read", 1, names), ("rm", 1, names), ("rm", 2, names[1:])):
        faulty.fault = Failing(call, first=first)
        with pytest.raises(CheckpointError, match="failed 4 times"):
            store.prune(Keep(last=2, best=1) if call == "read" else Keep(last=2))
        faulty.fault = staticmethod(lambda call, path: None)
        assert store.committed() == whole
        assert all(len(objects(store, name)) == len(FILES) + 2 for name in whole)
    assert len(objects(store, names[0])) == len(FILES) + 1
    make_old(store, names[0], 2 * DAY)
    assert store.prune(Keep(last=3)) == [names[0]]
    assert objects(store, names[0]) == []


def test_leftovers_go_after_a_day_and_an_upload_that_goes_on_stays(store: Mirror, directory: Path) -> None:
    left, going, done = (checkpoint(directory, step) for step in (10, 20, 30))
    for path in (left, going):
        store.upload(path, sorted(FILES)[:3], 1)
        make_old(store, copy_name(path, 1), 2 * DAY)
    store.upload(going, sorted(FILES)[3:4], 1)
    name = copy(store, done)
    make_old(store, name, 30 * DAY)
    assert store.prune(Keep()) == [copy_name(left, 1)]
    assert objects(store, copy_name(left, 1)) == []
    copy(store, going)
    assert store.committed() == [copy_name(going, 1), name]


def test_a_folder_that_an_upload_made_before_it_was_killed_goes_after_a_day(tmp_path: Path) -> None:
    store = store_at(f"file://{tmp_path}")
    empty = tmp_path / "checkpoint_0000010.1-1f0c9a3b"
    empty.mkdir()
    assert store.prune(Keep()) == []
    os.utime(empty, (time.time() - 2 * DAY,) * 2)
    assert store.prune(Keep()) == [empty.name]
    assert not empty.exists()


def test_damaged_ones_are_kept_out_of_sight_and_do_not_push_out_sound_ones(store: Mirror, directory: Path) -> None:
    sound, *bad = [copy(store, checkpoint(directory, step)) for step in (900, 1000, 1100)]
    for name in bad:
        store.set_aside(name, "index.bin is not what was written: its digest differs")
    assert store.committed() == [sound]
    assert store.damaged() == bad
    after = copy(store, checkpoint(directory, 950))
    for name in bad:
        make_old(store, name, 30 * DAY)
    assert store.prune(Keep(last=2)) == []
    assert store.committed() == [sound, after]
    assert [len(objects(store, name)) for name in bad] == [len(FILES) + 2] * 2


# ----------------------------------------------------------------------------------------------------------- manners


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


def test_an_upload_holds_no_more_than_blocks_of_a_file(tmp_path: Path, directory: Path) -> None:
    path = checkpoint(directory, 1)
    big = path / "index.bin"
    with open(big, "wb") as file:
        file.truncate(300 << 20)
    script = """
import resource, sys
from pathlib import Path
from slurmtrain.checkpoint.store.mirror import Mirror, copy_name
store, path, back = Mirror(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
store.upload(path, ["index.bin"], 1)
store.download(copy_name(path, 1), back, {"index.bin": 300 << 20})
sys.exit(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before > 150 << 10)
"""
    back = tmp_path / "back"
    back.mkdir()
    command = [sys.executable, "-c", script, f"file://{tmp_path}/store", str(path), str(back)]
    assert subprocess.run(command, timeout=120, check=False).returncode == 0
    assert (back / "index.bin").stat().st_size == 300 << 20
