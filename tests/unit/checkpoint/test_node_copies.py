"""Copies on the nodes, without ranks: who sends what to whom, which copies count, and the folder of one node."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from slurmtrain.checkpoint.node_copies import copies as copies_module
from slurmtrain.checkpoint.node_copies.copies import NodeCopies
from slurmtrain.checkpoint.node_copies.folder import DEAD_S, NodeFolder, file_system_of, remove_run, run_folder
from slurmtrain.checkpoint.node_copies.lineage import (
    Lineage,
    Mark,
    begin_lineage,
    counts,
    newest_durable,
    read_lineage,
)
from slurmtrain.checkpoint.node_copies.transfer import Transfer, ring, to_neighbours
from slurmtrain.checkpoint.ranks import RankGroup
from slurmtrain.checkpoint.store.fencing import Incarnation, claim
from slurmtrain.checkpoint.store.shared_directory import CheckpointIdentity
from slurmtrain.errors import NodeFolderError, SupersededError
from slurmtrain.system.files import write_json

# Who sends what to whom.


@pytest.mark.parametrize(
    ("nodes", "targets"),
    [
        ("a", [None]),
        ("aaa", [None, None, None]),
        ("ab", [1, 0]),
        ("aabbcc", [2, 3, 4, 5, 0, 1]),
        ("aaab", [3, 3, 3, 0]),
        ("abab", [1, 0, 3, 2]),  # ranks in a cyclic distribution
    ],
)
def test_every_rank_sends_its_file_to_the_next_node(nodes: str, targets: list[int | None]) -> None:
    assert ring(nodes) == targets


def test_all_blocks_of_every_file_are_sent_once() -> None:
    block = 16 << 20
    found = to_neighbours("ab", ["x", "y"], {"x": 2 * block + 1, "y": 5})
    assert found == [Transfer(0, 1, "x", 0), Transfer(1, 0, "y", 0), Transfer(0, 1, "x", 1), Transfer(0, 1, "x", 2)]
    assert to_neighbours("aa", ["x", "y"], {"x": 1, "y": 1}) == []


# Which copies count.


@pytest.mark.parametrize(
    ("mark", "newest", "counted"),
    [
        (Mark("now", "checkpoint_0000010"), "checkpoint_0000010", True),
        (Mark("now", None), None, True),
        (Mark("before", None), None, False),  # an attempt has gone on from something else
        (Mark("now", "checkpoint_0000010"), "checkpoint_0000020", False),  # the run has gone on
        (Mark("now", "checkpoint_0000010"), "checkpoint_0000005", False),  # somebody has gone back
        (Mark("now", "checkpoint_0000010"), None, False),
    ],
)
def test_a_copy_counts_if_the_run_goes_on_from_where_it_was_made(mark: Mark, newest: str | None, counted: bool) -> None:
    assert counts(mark, "digest", Lineage("now"), newest) is counted


def test_the_copy_that_was_restored_counts_until_there_is_another() -> None:
    assert counts(Mark("before", None), "digest", Lineage("now", base="digest"), None)
    assert not counts(Mark("before", None), "another", Lineage("now", base="digest"), None)


def test_each_attempt_makes_the_copies_of_before_void_and_an_older_one_cannot(tmp_path: Path) -> None:
    assert read_lineage(tmp_path) is None
    first, second = Incarnation(1), Incarnation(2)
    claim(tmp_path, first)
    of_first = begin_lineage(tmp_path, first, None)
    assert read_lineage(tmp_path) == of_first
    claim(tmp_path, second)
    with pytest.raises(SupersededError):
        begin_lineage(tmp_path, first, "digest")
    of_second = begin_lineage(tmp_path, second, "digest")
    assert read_lineage(tmp_path) == of_second != of_first
    (tmp_path / ".node-copies.json").write_text("{")
    assert read_lineage(tmp_path) is None
    assert newest_durable(tmp_path) is None


# The folder of one node.


def folder_of(root: Path, run_id: str = "run") -> NodeFolder:
    return NodeFolder(root, run_folder(root, root / "checkpoints", run_id), "node1", order=1)


def test_the_folder_is_for_nobody_else_and_nothing_of_it_stays(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    folder.open()
    for path in (folder.path, folder.path.parent, folder.path.parent.parent):
        assert path.stat().st_mode & 0o777 == 0o700
    assert folder.path.parent.parent.name == f"slurmtrain-{os.geteuid()}"
    folder.remove()
    assert list(tmp_path.iterdir()) == []
    folder.open()
    remove_run(tmp_path, tmp_path / "checkpoints", "run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("trap", ["everybody may enter", "a link"])
def test_a_folder_that_somebody_else_has_made_is_not_used(tmp_path: Path, trap: str) -> None:
    folder = folder_of(tmp_path)
    there = folder.path.parent.parent
    if trap == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        there.symlink_to(tmp_path / "elsewhere")
    else:
        there.mkdir()
        there.chmod(0o777)
    with pytest.raises(NodeFolderError, match="not your own folder with mode 0700"):
        folder.open()


def test_a_place_that_is_not_there_is_said_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(NodeFolderError, match=r"has no folder .*nvme.* \(checkpoint\.local\)"):
        folder_of(tmp_path / "nvme").open()


def test_the_folders_of_dead_runs_are_removed_and_those_of_live_and_young_ones_stay(tmp_path: Path) -> None:
    for name in ("dead", "young", "live", "contained"):
        folder_of(tmp_path, name).open()
    ended = subprocess.Popen(["true"])
    ended.wait()
    user = tmp_path / f"slurmtrain-{os.geteuid()}"
    for run in user.iterdir():
        name = run.name.partition("-")[0]
        if name != "live":  # "contained" is at work in a container of this host, where its pid is another one
            owner = {"host": os.uname().nodename, "pid": ended.pid, "born": "1"}
            in_container = {"namespace": "pid:[1]"} if name == "contained" else {}
            write_json(run / "node1" / "owner.json", owner | in_container)
        if name != "young":
            long_ago = run.stat().st_mtime - 2 * DEAD_S
            os.utime(run / "node1", (long_ago, long_ago))
    folder_of(tmp_path, "next").open()
    assert sorted(run.name.partition("-")[0] for run in user.iterdir()) == ["contained", "live", "next", "young"]


def test_runs_of_one_name_in_two_places_have_two_folders(tmp_path: Path) -> None:
    one, other = (run_folder(tmp_path, Path(place) / "checkpoints", "run") for place in ("/one", "/other"))
    assert one != other
    strange = run_folder(tmp_path, tmp_path, "../../etc")
    assert strange.parent.parent == tmp_path


MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
23 22 0:5 / /dev rw,nosuid shared:2 - devtmpfs udev rw
24 23 0:20 / /dev/shm rw,nosuid,nodev shared:3 - tmpfs tmpfs rw
25 22 0:41 / /mnt/local\\040disk rw - xfs /dev/nvme0n1 rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/dev/shm/x", "tmpfs"), ("/dev/shmx", "devtmpfs"), ("/mnt/local disk/x", "xfs"), ("/home", "ext4")],
)
def test_the_file_system_of_a_folder_is_the_innermost_that_is_mounted(path: str, kind: str) -> None:
    assert file_system_of(Path(path), MOUNTS) == kind


@pytest.fixture
def node_copies(tmp_path: Path) -> NodeCopies:
    claim(tmp_path / "checkpoints", Incarnation(1))
    (tmp_path / "disk").mkdir()
    identity = CheckpointIdentity(tmp_path / "checkpoints", Incarnation(1), "run", {})
    return NodeCopies(RankGroup(None), identity, tmp_path / "disk", ["node1"])


def test_copies_that_do_not_fit_are_refused_before_the_first_step(
    node_copies: NodeCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = RankGroup(None)
    monkeypatch.setattr(NodeFolder, "free_bytes", lambda self: 10 * 10**9)
    node_copies.expect(alone, 4 * 10**9, 0)
    with pytest.raises(NodeFolderError, match=r"has 10\.00 GB left for copies of checkpoints: 2 of 6\.00 GB"):
        node_copies.expect(alone, 6 * 10**9, 0)
    node_copies.expect(alone, 6 * 10**9, None)  # while training goes on, the next copy is left out instead
    node_copies.check_room()


def test_copies_in_memory_and_the_copy_for_writing_together_have_to_fit_into_the_jobs_memory(
    node_copies: NodeCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = RankGroup(None)
    monkeypatch.setattr(NodeFolder, "free_bytes", lambda self: 100 * 10**9)
    monkeypatch.setattr(copies_module, "available_memory", lambda: 10 * 10**9)
    node_copies.expect(alone, 6 * 10**9, 0)  # on a disk
    monkeypatch.setattr(NodeFolder, "in_memory", True)
    node_copies.expect(alone, 3 * 10**9, 3 * 10**9)
    with pytest.raises(NodeFolderError, match=r"is memory of this job, which has 10\.00 GB left"):
        node_copies.expect(alone, 3 * 10**9, 5 * 10**9)
