"""The folder of a node that holds the copy of the newest state."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from slurmtrain.checkpoint import node_folder
from slurmtrain.checkpoint.checkpointer import Checkpointer
from slurmtrain.checkpoint.errors import NodeFolderError
from slurmtrain.checkpoint.node_folder import DEAD_S, NodeFolder
from slurmtrain.checkpoint.save import staging
from slurmtrain.system.files import write_json


def folder_of(root: Path, run_id: str = "run") -> NodeFolder:
    return NodeFolder(root, root / "checkpoints", run_id)


@pytest.mark.parametrize("trap", ["everybody may enter", "a link"])
def test_a_folder_that_somebody_else_has_made_is_not_used(tmp_path: Path, trap: str) -> None:
    folder = folder_of(tmp_path)
    there = folder.path.parent
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
            write_json(run / "owner.json", owner | in_container)
        if name != "young":
            long_ago = run.stat().st_mtime - 2 * DEAD_S
            os.utime(run, (long_ago, long_ago))
    folder_of(tmp_path, "next").open()
    assert sorted(run.name.partition("-")[0] for run in user.iterdir()) == ["contained", "live", "next", "young"]


def test_runs_of_one_name_in_two_places_have_two_folders(tmp_path: Path) -> None:
    one, other = (NodeFolder(tmp_path, Path(place) / "checkpoints", "run").path for place in ("/one", "/other"))
    assert one != other
    strange = NodeFolder(tmp_path, tmp_path, "../../etc").path
    assert strange.parent.parent == tmp_path


def test_copies_and_the_buffer_for_writing_have_to_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gb, folder = 10**9, folder_of(tmp_path)
    folder.open()
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=10 * gb, f_frsize=1))
    folder.check_room(4 * gb, 2, 0)
    with pytest.raises(NodeFolderError, match=r"has 10\.00 GB left for copies of checkpoints: 2 of 6\.00 GB"):
        folder.check_room(6 * gb, 2, 0)
    monkeypatch.setattr(node_folder, "MEMORY", tmp_path)  # as of a folder in /dev/shm
    monkeypatch.setattr(staging, "available_memory", lambda: 8 * gb)
    folder.check_room(3 * gb, 2, 1 * gb)
    with pytest.raises(NodeFolderError, match=r"is memory of this job, which has 8\.00 GB left"):
        folder.check_room(3 * gb, 2, 3 * gb)


@pytest.mark.parametrize("ending", ["a last save", "an error"])
def test_a_copy_that_is_being_made_is_given_up_for_a_last_save_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    gate = threading.Event()
    monkeypatch.setattr(NodeFolder, "check_room", lambda *sizes: gate.wait(20))
    checkpointer = Checkpointer(tmp_path / "checkpoints", local=tmp_path)
    checkpointer.save(1, model=torch.nn.Linear(2, 2)).result()
    if ending == "a last save":
        checkpointer.hurry()
    threading.Timer(0.1, gate.set).start()
    checkpointer.close(20) if ending == "an error" else checkpointer.remove_newer(1)  # which waits for the thread, too
    assert bool([*tmp_path.glob("slurmtrain-*/*/*/rank00000.safetensors")]) == (ending == "an error")


def test_a_folder_that_was_cleaned_up_is_made_again_and_one_without_room_for_links_is_not_read(tmp_path: Path) -> None:
    folder, names = folder_of(tmp_path), ["rank00000.safetensors", "rank00001.safetensors"]
    folder.write("1", names[0], memoryview(b"x"), 1)
    assert folder.view(tmp_path, "1", names) == folder.path / "1"
    (folder.path / "1" / names[1]).unlink()
    (folder.path / "1" / names[1]).mkdir()  # where no link can be made
    assert folder.view(tmp_path, "1", names) is None
