"""Frozen configs: those of other versions of the package, and changes to a run that has ended."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from slurmtrain.cli import main
from slurmtrain.config.compose import compose
from slurmtrain.config.frozen import freeze, load_frozen
from slurmtrain.config.schema import OptimConfig
from slurmtrain.errors import EXIT_CONFIG, ConfigError, UsageError
from slurmtrain.launch import changes
from slurmtrain.launch.changes import change, changed, check_of_one_run, undo_unfinished
from slurmtrain.launch.snapshot import Snapshot
from slurmtrain.runs.code_record import record_of
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runtime.jobs.train import _of_optimizer
from slurmtrain.system.files import write_json
from tests.support.commands import Cli
from tests.support.fake_slurm import FakeSlurm
from tests.support.run_info import run_info

FROZEN = Path(__file__).parent / "frozen"


def test_a_frozen_config_of_another_version_of_the_package(tmp_path: Path) -> None:
    """A field that it lacks has its default; one that is not known here is an error, with a hint if a newer one froze it."""
    path, text = tmp_path / "config.yaml", freeze(compose(["cluster=local", "train.log_every=7"]))
    with pytest.raises(ConfigError, match="is missing"):
        load_frozen(path)
    path.write_text("cluster: [torn")
    with pytest.raises(ConfigError, match="not a config of this version"):
        load_frozen(path)
    path.write_text(text.replace("  log_every: 7\n", ""))
    assert load_frozen(path) == compose(["cluster=local"])
    path.write_text(text.replace("  log_every: 7\n", "  clock: 1\n"))
    with pytest.raises(ConfigError, match="is not a config of this version: Key 'clock'") as error:
        load_frozen(path)
    assert error.value.hint is None
    path.write_text(text.replace("  log_every: 7\n", "  clock: 1\n").replace("version 1.", "version 2.", 1))
    with pytest.raises(ConfigError, match="is not a config of this version: Key 'clock'") as error:
        load_frozen(path)
    assert "a newer slurmtrain froze it" in str(error.value.hint)


def test_a_new_field_of_the_optimizer_does_not_part_a_run_from_its_checkpoints() -> None:
    @dataclasses.dataclass
    class Updated(OptimConfig):
        nesterov: bool = False

    before = _of_optimizer(OptimConfig())
    assert _of_optimizer(Updated()) == before == dataclasses.asdict(OptimConfig())
    assert _of_optimizer(Updated(nesterov=True)) == {**before, "nesterov": True}


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("optim.lrr=1", "the config of this run has no optim.lrr"),
        ("model.width=8", "the config of this run has no model.width"),
        ("optim.lr=[", "cannot read it"),
        ("optim.lr=1,2", "single fields can be set"),
        ("model=small", "single fields can be set"),
        ("nosuch=1", "there is no config key 'nosuch'"),
        ("watchdog=off", "single fields can be set"),
        ("cluster.container=pyxis", "single fields can be set"),
        ("~optim.lr", "single fields can be set"),
        ("job.name=other", "job.name was decided when the run was submitted"),
    ],
)
def test_what_cannot_be_set_is_told(override: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=told):
        changed(compose(["cluster=local"]), [override], tmp_path)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("optim.lr=1e-5", "its sweep varies optim.lr"),
        ("model.dim=8", "its sweep varies model.dim"),
        ("cluster.nodes=2", "cluster.nodes is the same for all runs that share a job"),
        ("requeue.mode=requeue", "requeue.mode is the same"),
        ("+hooks.end=[true]", "hooks.end is the same"),
    ],
)
def test_of_a_run_in_a_sweep_nothing_is_set_that_the_sweep_decides(override: str, told: str) -> None:
    """`sweep retry` and the tables would go by what it was before."""
    with pytest.raises(UsageError, match=f"{told}.*") as error:
        check_of_one_run(["train.steps=9", override], ["optim.lr=0.1", "model=tiny"])
    assert error.value.hint == "submit it as a separate run"
    check_of_one_run(["train.steps=9", "optim.lr_min=1"], ["optim.lr=0.1", "model=tiny"])


def test_what_is_set_is_validated(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"optim\.lr=-1"):
        changed(compose(["cluster=local"]), ["optim.lr=-1"], tmp_path)
    with pytest.raises(ConfigError, match=r"optim\.lr=high"):
        changed(compose(["cluster=local"]), ["optim.lr=high"], tmp_path)
    found, _ = changed(compose(["cluster=local"]), ["optim.lr=1e-5", "+model.extra=1"], tmp_path)
    assert found.optim.lr == 1e-5 and found.model["extra"] == 1


@pytest.mark.parametrize("words", [["last", "--set"], ["last", "--set", "--code"], ["last", "optim.lr"]])
def test_a_word_that_is_no_value_is_told_how_to_write_one(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resume", *words]) == 2
    assert "optim.lr=1e-4" in capsys.readouterr().err


def test_a_fixed_bug_and_another_value_go_on_from_where_the_run_was(cli: Cli, project: Path) -> None:
    (project / "step.py").write_text("raise SystemExit(1)\n")
    job = ("+cluster=local", "job=command", "job.command=python3 step.py", "job.snapshot=cwd")
    assert cli(*job, "requeue.max_attempts_without_progress=1", "submit").returncode == 1
    [run_dir] = (project / "runs" / "command").iterdir()
    before = (run_dir / "config.yaml").read_text()
    (project / "step.py").write_text("import os; print('bug is fixed', os.environ['MODE'])\n")
    wrong = cli("resume", "last", "train.steps=0")
    assert wrong.returncode == EXIT_CONFIG and (run_dir / "config.yaml").read_text() == before
    assert "bug is fixed" not in cli("resume", "+cluster.env.MODE=fast", "last").stdout  # the old code
    (project / "runs/lr=1").mkdir()  # a path with = is no value
    path = f"runs/lr=1/../command/{run_dir.name}"
    answer = cli("resume", "--set=optim.lr=1", "cluster.env.MODE=slow", path, "--code")
    assert answer.returncode == 0 and "bug is fixed slow" in answer.stdout, answer.stdout + answer.stderr
    assert (run_dir / "config.0001.yaml").read_text() == before and (run_dir / "code.0002" / "step.py").exists()
    info = json.loads((run_dir / "run.json").read_text())
    assert [each["set"] for each in info["changes"]] == [
        ["+cluster.env.MODE=fast"],
        ["optim.lr=1", "cluster.env.MODE=slow"],
    ]
    assert info["overrides"][-1] == "cluster.env.MODE=slow"
    assert "changed" in [json.loads(line)["event"] for line in (run_dir / "events.jsonl").read_text().splitlines()]


def test_what_a_program_has_saved_beside_its_code_goes_on_with_the_code_as_it_is_now(cli: Cli, project: Path) -> None:
    (project / "gone.txt").write_text("of the first snapshot alone")
    text = (
        "import pathlib; f = pathlib.Path('out/ck'); f.parent.mkdir(exist_ok=True); "
        "f.write_text(f.read_text() + {!r} if f.exists() else {!r})"
    )
    (project / "step.py").write_text(f"{text.format('1', '0')}; raise SystemExit(1)\n")
    job = ("+cluster=local", "job=command", "job.command=python3 step.py", "job.snapshot=cwd")
    assert cli(*job, "requeue.max_attempts_without_progress=1", "submit").returncode == 1
    (project / "gone.txt").unlink()
    for letter in "ab":  # the second time it was only carried over
        (project / "step.py").write_text(f"{text.format(letter, '-')}; raise SystemExit(1)\n")
        assert cli("resume", "last", "--code").returncode == 1
    [run_dir] = (project / "runs" / "command").iterdir()
    assert (run_dir / "code/out/ck").read_text() == "0ab"
    assert not (run_dir / "code/gone.txt").exists() and (run_dir / "code.0001/gone.txt").exists()


def test_a_changed_run_is_submitted_with_a_script_of_the_changed_config(
    cli: Cli, project: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli("+cluster=a100x4", "submit").returncode == 0
    slurm.command("squeue", "exit 0")  # it has gone
    [run_dir] = (project / "runs" / "train").iterdir()
    assert main(["resume", run_dir.name, "cluster.nodes=2"]) == 0
    assert "#SBATCH --nodes=1\n" in slurm.submitted[0] and "#SBATCH --nodes=2\n" in slurm.submitted[1]
    assert load_frozen(run_dir / "config.yaml").cluster.nodes == 2


def ended_run(path: Path) -> RunDir:
    """A run that has ended, with a snapshot of code that was changed since."""
    for folder in ("attempts", "checkpoints", "code"):
        (path / folder).mkdir(parents=True)
    (path / "code" / "step.py").write_text("old")
    (path / "code.json").write_text("old")
    run = RunDir(path)
    run.config_file.write_text("old")
    run.script.write_text("old")
    write_json(
        run.info_file,
        run_info(name="x", backend="local", code={"revision": "old"}, workdir="code", submit_dir=str(path)),
    )
    return run


def fresh_code(config: object, info: object, target: Path) -> Snapshot:
    target.mkdir()
    (target / "step.py").write_text("new")
    record_of(target).write_text("new")
    return Snapshot("code", "new")


def test_a_run_in_a_sweep_stays_what_its_sweep_says_of_it(tmp_path: Path, quick: None) -> None:
    run = ended_run(tmp_path / "x.sweep-1" / "20260101-000000-000aa")
    run.update_info(varied=["train.seed=1"])
    (run.path.parent / "sweep.json").write_text("{}")
    with pytest.raises(UsageError, match=r"its sweep varies train\.seed"):
        change(run, ["train.seed=2"], tmp_path)
    assert run.config_file.read_text() == "old" and "changes" not in run.info()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written is made without composing and copying, since it is made often."""
    config = compose(["cluster=local", "job=command", "job.command=true"])
    monkeypatch.setattr(changes, "load_frozen", lambda path, with_secrets: config)
    monkeypatch.setattr(changes, "freeze", lambda config: "new")
    monkeypatch.setattr(changes, "render_script", lambda config, paths: "new")
    monkeypatch.setattr(changes, "config_hash", lambda config: "new")
    monkeypatch.setattr(changes, "_snapshot", fresh_code)


def what(run: RunDir) -> tuple[object, ...]:
    """Whether its parts are those of before or after a change."""
    info = run.info()
    config, code = run.config_file.read_text(), (run.code / "step.py").read_text()
    told = record_of(run.code).read_text() == "new", info["code"]["revision"] == "new"
    return config == "new", run.script.read_text() == "new", code == "new", *told


def killed_at(line: int, action: object) -> bool:
    """Whether a process was killed before the n-th line of changes.py that it came to; else it has done all."""
    pid = os.fork()
    if pid == 0:
        left = line

        def trace(frame: object, event: str, arg: object) -> object:
            nonlocal left
            if frame.f_code.co_filename != changes.__file__:  # type: ignore[attr-defined]
                return None
            left -= event == "line"
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return trace

        try:
            sys.settrace(trace)  # type: ignore[arg-type]
            action()  # type: ignore[operator]
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def test_a_change_that_is_killed_at_any_line_is_done_whole_or_not_at_all(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between its renames, it left no code; killed later, each further one ended in a traceback, and the original
    config was overwritten."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    before = ended_run(tmp_path / "before")
    seen = set()
    for line in range(200):
        run = RunDir(tmp_path / str(line))
        shutil.copytree(before.path, run.path)

        def do(run: RunDir = run) -> None:
            change(run, [], tmp_path, code=True)

        killed = killed_at(line, do)
        if line % 3 == 0:  # and who puts it right is killed, too
            killed_at(line // 3, lambda run=run: undo_unfinished(run))
        undo_unfinished(run)
        found = what(run)
        assert found in ((True,) * 5, (False,) * 5), (line, found)
        assert not list(run.path.glob(".code-*")), line
        seen.add(found)
        do()
        assert what(run) == (True,) * 5, line
        assert (run.path / "config.0001.yaml").read_text() == "old", line
        assert (run.path / "code.0001" / "step.py").read_text() == "old", line
        assert (run.path / "code.0001.json").read_text() == "old", line
        if not killed:
            break
    assert not killed and len(seen) == 2


def test_a_run_that_a_killed_change_has_left_without_code_has_the_code_that_was_kept(
    tmp_path: Path, quick: None
) -> None:
    """As an earlier version left it, which noted nothing."""
    run = ended_run(tmp_path / "run")
    run.code.rename(run.path / "code.0001")
    (run.path / "config.0001.yaml").write_text("the original")
    undo_unfinished(run)
    assert (run.code / "step.py").read_text() == "old"
    change(run, [], tmp_path, code=True)
    assert (run.path / "config.0001.yaml").read_text() == "the original"
    assert (run.path / "code.0002" / "step.py").read_text() == "old"
