"""`runs bundle` and `submit --from`: the same bytes of the same run, no secrets, and nothing but what the list names."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import subprocess
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurmtrain.cli import main
from slurmtrain.config.frozen import load_frozen
from slurmtrain.config.schema import JobConfig
from slurmtrain.errors import ConfigError, SlurmtrainError, UnreadableRecordError, UsageError
from slurmtrain.launch import unbundle
from slurmtrain.launch.bundle import Packed, pack, write_bundle
from slurmtrain.launch.bundle_format import with_digest
from slurmtrain.launch.bundle_secrets import SECRET_FILE, SECRET_TEXT, without_files
from slurmtrain.launch.snapshot import find_source, take_snapshot
from slurmtrain.launch.unbundle import opened, package_sentence
from slurmtrain.runs.code_record import read_code_record
from slurmtrain.runs.environment_record import write_environment
from slurmtrain.runs.lookup import all_runs
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system.process_facts import ProcessFacts
from tests.support.commands import FakeSlurm
from tests.support.runs import submitted_run

FACTS = ProcessFacts(
    system={"python": "3.11.7", "os": "Rocky Linux 9", "host": "n17"},
    packages={"torch": "2.11.0+cu128", "numpy": "2.0", "ours": "1", "forked": "2", "evil name\nx": "1"},
    origins={"ours": "editable file:///home/me/ours", "forked": "git+https://host/forked.git@abc"},
    gpu={"driver": "550.54"},
)


def git(*arguments: str, cwd: Path) -> None:
    settings = ["-c", "user.name=me", "-c", "user.email=me@here", "-c", "init.defaultBranch=main"]
    subprocess.run(["git", *settings, *arguments], cwd=cwd, capture_output=True, check=True)


@pytest.fixture
def run(project: Path) -> RunDir:
    """A run of a program in a git work tree with changes, whose one attempt has recorded what it ran with."""
    (project / "lib").mkdir()
    (project / "train.py").write_text("import lib.model\n")
    (project / "lib" / "model.py").write_text("WIDTH = 8\n")
    (project / "run.sh").write_text("#!/bin/sh\n")
    (project / "run.sh").chmod(0o755)
    (project / ".gitignore").write_text("runs\n")
    (project / "latest").symlink_to("train.py")
    (project / "data").symlink_to("/scratch/data")
    git("init", "-q", cwd=project)
    git("add", ".", cwd=project)
    git("commit", "-qm", "first", cwd=project)
    (project / "lib" / "model.py").write_text("WIDTH = 16\n")
    words = ["cluster=a100x4", "cluster.partition=gpu", "job=command", "job.command='python train.py'", "optim.lr=0.5"]
    run = submitted_run(project, *words)
    write_environment(run.attempt(run.new_attempt()), FACTS)
    return run


def bundled(run: RunDir, path: Path, **options: Any) -> Path:
    write_bundle(pack(run, **options), path)
    return path


@pytest.fixture
def bundle(run: RunDir, tmp_path: Path) -> Path:
    """A small one: this package's own code, which a job copies where it is installed editable, is left out."""
    return bundled(run, tmp_path / "bundle.tar.gz", exclude=["slurmtrain/*"])


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, in which somebody types commands."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PWD", str(folder))
    return folder


def contents(path: Path) -> dict[str, str]:
    with tarfile.open(path) as tar:
        files = {entry.name.partition("/")[2]: tar.extractfile(entry) for entry in tar}
        return {name: file.read().decode() for name, file in files.items() if file is not None}


def test_a_bundle_holds_config_code_packages_and_how_to_run_it_in_the_same_bytes_each_time(
    run: RunDir, tmp_path: Path
) -> None:
    first, second = (bundled(run, tmp_path / f"{name}.tar.gz") for name in "ab")
    assert first.read_bytes() == second.read_bytes()
    with tarfile.open(first) as tar:
        entries = tar.getmembers()
    assert entries[0].name == f"command-{run.id}/bundle.json"
    assert {(entry.uid, entry.gid, entry.uname, entry.isreg()) for entry in entries} == {(0, 0, "", True)}
    files = contents(first)
    own = {name for name in files if not name.startswith("code/slurmtrain/")}
    assert own == {
        *("bundle.json", "README.md", "config.yaml", "job.sbatch", "environment.json", "requirements.txt"),
        *("changes.patch", "code/train.py", "code/lib/model.py", "code/run.sh", "code/.gitignore"),
    }
    assert files["code/lib/model.py"] == "WIDTH = 16\n" and "+WIDTH = 16" in files["changes.patch"]
    assert files["requirements.txt"].splitlines()[1:] == [
        "--extra-index-url https://download.pytorch.org/whl/cu128",
        "forked @ git+https://host/forked.git@abc",
        "numpy==2.0",
        "# ours==1, installed from editable file:///home/me/ours",
        "torch==2.11.0+cu128",
    ]
    assert "n17" not in files["environment.json"] and "submit --from BUNDLE" in files["README.md"]
    assert "- data -> /scratch/data" in files["README.md"] and "driver 550.54" in files["README.md"]
    listed = json.loads(files["bundle.json"])["files"]
    assert listed.keys() == files.keys() - {"bundle.json"} and listed["code/run.sh"]["executable"]
    plain = bundled(run, tmp_path / "plain.tar")
    assert contents(plain) == files and gzip.decompress(first.read_bytes()) == plain.read_bytes()
    with pytest.raises(ConfigError, match="already exists"):
        bundled(run, first)
    assert sorted(path.name for path in tmp_path.glob("*.tar*")) == ["a.tar.gz", "b.tar.gz", "plain.tar"]


def test_what_the_program_wrote_beside_its_code_stays_out_and_a_change_of_the_code_is_told(run: RunDir) -> None:
    (run.code / "out").mkdir()
    (run.code / "out" / "weights.bin").write_bytes(bytes(1000))
    assert "code/out/weights.bin" not in {member.name for member in pack(run).members}
    (run.code / "train.py").write_text("edited later")
    (run.code / "run.sh").unlink()
    packed = pack(run)
    assert next(member for member in packed.members if member.name == "code/train.py").content == b"edited later"
    assert any("changed or gone since the run was submitted: run.sh, train.py" in said for said in packed.warnings)


def test_bundles_and_reports_in_the_work_tree_are_not_in_a_snapshot_unless_they_are_committed(
    run: RunDir, project: Path, tmp_path: Path
) -> None:
    def snapshot(target: Path) -> tuple[set[str], bool | None]:
        job = JobConfig(runs_dir=str(project / "runs"))
        taken = take_snapshot(job, find_source(job, project), target)
        return {path.name for path in target.iterdir()}, taken.dirty

    with tarfile.open(project / "mine.tar.gz", "w:gz") as tar:
        tar.add(project / "train.py", "data/bundle.json")
    (project / "mine.html").write_text("<html><head><title>mine</title></head></html>")
    git("add", "-A", cwd=project)
    git("commit", "-qm", "second", cwd=project)
    before, dirty = snapshot(tmp_path / "before")
    assert {"mine.tar.gz", "mine.html"} <= before and not dirty
    bundled(run, project / "sent.tar.gz")
    bundled(run, project / "sent.tar")
    assert main(["report", run.id, "--out", str(project / "report.html")]) == 0
    assert snapshot(tmp_path / "after") == (before, False)
    git("add", "sent.tar", cwd=project)
    assert snapshot(tmp_path / "added") == ({*before, "sent.tar"}, True)


def test_a_run_without_a_record_of_its_code_or_its_packages_is_packed_and_says_so(run: RunDir) -> None:
    run.code_record_file.unlink()
    run.attempt(1).environment_file.unlink()
    packed = pack(run)
    assert "code/train.py" in {member.name for member in packed.members} and len(packed.warnings) == 2


def test_a_bundle_never_holds_a_secret(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def add(name: str, text: str) -> None:
        (run.code / name).write_text(text)
        record = json.loads(run.code_record_file.read_text())
        record["files"][name] = hashlib.sha256(text.encode()).hexdigest()
        run.code_record_file.write_text(json.dumps(record))

    monkeypatch.setenv("MY_TOKEN", "opensesame")
    add("client.py", "login('opensesame')\n")
    add(".env", "A=b\n")
    add(".env.example", "A=\n")
    token = "hf" + "_" + "abcdefghij" * 4
    add("notes.txt", f"first\nmy token is {token}\n")
    with pytest.raises(ConfigError) as refused:
        pack(run)
    assert "opensesame" not in str(refused.value) and token not in str(refused.value)
    for said in (
        "code/client.py contains the value of MY_TOKEN",
        "code/.env is a file that usually holds secrets",
        "code/notes.txt seems to contain a secret, in line 2",
    ):
        assert said in refused.value.message
    with pytest.raises(ConfigError, match="MY_TOKEN"):
        pack(run, exclude=[".env"], allow=["*"])  # a known value is never allowed
    packed = pack(run, exclude=["client.py", "code/.env"], allow=["notes.txt"])
    names = {member.name for member in packed.members}
    assert {"code/notes.txt", "code/.env.example"} < names and not {"code/.env", "code/client.py"} & names
    assert main(["runs", "bundle", run.id, str(tmp_path / "x.tar.gz")]) == 78
    assert not (tmp_path / "x.tar.gz").exists() and "--exclude PATTERN" in capsys.readouterr().err
    config = run.config_file.read_text()
    run.config_file.write_text(config.replace("  env: {}", "  env:\n    WANDB_API_KEY: written-out"))
    with pytest.raises(ConfigError, match=r"cluster\.env\.WANDB_API_KEY looks like a secret"):
        pack(run, exclude=["client.py", ".env"], allow=["notes.txt"])
    pack(run, exclude=["client.py", ".env"], allow=["notes.txt", "config.yaml"])
    run.config_file.write_text(config.replace("  env: {}", "  env:\n    NAMED: opensesame"))
    with pytest.raises(ConfigError, match=r"config\.yaml contains the value of MY_TOKEN"):
        pack(run, exclude=["client.py", ".env"], allow=["*"])


def test_a_secret_in_the_changes_of_a_file_goes_with_the_file(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "WIDTH = 8")  # what git has of the file, so the patch has it as a line that is gone
    with pytest.raises(ConfigError, match=r"changes\.patch contains the value of MY_TOKEN"):
        pack(run, allow=["*"])
    assert "changes.patch" not in {member.name for member in pack(run, exclude=["lib/*"]).members}
    monkeypatch.delenv("MY_TOKEN")
    run.config_file.write_text(run.config_file.read_text().replace("secrets: {}", "secrets: {HF_TOKEN: env}"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    assert any("could not look for these secrets: HF_TOKEN" in said for said in pack(run).warnings)


@pytest.mark.parametrize(
    "header",
    [
        "diff --git a/lib/a b.py b/lib/a b.py\n--- a/lib/a b.py\t\n+++ b/lib/a b.py\t\n@@ -1 +1 @@\n-x\n+y\n",
        "diff --git lib/a.py lib/a.py\n--- lib/a.py\n+++ lib/a.py\n@@ -1 +1 @@\n-x\n+y\n",
        "diff --git a/lib/a.py b/other.py\nsimilarity index 100%\nrename from lib/a.py\nrename to other.py\n",
        "diff --git a/lib/a.png b/lib/a.png\nBinary files a/lib/a.png and b/lib/a.png differ\n",
        "diff --git a/lib/a.py b/lib/a.py\ndeleted file mode 100644\n--- a/lib/a.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n",
    ],
)
def test_the_parts_of_a_diff_on_a_file_are_left_out(header: str) -> None:
    kept = "diff --git a/kept.py b/kept.py\n--- a/kept.py\n+++ b/kept.py\n@@ -1 +1 @@\n-diff --git a/lib/a\n+y\n"
    assert without_files(header + kept + header, ["lib/*"]) == kept
    assert without_files(header + kept, []) == header + kept


def test_keys_that_are_assigned_to_a_name_are_found_and_ordinary_code_is_not() -> None:
    key = "0123456789abcdef" * 2
    for text in (f"export WANDB_API_KEY={key}", f"aws_secret_access_key = {key}", f'"_authToken": "{key}"'):
        assert SECRET_TEXT.search(text.encode())
    for text in (
        f"tokenizer_sha256: {key}",
        'token = os.environ["HF_TOKEN"]',
        "pad_token = token_of_the_tokenizer_by_name",
    ):
        assert not SECRET_TEXT.search(text.encode())
    for name in (".envrc", "credentials", "credentials.json", ".pypirc"):
        assert SECRET_FILE.fullmatch(name)
    assert not SECRET_FILE.fullmatch("credentials.py")


def test_the_records_of_a_run_of_somebody_else_lead_to_no_file_of_the_reader(run: RunDir, tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.mkdir()
    (private / "id").write_text("mine alone")
    record = json.loads(run.code_record_file.read_text())

    def naming(name: str) -> None:
        run.code_record_file.write_text(json.dumps({**record, "files": {name: "0" * 64}}))

    (run.code / "link").symlink_to(private)
    (run.code / "file").symlink_to(private / "id")
    for name in ("../../private/id", str(private / "id"), "link/id", "file"):
        naming(name)
        with pytest.raises(UnreadableRecordError):
            pack(run)


def test_a_password_in_a_url_is_no_less_a_secret(run: RunDir) -> None:
    config = run.config_file.read_text()
    assert "  env: {}" in config
    hidden = "hunter" + "22"
    run.config_file.write_text(
        config.replace("  env: {}", f"  env:\n    HTTPS_PROXY: http://me:{hidden}@proxy.example.org:3128")
    )
    with pytest.raises(ConfigError, match=r"config\.yaml seems to contain a secret, in line \d+") as refused:
        pack(run)
    assert hidden not in str(refused.value)
    for text in (
        "https://me:password@host",
        "https://me:${WORD_OF_MINE}@host",
        "https://host:8080/a@b",
        "git@host:a/b.git",
    ):
        assert not SECRET_TEXT.search(text.encode())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["x.zip"], "ends in .tar.gz or .tar, not x.zip"),
        (["-"], "ends in .tar.gz or .tar, not -"),
        (["no/such/x.tar.gz"], "cannot write no/such/x.tar.gz"),
    ],
)
def test_a_file_that_would_be_no_bundle_is_refused_before_the_run_is_read(
    words: list[str], said: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runs", "bundle", "last", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_bundle_takes_no_other_program_after_the_dashes(
    bundle: Path, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", "--from", str(bundle), "--dry-run", "--", "python", "x.py"]) == 2
    assert "a bundle has its own program, so --from takes none after --" in capsys.readouterr().err
    assert main(["job.command='python x.py'", "submit", "--from", str(bundle), "--dry-run"]) == 0


def test_a_call_of_a_pickled_function_is_not_packed(project: Path) -> None:
    command = "job.command='python -m slurmtrain.runtime.jobs.map_task'"
    run = submitted_run(project, "cluster=a100x4", "job=command", command)
    with pytest.raises(UsageError, match="calls a pickled function"):
        pack(run)


# What is opened.


def rebuilt(path: Path, change: Callable[[list[tuple[tarfile.TarInfo, bytes]]], None], target: Path) -> Path:
    """A bundle with other files in it."""
    with tarfile.open(path) as tar:
        members = [(entry, tar.extractfile(entry).read()) for entry in tar.getmembers()]  # type: ignore[union-attr]
    change(members)
    with tarfile.open(target, "w:gz") as tar:
        for entry, content in members:
            if entry.isreg():
                entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content) if entry.isreg() else None)
    target.chmod(0o600)
    return target


def unpack(path: Path) -> None:
    with opened(path):
        pass


def test_a_torn_or_damaged_bundle_is_one_sentence_wherever_it_is_torn(bundle: Path, tmp_path: Path) -> None:
    unpack(bundle)
    whole, torn = bundle.read_bytes(), tmp_path / "torn.tar.gz"
    for length in [0, 1, 2, 10, *range(64, len(whole), len(whole) // 12), len(whole) - 1]:
        torn.write_bytes(whole[:length])
        with pytest.raises(ConfigError):
            unpack(torn)
    plain = gzip.decompress(whole)
    for place in range(600, len(plain), len(plain) // 25):
        torn.write_bytes(plain[:place] + bytes([plain[place] ^ 1]) + plain[place + 1 :])
        assert is_refused(torn) or plain[place] == 0  # a bit of the padding says nothing
    torn.write_text("not a bundle at all")
    with pytest.raises(ConfigError, match="incomplete, or not a bundle"):
        unpack(torn)
    with pytest.raises(UsageError, match="No such file"):
        unpack(tmp_path / "gone")
    with pytest.raises(UsageError, match="Is a directory"):
        unpack(tmp_path)


def is_refused(path: Path) -> bool:
    try:
        unpack(path)
    except SlurmtrainError:
        return True
    return False


def entry(name: str, content: bytes = b"x", **facts: Any) -> tuple[tarfile.TarInfo, bytes]:
    found = tarfile.TarInfo(name)
    for key, value in facts.items():
        setattr(found, key, value)
    return found, content


FOREIGN = [
    entry("more/extra.py"),
    entry("../../escape.py"),
    entry("/tmp/escape.py"),
    entry("ROOT/code/extra.py"),
    entry("ROOT/code/../../escape.py"),
    entry("ROOT/code/train.py"),  # a second one
    entry("ROOT/code/link", type=tarfile.SYMTYPE, linkname="/etc"),
    entry("ROOT/code/link", type=tarfile.LNKTYPE, linkname="/etc/passwd"),
    entry("ROOT/code/device", type=tarfile.CHRTYPE),
    entry("ROOT/code/folder", type=tarfile.DIRTYPE),
]


def test_nothing_but_the_files_of_the_list_is_unpacked(bundle: Path, tmp_path: Path) -> None:
    for added in FOREIGN:

        def change(members: list[tuple[tarfile.TarInfo, bytes]], added: Any = added) -> None:
            added[0].name = added[0].name.replace("ROOT", members[0][0].name.partition("/")[0])
            members.append(added)

        assert is_refused(rebuilt(bundle, change, tmp_path / "hostile.tar.gz")), added[0].name
    assert not list(tmp_path.rglob("escape.py"))
    unpack(rebuilt(bundle, lambda members: None, tmp_path / "same.tar.gz"))


LISTS = [
    {"files": {"../x": {"sha256": "0" * 64, "size": 1, "executable": False}}},
    {"files": {"code/x": {"sha256": "0" * 64, "size": -1, "executable": False}}},
    {"files": {"code/x": {"sha256": "0" * 64, "size": 1 << 40, "executable": False}}},
    {"files": {"code/x": 7}},
    {"workdir": "/etc"},
    {"workdir": "code/../../x"},
    {"import_roots": ["../../x"]},
    {"links": {"link": "/etc"}},
    {"links": {"link": "../../etc"}},
    {"links": {"../link": "x"}},
    {"links": {"a/b/l": "../../c", "m": "a/b/l/../../x"}},  # by its text inside, and by the other link outside
    {"links": {"l": "lib", "l/m": "x"}},
    {"git": {"revision": 7}},
    {"format": 2},
    {"run": None},
]


def test_a_list_that_leads_elsewhere_or_is_of_another_kind_is_refused(bundle: Path, tmp_path: Path) -> None:
    for change in LISTS:

        def edit(members: list[tuple[tarfile.TarInfo, bytes]], change: Any = change) -> None:
            members[0] = members[0][0], json.dumps(with_digest({**json.loads(members[0][1]), **change})).encode()

        assert is_refused(rebuilt(bundle, edit, tmp_path / "hostile.tar.gz")), change


def header(kind: bytes, size: int, name: str = "x") -> bytes:
    """A header of tar that says that so many bytes follow."""
    found = tarfile.TarInfo(name)
    found.type, found.size = kind, size
    return found.tobuf(tarfile.PAX_FORMAT)


def many_keys(prefix: str, count: int) -> bytes:
    """The content of a header of tar with so many keys."""
    lines = [b"%s%d=1\n" % (prefix.encode(), number) for number in range(count)]
    return b"".join(b"%d %s" % (len(line) + 3, line) for line in lines if len(line) + 3 < 100)


class Zeros(io.RawIOBase):
    """A file of so many zeros after a beginning, which notes the most that was read of it at once."""

    def __init__(self, beginning: bytes, zeros: int):
        self.rest, self.zeros, self.total = beginning, zeros, 0

    def read(self, size: int = -1) -> bytes:
        size = self.zeros if size < 0 else size
        data, self.rest = self.rest[:size], self.rest[size:]
        more = min(size - len(data), self.zeros)
        self.zeros -= more
        self.total += len(data) + more
        return data + bytes(more)

    def seek(self, offset: int, whence: int = 0) -> int:
        return 0


HEADERS = [
    header(tarfile.XHDTYPE, 1 << 31),  # two GiB, which tarfile gathers before anything is known
    header(tarfile.XGLTYPE, 1 << 31),
    header(tarfile.GNUTYPE_LONGNAME, 1 << 31),
    header(tarfile.XHDTYPE, 60 << 20),
    header(tarfile.REGTYPE, 1 << 40, "run/bundle.json"),
    b"",  # zeros
]


@pytest.mark.parametrize("beginning", HEADERS)
def test_a_header_that_stands_for_gigabytes_is_refused_before_they_are_read(beginning: bytes, tmp_path: Path) -> None:
    source = Zeros(beginning, 1 << 31)
    with pytest.raises(ConfigError):
        unbundle._unpack(tmp_path / "hostile.tar", source, tmp_path)  # type: ignore[arg-type]
    assert source.total <= 2 << 20


def test_a_file_that_stands_for_gigabytes_is_not_gathered_in_memory(bundle: Path, tmp_path: Path) -> None:
    """Neither a gzip bomb, nor headers after each other, nor a file longer than its list says."""
    hostile, block = tmp_path / "hostile.tar.gz", 64 << 20
    with tarfile.open(bundle) as tar:
        listed = tar.getmembers()[1]
        end = listed.offset
    plain = gzip.decompress(bundle.read_bytes())
    keys = [many_keys(f"{chr(97 + number)}", 4000) for number in range(20)]
    globals_ = b"".join(header(tarfile.XGLTYPE, len(each)) + each + bytes(-len(each) % 512) for each in keys)
    for added in (
        bytes(block),
        globals_ + plain[end:],
        header(tarfile.REGTYPE, block, listed.name) + bytes(block),
        header(tarfile.GNUTYPE_SPARSE, listed.size, listed.name) + bytes(1024),
    ):
        hostile.write_bytes(gzip.compress(plain[:end] + added, 1))
        hostile.chmod(0o600)
        with pytest.raises(ConfigError):
            unpack(hostile)


@pytest.mark.parametrize("gone", ["config.yaml", "environment.json"])
def test_a_bundle_without_a_config_or_an_environment_is_one_sentence(
    bundle: Path, tmp_path: Path, elsewhere: Path, gone: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def without(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
        listed = json.loads(members[0][1])
        del listed["files"][gone]
        members[:] = [(each, content) for each, content in members if not each.name.endswith(f"/{gone}")]
        members[0] = members[0][0], json.dumps(with_digest(listed)).encode()

    assert main(["submit", "--from", str(rebuilt(bundle, without, tmp_path / "less.tar.gz")), "--dry-run"]) == 78
    assert f"its bundle.json names no {gone}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\xfe", b"[]", b"a: [", b"cluster: 7", b"model: {target: x}", b"a: &a [1]\nb: *a", b"[" * 9999],
)
def test_a_config_that_is_none_is_one_sentence(
    bundle: Path, tmp_path: Path, elsewhere: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    def other(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
        place = next(number for number, (each, _) in enumerate(members) if each.name.endswith("/config.yaml"))
        members[place] = members[place][0], content
        listed = json.loads(members[0][1])
        facts = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "executable": False}
        listed["files"]["config.yaml"] = facts
        members[0] = members[0][0], json.dumps(with_digest(listed)).encode()

    code = main(["submit", "--from", str(rebuilt(bundle, other, tmp_path / "other.tar.gz")), "--dry-run"])
    said = capsys.readouterr().err
    assert code in (2, 78) and "Traceback (most" not in said and said.count("slurmtrain: error:") == 1


def test_a_variable_that_is_not_utf_8_is_looked_for_as_it_is(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", os.fsdecode(b"open\xffsesame"))
    names = [member.name for member in pack(run).members]
    assert "code/train.py" in names
    (run.code / "train.py").write_bytes(b"login('open\xffsesame')\n")
    with pytest.raises(ConfigError, match="contains the value of MY_TOKEN"):
        pack(run)


def test_what_a_killed_command_has_unpacked_is_removed_by_the_next_and_what_a_living_one_has_is_not(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    (scratch / "slurmtrain-bundle-left" / "code").mkdir(mode=0o700, parents=True)
    (scratch / "slurmtrain-bundle-elsewhere").symlink_to(tmp_path)
    (scratch / "slurmtrain-bundle-of-all").mkdir()
    (scratch / "slurmtrain-bundle-of-all").chmod(0o777)
    with opened(bundle) as first, opened(bundle) as second:
        assert {path.name for path in scratch.iterdir()} == {
            *(first.folder.name, second.folder.name),
            *("slurmtrain-bundle-elsewhere", "slurmtrain-bundle-of-all"),
        }
        assert (first.folder / "code" / "train.py").is_file() and bundle.exists()
    assert len(list(scratch.iterdir())) == 2


def test_a_bundle_that_others_may_have_written_is_not_run(
    bundle: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle.chmod(0o666)
    assert main(["submit", "--from", str(bundle)]) == 2
    assert "others may change" in capsys.readouterr().err
    bundle.chmod(0o600)
    if os.geteuid() == 0:
        os.chown(bundle, 4712, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with pytest.raises(UsageError, match=r"belongs to user .* would be run as you"):
        unpack(bundle)
    assert not list(elsewhere.iterdir())


# What is submitted.


def test_a_bundle_is_submitted_from_an_empty_folder_with_its_config_its_code_and_what_is_changed(
    run: RunDir, bundle: Path, elsewhere: Path, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["optim.lr=0.25", "submit", "--from", str(bundle)]) == 0
    said = capsys.readouterr().err
    (made,) = all_runs(elsewhere / "runs")
    before, after = load_frozen(run.config_file), load_frozen(made.config_file)
    assert after.optim.lr == 0.25 and after.job.runs_dir == str(elsewhere / "runs")
    assert (after.cluster, after.model, after.job.command) == (before.cluster, before.model, before.job.command)
    info = made.info()
    assert info["job_ids"] == ["4711"] and info["submit_dir"] == str(elsewhere)
    assert info["bundle"]["run"] == run.id
    assert info["bundle"]["sha256"] == hashlib.sha256(bundle.read_bytes()).hexdigest()
    assert info["code"]["revision"] == run.info()["code"]["revision"] and info["code"]["dirty"]
    records_of = [read_code_record(each.code_record_file) for each in (run, made)]
    assert records_of[0] is not None and records_of[1] is not None
    assert records_of[0].files == records_of[1].files and records_of[0].diff == records_of[1].diff
    assert (made.code / "latest").readlink() == Path("train.py") and os.access(made.code / "run.sh", os.X_OK)
    assert "numpy" in said and "(was 2.0)" in said and "forked, ours" in said
    assert "code/data was a link to /scratch/data" in said
    again = pack(made)
    assert {m.name: m.content for m in again.members if m.name.startswith("code/")} == {
        m.name: m.content for m in pack(run).members if m.name.startswith("code/")
    }


def test_another_cluster_replaces_all_that_was_of_the_first_one(
    bundle: Path, elsewhere: Path, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["+cluster=h100x8", "cluster.nodes=2", "submit", "--from", str(bundle)]
    assert main([*words, "--dry-run"]) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --nodes=2" in script and "--partition=gpu" not in script
    assert not list(elsewhere.iterdir())
    assert main(words) == 0
    (made,) = all_runs(elsewhere / "runs")
    assert load_frozen(made.config_file).cluster.tasks_per_node == 8
    for word, said in (("model=llama3_8b", "single fields can be set"), ("optim.lrr=1", "has no optim.lrr")):
        assert main([word, "submit", "--from", str(bundle)]) == 2
        assert said in capsys.readouterr().err
    assert main(["-m", "optim.lr=1,2", "submit", "--from", str(bundle)]) == 2
    assert main(["submit", "--from", str(bundle), "--config-name", "x"]) == 2


def test_a_run_that_ran_in_place_is_packed_without_code_and_takes_that_of_the_folder(
    project: Path, tmp_path: Path, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = submitted_run(project, "cluster=a100x4", "experiment=smoke")
    packed: Packed = pack(run)
    assert any("ran in place" in said for said in packed.warnings)
    assert not [member for member in packed.members if member.name.startswith("code/")]
    write_bundle(packed, tmp_path / "b.tar.gz")
    assert main(["job.runs_dir=other", "submit", "--from", str(tmp_path / "b.tar.gz")]) == 0
    (made,) = all_runs(project / "other")
    assert made.info()["workdir"] == str(project)


def test_what_differs_here_is_told_in_a_sentence() -> None:
    then = ProcessFacts(
        system={"python": "3.11"}, packages={"torch": "2.11", "numpy": "2", "x": "1", "slurmtrain": "0"}
    )
    here = ProcessFacts(system={"python": "3.12"}, packages={"torch": "2.13", "numpy": "2", "more": "1"})
    said = package_sentence(then, here)
    assert said == "other versions: python 3.12 (was 3.11), torch 2.13 (was 2.11); not installed: x"
    assert package_sentence(here, here) == ""
