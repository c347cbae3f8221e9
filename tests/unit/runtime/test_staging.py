"""Copies on the nodes (cluster.stage): what is copied, what is refused, which nodes use theirs, and how ranks find them."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import subprocess
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurmtrain.cli.batch.stage import look
from slurmtrain.config.compose import compose
from slurmtrain.config.validate import validate
from slurmtrain.errors import ConfigError
from slurmtrain.launch.named_paths import with_absolute_paths
from slurmtrain.runs.attempt_dir import AttemptDir
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runs.stage_record import (
    LINE_BYTES,
    Item,
    NodeReport,
    Plan,
    progress,
    read_plan,
    read_reports,
    refused_nodes,
    write_plan,
    write_refusal,
)
from slurmtrain.runtime.staging import copying, environment
from slurmtrain.runtime.staging.copying import copy_tree, unpack
from slurmtrain.runtime.staging.environment import PythonEnvironment, archive_of, digest_of
from slurmtrain.runtime.staging.judge import judge
from slurmtrain.runtime.staging.node import LiveJobs, remove_left_over, stage_node
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.slurm.job_facts import JobFacts
from slurmtrain.system.file_systems import Mount
from slurmtrain.system.node_copies import shared_interpreter, with_copies, without_copies

SHARED = Mount("/", "lustre")


def local(folder: Path) -> Mount | None:
    return Mount("/", "ext4")


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A snapshot with a link to a file elsewhere, and one to a folder within."""
    code = tmp_path / "run" / "code"
    (code / "sub").mkdir(parents=True)
    (code / "train.py").write_text("print()")
    (code / "sub" / "helper.py").write_text("x = 1")
    (tmp_path / "elsewhere").write_text("text")
    (code / "notes").symlink_to(tmp_path / "elsewhere")
    (code / "again").symlink_to("sub")
    return code


def plan_of(code: Path, **changes: object) -> Plan:
    items = (Item("code", str(code), 20, copy_tree(code, None)),)
    return dataclasses.replace(Plan(items, ("n0", "n1"), ("code/sub", "code"), "code/sub"), **changes)  # type: ignore[arg-type]


# The copies of a node.


def test_a_copy_has_all_files_and_the_ranks_import_from_it_first(code: Path, tmp_path: Path) -> None:
    folder = tmp_path / "slurmtrain-stage-1" / "c-7-0"
    report = stage_node(plan_of(code), folder, "n0", mount=local)
    assert report.error is None
    copy = folder / "n0" / "code"
    assert (copy / "notes").read_text() == "text" and not (copy / "notes").is_symlink()
    assert (copy / "again").readlink() == Path("sub")
    assert (copy / "train.py").stat().st_mtime_ns == (
        code / "train.py"
    ).stat().st_mtime_ns  # or compiled files would be stale
    shown = subprocess.run(
        ["bash", "-c", f'. "{folder}/n0/use"; echo "$PYTHONPATH|$SLURMTRAIN_CODE|$SLURMTRAIN_SHARED_PYTHONPATH"'],
        env={"PYTHONPATH": "/shared"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout == f"{copy}/sub:{copy}:/shared|{copy}/sub|/shared\n"


def test_without_a_sound_copy_nothing_is_left_that_ranks_could_use(code: Path, tmp_path: Path) -> None:
    folder = tmp_path / "slurmtrain-stage-1" / "c-7-0"
    plan = plan_of(code)
    (code / "train.py").write_text("changed")
    changed = stage_node(plan, folder, "n0", mount=local)
    assert changed.error is not None and f"{code} was read here with the digest" in changed.error
    assert list(folder.iterdir()) == []  # what nobody uses takes no room
    gone = dataclasses.replace(plan, items=(Item("data/x", str(tmp_path / "gone"), 1),))
    assert str(stage_node(gone, folder, "n1", mount=local).error).endswith("gone: No such file or directory")
    large = dataclasses.replace(plan, items=(dataclasses.replace(plan.items[0], size_bytes=10**18),))
    said = str(stage_node(large, folder, "n2", mount=local).error)
    assert said.startswith(f"1000000000.00 GB are to be copied to {tmp_path}, which has ")
    shared = stage_node(plan, folder, "n3", mount=lambda _: SHARED)
    assert shared.error == f"{tmp_path} is no folder of the node: it is lustre, which nodes share"
    assert list(folder.glob("*/use")) == []


def test_what_python_compiles_meanwhile_changes_no_digest_and_is_not_copied(code: Path, tmp_path: Path) -> None:
    plan = plan_of(code)
    (code / "sub" / "__pycache__").mkdir()
    (code / "sub" / "__pycache__" / "helper.pyc").write_text("compiled")
    folder = tmp_path / "slurmtrain-stage-1" / "c-7-0"
    assert stage_node(plan, folder, "n0", mount=local).error is None
    assert not (folder / "n0" / "code" / "sub" / "__pycache__").exists()
    assert copying.size_of(code) == sum(len(text) for text in ("print()", "x = 1", "text"))


def test_copies_in_memory_are_told_and_refused_where_the_job_has_too_little(code: Path, tmp_path: Path) -> None:
    folder, plan = tmp_path / "slurmtrain-stage-1" / "c-7-0", plan_of(code)

    def staged(node: str, left: int) -> NodeReport:
        return stage_node(plan, folder, node, mount=lambda _: Mount("/", "tmpfs"), memory=lambda: left)

    assert str(staged("n0", plan.size_bytes - 1).error).endswith("which is memory of the job, and it has 0.00 GB left")
    report = staged("n1", plan.size_bytes)
    assert report.error is None and report.in_memory
    assert judge(dataclasses.replace(plan, nodes=("n1",)), {"n1": report}).in_memory == ("n1",)
    assert not stage_node(plan, folder, "n2", mount=local, memory=lambda: 0).in_memory


@pytest.mark.parametrize(("mode", "refused"), [(0o777, True), (0o1777, False), (0o755, False)])
def test_a_folder_that_others_could_put_another_in_place_of_is_not_used(
    code: Path, tmp_path: Path, mode: int, refused: bool
) -> None:
    (tmp_path / "scratch" / "me").mkdir(parents=True)
    (tmp_path / "scratch").chmod(mode)
    report = stage_node(plan_of(code), tmp_path / "scratch" / "me" / "slurmtrain-stage-1" / "c-7-0", "n0", mount=local)
    assert (report.error is not None) is refused
    if refused:
        assert f"they can write to {tmp_path}/scratch, which has no sticky bit" in str(report.error)


def test_a_folder_that_others_can_write_to_is_not_used(code: Path, tmp_path: Path) -> None:
    (tmp_path / "slurmtrain-stage-1").mkdir()
    (tmp_path / "slurmtrain-stage-1").chmod(0o777)
    report = stage_node(plan_of(code), tmp_path / "slurmtrain-stage-1" / "c-7-0", "n0", mount=local)
    assert report.error is not None and "is not a folder that only its owner" in report.error


def test_what_jobs_that_have_ended_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    kept, gone = ("c-7-1", "c-8-0", "other-9-0", "notes", "c-10-0"), ("c-7-0", "c-9-0")
    for name in (*kept, *gone):
        (tmp_path / name / "n0").mkdir(parents=True)
        os.utime(tmp_path / name, (1000, 1000))
    os.utime(tmp_path / "c-10-0", (2000, 2000))  # its job has started after SLURM was asked
    jobs = LiveJobs(2000.0, ("7", "8"))
    assert LiveJobs.parse(str(jobs)) == jobs
    remove_left_over(tmp_path / "c-7-1", jobs)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)


def test_before_the_nodes_copy_slurm_is_asked_for_live_jobs_and_whether_this_one_is_to_stop(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Says(SlurmClient):
        facts: JobFacts | None = JobFacts("RUNNING", start_time=5.0)

        def job(self, job_id: str) -> JobFacts | None:
            return self.facts

        def live_jobs(self) -> list[str]:
            return ["7", "8"]

    client = Says()
    assert look(client, "7") == 0
    assert LiveJobs.parse(capsys.readouterr().out).ids == ("7", "8")
    for client.facts in (JobFacts("RUNNING", start_time=5.0, preempt_time=6.0), JobFacts("COMPLETING")):
        assert look(client, "7") == 75
    client.facts = None  # SLURM does not know it, or does not answer: that is no word to stop
    assert look(client, "7") == 0


# The environment.


def fake_environment(prefix: Path) -> PythonEnvironment:
    (prefix / "bin").mkdir(parents=True)
    (prefix / "lib").mkdir()
    (prefix / "lib" / "package.py").write_text("x = 1")
    (prefix / "bin" / "python").symlink_to("/usr/bin/env")
    (prefix / "bin" / "python3").symlink_to(prefix / "bin" / "python")
    (prefix / "bin" / "tool").write_text(f"#!{prefix}/bin/python\nprint()\n")
    return PythonEnvironment(prefix, "bin/python")


def test_an_environment_is_packed_once_and_again_when_it_has_changed(tmp_path: Path) -> None:
    made = fake_environment(tmp_path / "environment")
    archives = tmp_path / "archives"
    first = archive_of(made, archives)
    assert archive_of(made, archives) == first and os.listdir(archives) == [first.name]
    (made.prefix / "lib" / "package.py").write_text("x = 22")
    second = archive_of(made, archives)
    assert second != first and digest_of(second) != digest_of(first)
    os.utime(first, (0, 0))  # no job has used it for a long time
    (made.prefix / "lib" / "package.py").write_text("x = 333")
    third = archive_of(made, archives)
    assert sorted(os.listdir(archives)) == sorted([second.name, third.name])


def test_conda_itself_is_not_packed_with_its_base_environment(tmp_path: Path) -> None:
    made = fake_environment(tmp_path / "environment")
    for folder in ("pkgs/numpy", "envs/other/lib", "lib/pkgs"):
        (made.prefix / folder).mkdir(parents=True)
        (made.prefix / folder / "file").write_text("x")
    # As conda does it from one file system to another.
    (made.prefix / "lib" / "linked").symlink_to("../pkgs/numpy/file")

    def packed() -> set[str]:
        archive = archive_of(made, tmp_path / "archives")
        with tarfile.open(archive) as content:
            linked = content.getmember("lib/linked").linkname
            assert linked == (
                "../pkgs/numpy/file" if "pkgs/numpy/file" in content.getnames() else f"{made.prefix}/pkgs/numpy/file"
            )
            return set(content.getnames())

    elsewhere = {"pkgs/numpy/file", "envs/other/lib/file"}
    assert elsewhere <= packed()
    (made.prefix / "conda-meta").mkdir()
    assert not elsewhere & packed() and "lib/pkgs/file" in packed()
    key = environment.key_of(made.prefix)
    (made.prefix / "envs" / "other" / "lib" / "file").write_text("another environment has changed")
    assert environment.key_of(made.prefix) == key


def test_an_environment_with_a_folder_that_cannot_be_read_is_not_packed_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, scandir = fake_environment(tmp_path / "environment"), os.scandir

    def deny(path: str) -> object:
        if str(path).endswith("/lib"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", deny)
    with pytest.raises(ConfigError, match=r"environment/lib cannot be read: Permission denied"):
        archive_of(made, tmp_path / "archives")


def test_evaluations_use_the_archive_of_their_run(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "runs" / "train" / "id")
    assert run.environments == tmp_path / "runs" / f".environments-{os.getuid()}"
    assert run.evaluation(7).environments == run.environments


def test_what_python_compiles_makes_no_other_archive_and_may_vanish_while_it_is_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = fake_environment(tmp_path / "environment")
    key = environment.key_of(made.prefix)
    compiled = made.prefix / "lib" / "__pycache__"
    compiled.mkdir()
    for name in ("package.pyc", "package.pyc.140"):
        (compiled / name).write_text("compiled")
    assert environment.key_of(made.prefix) == key
    walk = os.walk

    def walk_and_remove(top: Path, onerror: object) -> Iterator[tuple[str, list[str], list[str]]]:
        for folder, folders, names in walk(top):
            for name in names:
                if name in vanishing:
                    Path(folder, name).unlink()
            yield folder, folders, names

    monkeypatch.setattr(os, "walk", walk_and_remove)
    vanishing = ["package.pyc.140"]
    environment.pack(made.prefix, tmp_path / "packed.tar")
    with tarfile.open(tmp_path / "packed.tar") as packed:
        assert [name for name in packed.getnames() if ".pyc" in name] == ["lib/__pycache__/package.pyc"]
    vanishing = ["package.py"]
    with pytest.raises(FileNotFoundError):
        environment.pack(made.prefix, tmp_path / "packed again.tar")


@pytest.mark.parametrize("looks_too_early", [False, True])
def test_an_archive_that_another_job_made_meanwhile_is_used_and_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks_too_early: bool
) -> None:
    made, archives = fake_environment(tmp_path / "environment"), tmp_path / "archives"
    pack, others = environment.pack, []

    def pack_slowly(prefix: Path, archive: Path) -> str:
        monkeypatch.setattr(environment, "pack", pack)
        others.append((first := archive_of(made, archives), first.stat().st_ino))
        if looks_too_early:
            monkeypatch.setattr(environment, "_archive_with", lambda key, folder: None)
        return pack(prefix, archive)

    monkeypatch.setattr(environment, "pack", pack_slowly)
    found = archive_of(made, archives)
    assert [(found, found.stat().st_ino)] == others and os.listdir(archives) == [found.name]


def test_before_an_environment_is_packed_what_killed_jobs_left_of_one_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, archives = fake_environment(tmp_path / "environment"), tmp_path / "archives"
    archives.mkdir(mode=0o700)
    left, growing = archives / ".a.7.b.tar", archives / ".a.8.c.tar"
    for path, age_s in ((left, 2 * 3600), (growing, 60)):
        path.write_text("half an archive")
        os.utime(path, (time.time() - age_s,) * 2)

    def fill_the_disk(prefix: Path, archive: Path) -> str:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(environment, "pack", fill_the_disk)
    with pytest.raises(OSError, match="no space left"):
        archive_of(made, archives)
    assert list(archives.iterdir()) == [growing]


def test_a_copy_of_an_environment_leads_to_itself_and_a_damaged_archive_is_not_used(tmp_path: Path) -> None:
    made = fake_environment(tmp_path / "environment")
    archive = archive_of(made, tmp_path / "archives")
    item = Item("environment", str(archive), archive.stat().st_size, digest_of(archive))
    plan = Plan((item,), ("n0",), prefix=str(made.prefix), python=made.python)
    folder = tmp_path / "slurmtrain-stage-1" / "c-7-0"
    assert stage_node(plan, folder, "n0", mount=local).error is None
    copy = folder / "n0" / "environment"
    assert (copy / "bin" / "tool").read_text().splitlines()[0] == f"#!{copy}/bin/python"
    assert (copy / "bin" / "python3").readlink() == Path("python")
    damaged = bytearray(archive.read_bytes())
    damaged[damaged.index(b"x = 1")] ^= 1
    archive.write_bytes(bytes(damaged))
    assert "was read here with the digest" in str(stage_node(plan, folder, "n1", mount=local).error)
    archive.write_bytes(bytes(damaged)[: len(damaged) // 2])
    assert stage_node(plan, folder, "n2", mount=local).error is not None
    assert not (folder / "n1" / "use").exists() and not (folder / "n2" / "use").exists()


def test_scripts_of_a_read_only_environment_start_the_interpreter_of_the_copy(tmp_path: Path) -> None:
    prefix, copy = Path("/shared/environment"), tmp_path / "copy"
    (copy / "bin").mkdir(parents=True)
    script, untouched = copy / "bin" / "tool", tmp_path / "tool"
    script.write_text(f"#!{prefix}/bin/python\nprint()\n")
    script.chmod(0o555)
    os.link(script, untouched)  # root can write to any file, and would change this one
    environment.point_to(prefix, copy)
    assert script.read_text() == f"#!{copy}/bin/python\nprint()\n" and script.stat().st_mode & 0o777 == 0o555
    assert untouched.read_text() == f"#!{prefix}/bin/python\nprint()\n"
    assert list((copy / "bin").iterdir()) == [script]


def test_links_of_an_environment_lead_from_its_copy_to_the_same_files(tmp_path: Path) -> None:
    made = fake_environment(tmp_path / "environment")
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "python3.12").write_text("an interpreter")
    (tmp_path / "current").symlink_to("environment")
    lib = made.prefix / "lib"
    (lib / "outside").symlink_to("../../base/python3.12")
    (lib / "roundabout").symlink_to("../../current/lib/package.py")
    (lib / "inside").symlink_to("package.py")
    archive = archive_of(made, tmp_path / "archives")
    copy = tmp_path / "node" / "here" / "environment"
    unpack(archive, copy)
    assert (copy / "lib" / "outside").read_text() == "an interpreter"
    for name in ("roundabout", "inside"):
        assert (copy / "lib" / name).resolve() == copy / "lib" / "package.py"


def test_an_interpreter_without_an_environment_of_its_own_is_refused() -> None:
    with pytest.raises(ConfigError, match="is the interpreter of no virtual or conda environment"):
        environment.find_environment(["bash", "-c", 'echo "/usr"; echo "/usr/bin/python3"'])
    with pytest.raises(ConfigError, match="cannot be asked for its folder"):
        environment.find_environment(["/no/such/python"])


def test_archives_of_another_user_are_not_run(tmp_path: Path) -> None:
    (tmp_path / "archives").mkdir()
    (tmp_path / "archives").chmod(0o777)
    with pytest.raises(ConfigError, match="not a folder that only you can write to"):
        archive_of(fake_environment(tmp_path / "environment"), tmp_path / "archives")


# Which nodes use their copies.

PLAN = Plan((Item("code", "/code", 1, "a"), Item("data/x", "/x", 1)), ("n0", "n1", "n2"))


def reports(**digests: str) -> dict[str, NodeReport]:
    return {node: NodeReport(node, 1.0, {"code": "a", "data/x": digest}) for node, digest in digests.items()}


@pytest.mark.parametrize(
    ("found", "without"),
    [
        (reports(n0="d", n1="d", n2="d"), {}),
        (reports(n0="d", n1="d"), {"n2": "ended without a word"}),
        (reports(n0="d", n1="e", n2="d"), {"n1": "differs from that of most nodes"}),
        (reports(n0="d", n1="e"), {"n0": "was it changed meanwhile?", "n1": "was it changed meanwhile?", "n2": "word"}),
        ({**reports(n0="d", n2="d"), "n1": NodeReport("n1", error="disk full")}, {"n1": "disk full"}),
    ],
)
def test_nodes_whose_copies_are_sound_and_equal_use_them(found: dict[str, NodeReport], without: dict[str, str]) -> None:
    judged = judge(PLAN, found)
    assert list(judged.without) == list(without)
    assert all(words in judged.without[node] for node, words in without.items())


def test_a_node_that_is_not_done_in_time_is_named_with_the_limit() -> None:
    judged = judge(PLAN, reports(n0="d", n1="d"), "30 min (cluster.stage.limit_min)")
    assert judged.sentence == ("n2 has no sound copy: its copying was not done after 30 min (cluster.stage.limit_min)")


def test_the_report_of_a_node_is_short_enough_that_no_other_one_comes_into_it() -> None:
    long = NodeReport("n1", error="/shared/" + "é" * 4000)
    line = long.line()
    assert len(line.encode()) <= LINE_BYTES and '"error": "/shared/' in line
    items = tuple(Item(f"data/{index:03d}", f"/shared/{index:03d}", 1) for index in range(90))
    plan = Plan(items, ("n0", "n1", "node-with-a-longer-name"))
    lines = [
        NodeReport(node, 1.0, {item.name: f"{index:064d}" for index, item in enumerate(items)}) for node in plan.nodes
    ]
    lines[1] = dataclasses.replace(lines[1], digests={**lines[1].digests, "data/089": "d" * 64})
    assert all(len(each.line()) <= LINE_BYTES for each in lines)
    read = {each.node: NodeReport(**json.loads(each.line())) for each in lines}
    assert judge(plan, read).sentence == "n1 has no sound copy: its copies differ from those of most nodes"


def test_one_sentence_names_the_nodes_without_copies() -> None:
    assert judge(PLAN, reports(n0="d", n1="e", n2="d")).sentence == (
        "n1 has no sound copy: its copy of /x differs from that of most nodes"
    )
    many = dataclasses.replace(PLAN, nodes=tuple(f"n{number}" for number in range(9)))
    assert judge(many, {}).sentence.endswith("; and 6 more nodes")


@pytest.mark.parametrize(
    ("without", "nodes", "at_fault"),
    [
        (["n2"], 3, ("n2",)),
        (["n1"], 2, ("n1",)),
        (["n0", "n1"], 3, ()),  # what is copied may be at fault
        (["n0"], 1, None),  # the node of the batch script
    ],
)
def test_nodes_without_required_copies_are_at_fault_unless_they_are_most_of_them(
    tmp_path: Path, without: list[str], nodes: int, at_fault: tuple[str, ...] | None
) -> None:
    attempt = AttemptDir(tmp_path)
    assert refused_nodes(attempt) is None
    attempt.stage_dir.mkdir()
    write_refusal(attempt, dataclasses.replace(PLAN, nodes=tuple(f"n{index}" for index in range(nodes))), without)
    assert refused_nodes(attempt) == at_fault


def test_status_counts_the_nodes_that_have_copied(tmp_path: Path) -> None:
    attempt = AttemptDir(tmp_path)
    assert progress(attempt) is None
    attempt.stage_dir.mkdir()
    assert progress(attempt) == "prepares what its nodes get copies of"
    write_plan(attempt, PLAN)
    assert read_plan(attempt) == PLAN
    said = NodeReport("n1", 1.0, {"code": "a"}).line()
    (attempt.stage_dir / "reports.jsonl").write_text(said + said[:20])  # the second was killed while it wrote
    assert read_reports(attempt) == {"n1": NodeReport("n1", 1.0, {"code": "a"})}
    assert progress(attempt) == "copies code, data/x (0.0 GB) to each of its nodes: 1 of 3 done"
    (attempt.stage_dir / "reports.jsonl").write_text("".join(NodeReport(node).line() for node in PLAN.nodes))
    assert progress(attempt) is None


# What the ranks, and what they start for other nodes, find.


def test_a_data_source_reads_the_copies_and_the_checkpoint_is_bound_to_the_names_in_the_config() -> None:
    copies = {"SLURMTRAIN_COPIES": '{"/shared/tokens": "/local/data/tokens"}'}
    values = {"_target_": "a.B", "path": "/shared/tokens", "paths": ["/shared/tokens/x.bin", "/shared/tokens2"], "n": 1}
    assert with_copies(values, copies) == {
        "_target_": "a.B",
        "path": "/local/data/tokens",
        "paths": ["/local/data/tokens/x.bin", "/shared/tokens2"],
        "n": 1,
    }
    assert with_copies(values, {}) is values


def test_what_a_rank_submits_names_no_folder_of_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/local/environment/bin/python")
    staged = {
        "PATH": "/local/environment/bin:/bin",
        "PYTHONSAFEPATH": "1",
        "SLURMTRAIN_SHARED_PATH": "/bin",
        "SLURMTRAIN_SHARED_PYTHONSAFEPATH": "",
        "SLURMTRAIN_PYTHON": "/local/environment/bin/python",
        "SLURMTRAIN_SHARED_PYTHON": "/shared/bin/python",
        "SLURMTRAIN_STAGE": "/local",
        "SLURMTRAIN_NOT_STAGED": "",
        "HOME": "/home/me",
    }
    assert shared_interpreter(staged) == "/shared/bin/python"
    assert shared_interpreter({}) == "/local/environment/bin/python"
    assert without_copies(staged) == {"PATH": "/bin", "HOME": "/home/me"}


# The config.


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cluster.stage.dir=scratch"], "is not a folder on a node"),
        (["cluster.stage.dir='/tmp/$(id)'"], "is not a folder on a node"),
        (["cluster.stage.data=[/a/x,/b/x]"], "x is a second of that name"),
        (["cluster=local", "cluster.stage.code=true"], "has only this machine"),
        (
            ["cluster.container.kind=apptainer", "cluster.container.image=/a.sif", "cluster.stage.code=true"],
            "would not see the copies",
        ),
        (["sweep.pack=2", "cluster.stage.environment=true"], "make its own copies"),
        (["job.snapshot=none", "cluster.stage.code=true"], "there is no snapshot to copy"),
        (["cluster.stage.limit_min=0"], r"cluster.stage.limit_min=0 must be at least 1"),
    ],
)
def test_what_cannot_be_copied_is_refused_before_the_queue(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(compose(["cluster=a100x4", *words] if "cluster=local" not in words else words))


def test_relative_data_is_that_of_the_folder_of_the_command() -> None:
    config = with_absolute_paths(compose(["cluster=a100x4", "cluster.stage.data=[tokens/]"]), Path("/home/me"))
    assert config.cluster.stage.data == ["/home/me/tokens"]
