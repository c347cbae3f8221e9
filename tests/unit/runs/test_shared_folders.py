"""Folders of runs are shared: reading never executes, writes or follows what another user has put there.

Verbs that change a run take the reader's own alone, and one bad run takes nobody's list down.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slurmtrain.checkpoint.format.blocks import write_file
from slurmtrain.checkpoint.store import commit
from slurmtrain.checkpoint.store.commit import claim
from slurmtrain.cli import main
from slurmtrain.errors import EXIT_CONFIG, EnvironmentMismatchError, UsageError
from slurmtrain.rank.attempt_context import rendezvous_directory
from slurmtrain.runs import lookup
from slurmtrain.runs.create import create_run_dir, make_folder
from slurmtrain.runs.reasons import Event
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.environment import Environment
from slurmtrain.system import files, records
from slurmtrain.system.files import inherit_group, own_user, user_in_words, write_json
from tests.support.fake_slurm import FakeSlurm
from tests.support.run_info import run_info
from tests.support.runs import no_waiting, printed, refused, shown
from tests.support.stranger import Stranger

Out = pytest.CaptureFixture[str]
Plant = Callable[..., RunDir]
Asked = Callable[[], list[str]]

INFO = run_info(job_ids=["4711"], config_hash="0", steps=5, workdir=".", submit_dir="/", version="1")


def write_run(path: Path, **facts: object) -> None:
    """A run that was submitted and whose job is gone, by whoever calls this."""
    (path / "attempts").mkdir(parents=True)
    (path / "checkpoints").mkdir()
    (path / "run.json").write_text(json.dumps({**INFO, "id": path.name, "created": time.time(), **facts}))
    (path / "config.yaml").write_text("cluster: {backend: slurm}\n")
    (path / "job.sbatch").write_text("#!/bin/bash\n")


@pytest.fixture
def shared(tmp_path: Path, stranger: Stranger, monkeypatch: pytest.MonkeyPatch, project: Path) -> Path:
    """A folder of runs that everybody can read and write, in which the verbs look."""
    root = stranger.folder / tmp_path.name
    root.mkdir()
    root.chmod(0o1777)
    monkeypatch.setenv("SLURMTRAIN_RUNS", str(root))
    return root


@pytest.fixture
def plant(shared: Path, stranger: Stranger) -> Plant:
    """A run that the second user has put there."""

    def planted(run_id: str = "20990101-000000-000aa", **facts: object) -> RunDir:
        path = shared / "theirs" / run_id
        stranger.does(lambda: write_run(path, **facts))
        return RunDir(path)

    return planted


@pytest.fixture
def mine(shared: Path) -> RunDir:
    path = shared / "mine" / "20200101-000000-000bb"
    write_run(path)
    return RunDir(path)


@pytest.fixture
def asked(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Which slurm.conf the commands of SLURM were run with, one line a command."""
    no_waiting(monkeypatch)
    return slurm.confs


@pytest.mark.parametrize(
    "words",
    [["status"], ["status", "20990101"], ["runs", "prune", "--dry-run"], ["logs", "20990101"]],
)
def test_a_slurm_conf_that_somebody_else_names_is_not_used(
    words: list[str], plant: Plant, stranger: Stranger, shared: Path, asked: Asked, capsys: Out
) -> None:
    """It names libraries that squeue would load."""
    conf = shared / "slurm.conf"
    stranger.does(lambda: conf.write_text("PluginDir=/tmp/evil\n"))
    plant(slurm_conf=str(conf))
    main(words)
    assert not [line for line in asked() if str(conf) in line]
    assert "Traceback" not in capsys.readouterr().err


def test_a_slurm_conf_of_ones_own_run_is_not_used_when_somebody_else_has_put_it_there(
    mine: RunDir, stranger: Stranger, shared: Path, asked: Asked
) -> None:
    """A sandbox in /tmp is gone after a reboot, and its place is anybody's."""
    conf = shared / "slurm.conf"
    stranger.does(lambda: conf.write_text("PluginDir=/tmp/evil\n"))
    mine.update_info(slurm_conf=str(conf))
    assert "not used, because it may be somebody else's work" in printed("status")
    assert main(["cancel", "last"]) != 0
    assert asked() == []


@pytest.fixture
def team(shared: Path, stranger: Stranger) -> Path:
    """A team's folder as the manual makes it."""
    folder = shared / "team"
    folder.mkdir()
    os.chown(folder, -1, stranger.gid)
    folder.chmod(0o3770)
    return folder


def test_reading_writes_nothing_into_a_run_of_somebody_else(plant: Plant, stranger: Stranger, asked: Asked) -> None:
    run = plant()

    def open_to_all() -> None:
        for path in (run.path, run.checkpoints, run.attempts):
            path.chmod(0o777)

    stranger.does(open_to_all)
    before = sorted(run.path.rglob("*"))
    for words in (["status"], ["status", run.id], ["runs", "prune", "--dry-run"]):
        main(words)
    assert asked()
    assert sorted(run.path.rglob("*")) == before


def test_an_event_is_appended_to_no_file_but_a_regular_one_of_ones_own(tmp_path: Path, stranger: Stranger) -> None:
    theirs = stranger.folder / "events"

    def make_it() -> None:
        theirs.touch()
        theirs.chmod(0o666)

    stranger.does(make_it)
    link, pipe, own = tmp_path / "link", tmp_path / "pipe", tmp_path / "own"
    link.symlink_to(own)
    os.mkfifo(pipe)
    for path in (theirs, link, pipe):
        with pytest.raises(OSError, match=r"regular file of yours|symbolic links|No such device"):
            records.append_line(path, "x\n")
    assert not own.exists()
    records.append_line(own, "x\n")
    assert own.read_text() == "x\n"


def test_a_run_of_somebody_else_is_neither_started_nor_changed(plant: Plant, asked: Asked) -> None:
    """Its script and its config would be run as whoever resumes it."""
    run = plant()
    for verb in ("resume", "cancel", "requeue", "preempt", "evaluate"):
        assert "only the user who submitted a run may change" in refused(verb, run.id)
    assert asked() == []


def test_last_is_ones_own_last_run_and_an_id_that_somebody_has_copied_means_ones_own(
    plant: Plant, shared: Path, stranger: Stranger, asked: Asked
) -> None:
    theirs = plant()
    told = refused("status", "last")
    assert "none of the runs" in told and "is yours" in told
    own = RunDir(shared / "mine" / "20200101-000000-000bb")
    write_run(own.path)
    link = theirs.path.with_name("20991231-000000-000cc")
    stranger.does(lambda: link.symlink_to(own.path))  # it would make an older run of one's own the last
    assert {each["path"] for each in shown("status")} == {str(own.path), str(theirs.path)}
    plant(own.id)
    for reference in ("last", own.id, own.id[:-1]):
        assert shown("status", reference)["path"] == str(own.path)


@pytest.mark.parametrize("part", ["attempts", "checkpoints", "evaluations"])
def test_a_part_that_somebody_has_linked_is_not_followed(
    part: str, plant: Plant, stranger: Stranger, tmp_path: Path, asked: Asked
) -> None:
    run = plant()

    def link() -> None:
        if (run.path / part).exists():
            (run.path / part).rmdir()
        (run.path / part).symlink_to(tmp_path)

    stranger.does(link)
    assert f"{part} is a link" in printed("status")
    assert f"{part} is a link" in refused("status", run.id)


def test_runs_and_checkpoints_of_somebody_else_are_not_pruned(
    plant: Plant, mine: RunDir, stranger: Stranger, asked: Asked
) -> None:
    run = plant()
    assert run.id not in printed("runs", "prune", "--dry-run")
    for where in (run.id, str(run.checkpoints)):
        if where != run.id:
            stranger.does(lambda: (run.checkpoints / "checkpoint_0000001").mkdir())
        assert "belongs to user" in refused("checkpoints", where, "prune")


def test_nothing_is_pruned_through_a_link(mine: RunDir, tmp_path: Path, asked: Asked) -> None:
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "checkpoint_0000001.tmp-1").mkdir(parents=True)
    mine.checkpoints.rmdir()
    mine.checkpoints.symlink_to(elsewhere)
    assert "removes nothing through a link" in refused("checkpoints", "last", "prune")
    os.utime(mine.info_file, (0, 0))
    main(["runs", "prune", "--state", "lost", "stopped"])
    assert list(elsewhere.iterdir())
    assert mine.path.exists()


def test_a_sweep_of_somebody_else_is_neither_gone_on_with_nor_cancelled(
    shared: Path, stranger: Stranger, asked: Asked
) -> None:
    def write() -> None:
        (shared / "x.sweep-1" / "arrays").mkdir(parents=True)
        info = {**INFO, "pack": 1, "parallelism": None, "after": [], "token": "t"}
        (shared / "x.sweep-1" / "sweep.json").write_text(json.dumps(info))
        (shared / "x.sweep-1" / "points.jsonl").touch()

    stranger.does(write)
    for action in ("retry", "cancel"):
        assert "only the user who submitted a sweep may change" in refused("sweep", action, "x.sweep-1")
        assert "is yours" in refused("sweep", action, "last")
    assert main(["sweep", "status", "x.sweep-1"]) == 0
    assert asked() == []


def test_nothing_is_submitted_where_somebody_else_could_replace_it(
    shared: Path, team: Path, stranger: Stranger, tmp_path: Path, slurm: FakeSlurm
) -> None:
    """They could put another run in the place of one's own, and the next attempt would run that."""

    def submit_in(root: Path) -> str:
        return refused("+cluster=a100x4", f"job.runs_dir={root}", "submit", code=EXIT_CONFIG)

    (tmp_path / "train").mkdir()
    (tmp_path / "train").chmod(0o777)
    assert "everybody can replace files in" in submit_in(tmp_path)
    (tmp_path / "train").chmod(0o1777)
    assert main(["+cluster=a100x4", f"job.runs_dir={tmp_path}", "submit"]) == 0
    team.chmod(0o2770)
    assert f"every member of its group can replace files in {team}" in submit_in(team)
    for name in ("train", f"train-{own_user()}"):
        stranger.does((shared / name).mkdir)
    assert f"belongs to user {stranger.name}, who can replace files in it" in submit_in(shared)
    os.chown(shared, stranger.uid, stranger.gid)
    assert f"{shared} belongs to user {stranger.name}" in submit_in(shared)
    assert len(slurm.jobs) == 1


def test_who_used_a_name_first_in_a_teams_folder_can_replace_nobody_elses_runs_of_it(
    team: Path, stranger: Stranger, asked: Asked, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner of a folder may rename what is in it, in spite of the sticky bit: the job would run their code."""
    monkeypatch.setenv("SLURMTRAIN_RUNS", str(team))
    stranger.does(lambda: create_run_dir(team, "train"), groups=[stranger.gid])
    words = ["+cluster=a100x4", f"job.runs_dir={team}"]
    dry = printed(*words, "submit", "--dry-run")
    assert main([*words, "submit"]) == 0
    waiting = Path(shown("status", "last")["path"])
    assert f"{waiting.parent}/" in dry and str(waiting) in slurm.submitted[0]

    def replace() -> None:
        for path in (waiting, waiting.parent):
            with pytest.raises(PermissionError):
                path.rename(path.with_name("aside"))
        with pytest.raises(PermissionError):
            (waiting.parent / "planted").mkdir()
        assert "train" in (waiting / "config.yaml").read_text()  # what the team may do is read

    stranger.does(replace, groups=[stranger.gid])
    assert json.loads((waiting / "run.json").read_text())["name"] == "train"


def test_sweeps_and_drills_are_made_where_somebody_else_in_the_team_cannot_replace_them(
    team: Path, stranger: Stranger, asked: Asked, slurm: FakeSlurm
) -> None:
    words = ["+cluster=a100x4", f"job.runs_dir={team}"]
    stranger.does(lambda: [make_folder(team, name) for name in (".preparing", "drills")], groups=[stranger.gid])
    assert main(["-m", *words, "train.seed=1,2", "submit"]) == 0
    assert len(slurm.jobs) == 1
    (sweep,) = team.glob("*.sweep-*")
    drill = make_folder(team, "drills", "20260101-000000")
    (made_in,) = team.glob(".preparing-*")

    def replace() -> None:
        for path in (sweep, made_in, drill.parent, drill):
            with pytest.raises(PermissionError):
                path.rename(path.with_name("aside"))

    stranger.does(replace, groups=[stranger.gid])


@pytest.mark.parametrize("verb", ["resume", "requeue", "evaluate", "supervise"])
def test_a_run_that_the_owner_of_the_teams_folder_has_replaced_is_not_continued(
    verb: str, team: Path, stranger: Stranger, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: Out
) -> None:
    """The owner of the folder of runs can move every folder in it; what they put in its place is theirs."""
    monkeypatch.setenv("SLURMTRAIN_RUNS", str(team))
    no_waiting(monkeypatch)
    assert main(["+cluster=a100x4", "requeue=resubmit", f"job.runs_dir={team}", "submit"]) == 0
    run = RunDir(Path(shown("status", "last")["path"]))
    run.attempt(run.new_attempt())
    os.chown(team, stranger.uid, -1)

    def replace() -> None:
        run.path.parent.rename(team / "aside")
        shutil.copytree(team / "aside", run.path.parent, ignore=shutil.ignore_patterns("submitit"))
        with run.script.open("a") as script:
            script.write("touch planted\n")

    stranger.does(replace, groups=[stranger.gid])
    monkeypatch.setenv("SLURM_JOB_ID", slurm.jobs[0]["id"])
    assert main([verb, str(run.path)]) != 0
    assert f"belongs to user {stranger.name}: only the user who submitted a run may" in capsys.readouterr().err
    assert len(slurm.jobs) == 1
    done = slurm.run(slurm.jobs[0]["id"])  # its script looks before it starts anything of the run
    assert done.returncode == 78 and "or its code is not yours" in done.stdout and not slurm.calls("srun")


def test_in_a_teams_folder_each_adds_runs_reads_what_is_shared_and_changes_what_is_theirs(
    team: Path, stranger: Stranger, asked: Asked
) -> None:
    own = create_run_dir(team, "llama")
    write_json(own.info_file, {**INFO, "id": own.id})
    theirs = team / f"llama-{stranger.name}" / "20990101-000000-000aa"

    def add_and_share() -> None:
        assert create_run_dir(team, "llama").path.parent == theirs.parent
        write_run(theirs)
        with pytest.raises(PermissionError):
            own.path.rename(theirs.parent / "mine-now")
        with pytest.raises(PermissionError):
            (own.path / "planted").touch()
        assert {"attempts", "checkpoints", "run.json"} <= set(os.listdir(own.path))

    stranger.does(add_and_share, groups=[stranger.gid])
    assert main(["status", str(theirs)]) == 0
    assert main(["cancel", str(theirs)]) == 2
    assert [run.id for run in lookup.all_runs(team)] == [own.id, theirs.name]
    assert lookup.find("last", team).path == own.path


def test_ranks_started_by_hand_in_a_teams_folder_meet_where_only_their_user_can_write(
    team: Path, stranger: Stranger
) -> None:
    """Each of the team has a folder for that; one that somebody else has made ready would give them the ranks."""
    step = Environment("slurm", world_size=2, job_id="17", step_id="0")
    found = rendezvous_directory(None, step, team)
    assert found is not None and found.is_dir()
    stranger.does(lambda: rendezvous_directory(None, step, team), groups=[stranger.gid])
    mine = team / f".meetings-{os.geteuid()}"
    shutil.rmtree(mine)
    stranger.does(mine.mkdir, groups=[stranger.gid])
    with pytest.raises(EnvironmentMismatchError, match="not a folder that only you can write to"):
        rendezvous_directory(None, step, team)


def read_all(path: Path) -> None:
    """Read each file below a folder. Raises: OSError: one of them, or a folder, cannot be read."""

    def refuse(error: OSError) -> None:
        raise error

    for folder, _, names in os.walk(path, onerror=refuse):
        for name in names:
            Path(folder, name).read_bytes()


def test_in_a_teams_folder_the_team_reads_every_attempt_and_checkpoint_of_a_run_and_nobody_else_does(
    team: Path, stranger: Stranger, project: Path, capsys: Out
) -> None:
    (project / "train.py").touch()
    (project / "train.py").chmod(0o666)  # as a umask of 0 leaves it
    words = ["+cluster=local", f"job.runs_dir={team}", "job.snapshot=cwd", "requeue.max_attempts_without_progress=2"]
    assert main([*words, "submit", "--", "bash", "-c", "echo crash; exit 1"]) == 1
    (run,) = lookup.all_runs(team)
    assert run.attempt_numbers() == [1, 2]
    incarnation = claim(run.checkpoints, None)
    saving = commit.begin(run.checkpoints, 1, incarnation)
    write_file(saving / "rank-0.safetensors", memoryview(b"weights"))
    files.write_new(saving / "manifest.json", b"{}")
    run.update_info(steps=3)

    def look() -> None:
        read_all(run.path)
        assert main(["status", str(run.path)]) == 0
        assert main(["logs", str(run.path), "--attempt", "2"]) == 0
        for path in (run.path, run.attempt(2).path, saving):
            with pytest.raises(PermissionError):
                (path / "planted").touch()

    stranger.does(look, groups=[stranger.gid])
    assert "crash" in capsys.readouterr().out
    assert not run.path.stat().st_mode & 0o027
    files_of_it = (run.code / "train.py", run.script, run.config_file, run.info_file)
    for path in (run.code, *files_of_it, run.attempt(2).path, saving):
        assert not path.stat().st_mode & 0o022, path


@pytest.mark.skipif(os.geteuid() != 0, reason="another group of one's own is needed")
def test_what_is_copied_into_a_teams_folder_is_the_teams_and_what_is_private_stays_so(
    team: Path, stranger: Stranger
) -> None:
    """A copied folder loses the setgid bit, and what is made in it afterwards would have the group of the user alone."""
    code, original = create_run_dir(team, "llama").path / "code", team.parent / "original"
    code.mkdir(mode=0o750)
    (original / "a").mkdir(parents=True)
    for name, mode in (("a", 0o750), ("a/c.py", 0o640), ("a/netrc", 0o600)):
        (original / name).touch()
        (original / name).chmod(mode)
        os.chown(original / name, -1, os.getgid())
    shutil.copytree(original, code / "package")
    inherit_group(code)
    (code / "package" / "a" / "later").touch()

    def look() -> None:
        assert (code / "package" / "a" / "c.py").read_bytes() == b""
        with pytest.raises(PermissionError):
            (code / "package" / "a" / "netrc").read_bytes()
        assert os.stat(code / "package" / "a" / "later").st_gid == stranger.gid

    stranger.does(look, groups=[stranger.gid])


def test_a_run_of_ones_own_is_private_whatever_the_umask(project: Path) -> None:
    before = os.umask(0o022)
    try:
        run = create_run_dir(project / "runs", "train")
        write_json(run.info_file, INFO)
        run.event(Event.SUBMITTED)
        run.attempt(run.new_attempt())
        modes = {path.stat().st_mode & 0o077 for path in [run.path, *run.path.rglob("*")]}
    finally:
        os.umask(before)
    assert modes == {0}


def sparse_terabyte(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


BAD: dict[str, Callable[[Path], object]] = {
    "not UTF-8": lambda path: path.write_bytes(b'{"name": "\xff"}'),
    "deep": lambda path: path.write_text("[" * 100_000),
    "of other types": lambda path: path.write_text(json.dumps({**INFO, "job_ids": {"a": 1}, "created": "now"})),
    "a time that no calendar knows": lambda path: path.write_text(json.dumps({**INFO, "created": 1e300})),
    "a pipe": lambda path: os.mkfifo(path),
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a terabyte": sparse_terabyte,
}


def test_a_bad_run_is_a_row_and_takes_nobodys_list_down(
    plant: Plant, mine: RunDir, stranger: Stranger, asked: Asked, capsys: Out
) -> None:
    runs = {kind: plant(f"20990101-000000-{number:03d}aa") for number, kind in enumerate(BAD)}

    def spoil() -> None:
        for kind, run in runs.items():
            run.info_file.unlink()
            BAD[kind](run.info_file)

    stranger.does(spoil)
    for words in (["status"], ["runs", "prune", "--dry-run"], ["status", "--json"]):
        out = printed(*words)
        assert mine.id in out or words[1:2] == ["prune"]
        if "prune" not in words:
            assert out.count("unreadable") >= len(BAD)
    for kind, run in runs.items():
        for verb in ("status", "logs", "resume"):
            assert main([verb, run.id]) == 2, (kind, verb)
    assert "Traceback" not in capsys.readouterr().err


def test_who_is_not_of_the_team_hears_that_its_folder_cannot_be_read_and_whose_it_is(
    stranger: Stranger, shared: Path
) -> None:
    """Not that it holds no runs."""
    shared.chmod(0o2770)

    def look() -> None:
        for reference in ("last", "2026", str(shared)):
            with pytest.raises(UsageError, match=rf"^{shared} cannot be read: it belongs to {user_in_words(0)}\n"):
                lookup.find(reference, shared)

    stranger.does(look)
