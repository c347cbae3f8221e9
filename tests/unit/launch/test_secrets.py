"""Secrets: every rank has them, and nothing that is written down does."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest

from slurmtrain.cli import main
from slurmtrain.config import secrets
from slurmtrain.config.compose import compose
from slurmtrain.config.frozen import freeze, load_frozen
from slurmtrain.errors import ConfigError
from slurmtrain.system import redaction
from slurmtrain.system.files import write_json
from slurmtrain.system.records import read_json
from tests.support.commands import Cli
from tests.support.fake_slurm import FakeSlurm
from tests.support.runs import refused

VALUE = "hf_0123456789"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a token"
    path.write_text(VALUE + "\n")
    path.chmod(0o600)
    return path


def files_with(value: str, folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and value.encode() in path.read_bytes()]


# Where they come from.


def test_they_come_from_the_environment_and_from_files(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_LOGIN", "from-env")
    config = compose(["+secrets.MY_LOGIN=env", f"+secrets.HF='file:{file}'", "+model.login='${oc.env:HF}'"])
    assert secrets.read(config.secrets) == {"MY_LOGIN": "from-env", "HF": VALUE}
    assert config.model["login"] == "${oc.env:HF}" and VALUE not in freeze(config)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o700])
def test_a_file_that_others_may_read_is_refused(mode: int, file: Path) -> None:
    file.chmod(mode)
    with pytest.raises(ConfigError, match=r"secrets\.HF=file:.* must be a file of your own that nobody else may read"):
        compose([f"+secrets.HF='file:{file}'"])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (f"+secrets.HF={VALUE}", r"secrets\.HF is neither env nor file:PATH"),
        ("+secrets={a-b: env}", "secrets has 'a-b', which is not a valid name"),
        ("+secrets.EMPTY=env", "does not contain a valid value"),
    ],
)
def test_what_is_no_source_is_said_without_the_value(
    override: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMPTY", "")
    with pytest.raises(ConfigError, match=words) as error:
        compose([override])
    assert VALUE not in str(error.value)


def test_inside_of_an_attempt_they_are_in_the_environment(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container has no such file, but what the batch script has read."""
    path = tmp_path / "config.yaml"
    path.write_text(freeze(compose([f"+secrets.HF='file:{file}'", "+model.login='${oc.env:HF}'"])))
    file.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        load_frozen(path)
    monkeypatch.setenv("SLURMTRAIN_ATTEMPT", "1")
    monkeypatch.setenv("HF", VALUE)
    assert load_frozen(path).model["login"] == VALUE
    assert load_frozen(path, with_secrets=False).model["login"] == "${oc.env:HF}"


def test_a_resumed_run_wants_them_again(project: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_LOGIN", "from-env")
    slurm.command("squeue", "exit 0")
    assert main(["+cluster=a100x4", "+secrets.MY_LOGIN=env", "submit"]) == 0
    assert not files_with("from-env", project)
    monkeypatch.delenv("MY_LOGIN")
    assert "the environment variable MY_LOGIN is not set" in refused("resume", "last", code=78)
    assert len(slurm.submitted) == 1


# Written out.


@pytest.mark.parametrize(
    "words",
    [
        ["job=command", f"job.command='python x.py --key {VALUE}'"],
        [f"+model.deep={{a: [1, b{VALUE}]}}"],
        ["-m", "train.seed=1,2", "hooks.on_finish='curl -d " + VALUE + " x'"],
        [f"hydra.job.name={VALUE}"],
    ],
)
def test_a_value_that_is_written_out_is_refused_and_nothing_is_left(
    words: list[str],
    project: Path,
    slurm: FakeSlurm,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MY_LOGIN", VALUE)
    assert main(["+cluster=a100x4", "+secrets.MY_LOGIN=env", *words, "submit"]) == 78
    said = capsys.readouterr()
    assert "holds the value of the secret MY_LOGIN" in said.err and VALUE not in said.err + said.out
    assert os.listdir(project) == [] and slurm.submitted == []


# Redaction.


def test_what_is_written_has_a_stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    redaction.hide({"A": "abcdefgh", "B": "abcdefghij", "C": "short"})
    assert redaction.redact("abcdefghijk abcdefgh short") == "***B***k ***A*** short"
    write_json(tmp_path / "x", {"abcdefgh": ["is abcdefgh", {"a": "abcdefghij"}, 1, None]})
    assert read_json(tmp_path / "x") == {"abcdefgh": ["is ***A***", {"a": "***B***"}, 1, None]}
    written = {name: io.BytesIO() for name in ("stdout", "stderr", "__stdout__", "__stderr__")}
    for name, stream in written.items():
        monkeypatch.setattr(sys, name, io.TextIOWrapper(stream))
    secrets.redact_output()
    assert sys.stdout.buffer.write(b"<abcdefgh>") == 10
    sys.stdout.buffer.writelines([b"<", b"abcdefgh"])
    print("x", "abcdefgh", end="!", flush=True)
    print("abcdefghij", file=sys.__stderr__, flush=True)
    assert written["stdout"].getvalue() == b"<***A***><***A***x ***A***!"
    assert written["__stderr__"].getvalue() == b"***B***\n"


def test_a_crash_with_a_secret_in_its_words_tells_it_nowhere(cli: Cli, project: Path) -> None:
    """Also an own loop's: `init` sees to it. The hook, which has it, too, is redacted as well."""
    (project / "loop.py").write_text(
        "import os, slurmtrain\nslurmtrain.init()\nprint(os.environ['MY_LOGIN'])\n"
        "raise ValueError('no login as ' + os.environ['MY_LOGIN'])\n"
    )
    words = ["+cluster=local", "+secrets.MY_LOGIN=env", "job=command", f"job.command='{sys.executable} loop.py'"]
    hook = 'hooks.on_failure=\'test -n "$MY_LOGIN" && echo "$MY_LOGIN: $SLURMTRAIN_SENTENCE"\''
    done = cli(*words, hook, "requeue=off", "submit", MY_LOGIN=VALUE)
    assert done.returncode == 1 and VALUE not in done.stdout + done.stderr
    assert not files_with(VALUE, project / "runs")
    (log,) = project.glob("runs/*/*/attempts/0001/hook.log")
    assert log.read_text() == "***MY_LOGIN***: crashed: rank 0: ValueError: no login as ***MY_LOGIN***; it is not " + (
        "requeued (requeue.mode=off)\n"
    )


# Of a program of Hydra, whose jobs hand over what they return or raise.

PROGRAM = """
import os, hydra
{beside}
@hydra.main(version_base=None, config_path=None)
def main(cfg):
    print("with", os.environ["HF_TOKEN"])
    {inside}
main()
"""
LAUNCHED = ["-m", "+x=1,2", "hydra/launcher=slurmtrain", 'hydra.launcher.overrides=["+secrets.HF_TOKEN=env"]']


@pytest.mark.parametrize(
    ("beside", "inside", "words"),
    [
        ("TOKEN = os.environ['HF_TOKEN']", "return TOKEN", "the function holds the value of the secret"),
        ("", "raise ValueError('boom', os.environ['HF_TOKEN'])", "boom"),
    ],
)
def test_no_secret_of_a_program_lies_on_disk(cli: Cli, project: Path, beside: str, inside: str, words: str) -> None:
    (project / "program.py").write_text(PROGRAM.format(beside=beside, inside=inside))
    done = cli(*LAUNCHED, program=("program.py",), HF_TOKEN="hf_123456")
    assert done.returncode == 1 and words in done.stderr, done.stderr
    assert ("waiting for 2 jobs of" in done.stdout) == ("raise" in inside)  # who waits is told for what
    assert [path for path in project.rglob("*") if path.is_file() and b"hf_123456" in path.read_bytes()] == []
