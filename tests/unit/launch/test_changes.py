"""`resume RUN key=value`: what may change, what may not, and what becomes of a pending job."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from slurmtrain.cli import main
from slurmtrain.config.compose import compose
from slurmtrain.config.frozen import load_frozen
from slurmtrain.config.schema import Config
from slurmtrain.errors import EXIT_CONFIG, EXIT_USAGE, UsageError
from slurmtrain.launch.changes import (
    change,
    changed,
    check_meaning,
    check_of_one_run,
    describe,
    differences,
    finish_change,
)
from slurmtrain.planner.schedule import learning_rate
from slurmtrain.runs.lookup import all_runs
from slurmtrain.runs.run_dir import RunDir
from tests.support.commands import Cli
from tests.support.fake_slurm import FakeSlurm
from tests.support.runs import printed, refused, submitted_run

OURS = compose(["cluster=a100x4", "cluster.nodes=4", "job.runs_dir=/runs"])
THEIRS = replace(OURS, model={"_target_": "mine.Model", "width": 8})


def after(config: Config, *words: str) -> Config:
    return changed(config, words, Path("/home/me"))[0]


MAY_CHANGE = """
cluster.nodes=2 cluster.nodes=2-4 cluster.time_limit_min=600 cluster.partition=night parallel.dp_shard=2
train.steps=300 train.micro_batch_size=1 train.data_workers=2 train.log_every=1
optim.lr=1e-4 optim.weight_decay=0 optim.grad_clip=0.5 checkpoint.every_steps=7 checkpoint.keep_last=5
requeue.mode=resubmit hooks.on_finish=true eval.metrics.accuracy=true model.dropout=0.1 lora.dropout=0.1
""".split()


@pytest.mark.parametrize("word", MAY_CHANGE)
def test_what_leaves_the_checkpoints_as_they_are_may_change(word: str) -> None:
    changes = after(OURS, word)
    assert word.partition("=")[0] in differences(OURS, changes)
    check_meaning(OURS, changes, 100)


MUST_NOT = {
    "weights": "model.dim=128 model.n_layers=2 model.rope_theta=1000 +model.extra=1 "
    "lora.r=8 lora.alpha=32 lora.target_modules=[query]",
    "order": "data.seq_len=32 data.max_bytes=1000000 +data.other=1 train.seed=1 train.shuffle=false",
    "global batches": "train.global_batch_size=32",
    "no effect": "checkpoint.restore_from=/home/me/other",
}


@pytest.mark.parametrize(("word", "reason"), [(word, why) for why, words in MUST_NOT.items() for word in words.split()])
def test_what_would_change_the_meaning_of_the_checkpoints_is_refused_with_the_reason(word: str, reason: str) -> None:
    changes = after(OURS, word)
    key = word.lstrip("+").partition("=")[0]
    with pytest.raises(UsageError, match=rf"(?s){key}: .* cannot change after step 100.*{reason}") as error:
        check_meaning(OURS, changes, 100)
    assert "submit it as a separate run" in (error.value.hint or "")
    check_meaning(OURS, changes, None)  # without a checkpoint there is nothing that it could change
    check_meaning(OURS, OURS, 100)


def test_a_person_who_says_so_goes_on_all_the_same() -> None:
    changes = after(OURS, "train.seed=1", "checkpoint.allow=[config,data]")
    check_meaning(OURS, changes, 100)
    assert {"train.seed", "checkpoint.allow"} <= set(differences(OURS, changes))


def test_of_a_model_of_ones_own_the_class_may_not_change_and_of_a_program_everything_may() -> None:
    check_meaning(THEIRS, after(THEIRS, "model.width=9"), 100)  # the shapes of tensors are compared at the restore
    with pytest.raises(UsageError, match=r"model\._target_: mine\.Model -> mine\.Other cannot change"):
        check_meaning(THEIRS, after(THEIRS, "model._target_=mine.Other"), 100)
    config = compose(["job=command", "job.command=true"])
    changes = after(config, "job.command=false", "train.seed=7")
    check_meaning(config, changes, 100)
    assert {"job.command", "train.seed"} <= set(differences(config, changes))


def test_the_answer_says_what_is_different_and_where_the_learning_rate_goes_on() -> None:
    changes = after(OURS, f"train.steps={OURS.train.steps + 100}", "cluster.nodes=2-4")
    lines = describe(OURS, changes, OURS.train.steps)
    rates = [learning_rate(OURS.train.steps, total_steps=c.train.steps, config=c.optim) for c in (OURS, changes)]
    assert rates[1] > rates[0]
    assert lines[:2] == ["cluster.nodes: 4 -> 2-4", f"train.steps: {OURS.train.steps} -> {changes.train.steps}"]
    assert lines[2].startswith(f"learning rate of step {OURS.train.steps + 1}: {rates[0]:.3g} -> {rates[1]:.3g}, ")
    assert describe(OURS, after(OURS, "cluster.nodes=2"), 10) == ["cluster.nodes: 4 -> 2"]


@pytest.fixture
def waiting(project: Path, slurm: FakeSlurm) -> RunDir:
    """A run whose job, 101, is pending."""
    assert main(["+cluster=a100x4", "cluster.nodes=4", "submit"]) == 0
    (run,) = all_runs(project / "runs")
    return run


@pytest.fixture
def ended(waiting: RunDir, slurm: FakeSlurm) -> RunDir:
    slurm.change("101", state="COMPLETED")
    return waiting


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["train.steps=0"], EXIT_CONFIG, "train.steps=0 must be at least 1"),
        (["train.steps=9", "optim.warmup_steps=1"], EXIT_USAGE, "train.steps=9 is less than 10"),
        (["cluster.nodes=3", "train.global_batch_size=16"], EXIT_CONFIG, "train.global_batch_size"),
        (["nothing.here=1"], EXIT_USAGE, "there is no config key 'nothing'"),
        (["model.width=8"], EXIT_USAGE, "model has no key 'width'"),
        (["optim.lr=1,2"], EXIT_USAGE, "single fields can be set"),
        (["model=small"], EXIT_USAGE, "single fields can be set"),
        (["job.name=other"], EXIT_USAGE, "job.name was decided when the run was submitted"),
        (["cluster.partition=nowhere"], 1, "invalid partition specified"),
        (["train.seed=7", "cluster.nodes=2"], EXIT_USAGE, "train.seed: 1234 -> 7 cannot change after step 10 of the"),
    ],
)
def test_a_change_that_cannot_be_leaves_the_run_as_it_was(
    words: list[str], code: int, said: str, ended: RunDir, slurm: FakeSlurm
) -> None:
    checkpoint = ended.checkpoints / "checkpoint_0000010"
    checkpoint.mkdir(parents=True)
    (checkpoint / "COMPLETE").touch()
    (checkpoint / "manifest.json").write_text("{}")
    before = ended.config_file.read_text(), ended.script.read_text()
    slurm.fail("sbatch --test-only", "sbatch: error: invalid partition specified: nowhere")
    assert said in refused("resume", ended.id, *words, code=code)
    assert (ended.config_file.read_text(), ended.script.read_text()) == before
    assert len(slurm.jobs) == 1 and "changes" not in ended.info() and not (ended.path / ".change").exists()


def test_resume_with_other_nodes_and_more_steps(ended: RunDir, slurm: FakeSlurm) -> None:
    steps = load_frozen(ended.config_file).train.steps
    out = printed("resume", ended.id, "cluster.nodes=2", "train.steps=+100")
    assert "cluster.nodes: 4 -> 2\n" in out and f"train.steps: {steps} -> {steps + 100}\n" in out
    config = load_frozen(ended.config_file)
    assert (config.cluster.nodes, config.train.steps, ended.info()["steps"]) == (2, steps + 100, steps + 100)
    assert "#SBATCH --nodes=2\n" in slurm.submitted[-1]
    (event,) = [event for event in ended.events() if event["event"] == "changed"]
    assert event["changed"] == {"cluster.nodes": [4, 2], "train.steps": [steps, steps + 100]}
    assert ended.changed_keys() == {"cluster.nodes", "train.steps"}  # which its checkpoints may differ in


def test_who_was_killed_before_the_run_was_submitted_types_the_same_again(
    ended: RunDir, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    """`train.steps=+100` adds 100 steps once, although sbatch failed after the change was made."""
    steps = load_frozen(ended.config_file).train.steps
    slurm.fail("sbatch", "Invalid account or account/partition combination specified", times=1)
    assert main(["resume", ended.id, "train.steps=+100"]) == 1
    assert load_frozen(ended.config_file).train.steps == steps + 100
    assert main(["resume", ended.id, "train.steps=+100"]) == 0
    assert load_frozen(ended.config_file).train.steps == steps + 100 and len(ended.info()["changes"]) == 1
    assert f"changed already: train.steps={steps + 100}" in capsys.readouterr().out
    slurm.change("102", state="COMPLETED")
    (ended.attempts / "0001").mkdir()  # it has begun with them
    assert main(["resume", ended.id, "train.steps=+100"]) == 0
    assert load_frozen(ended.config_file).train.steps == steps + 200


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("optim.lr=1e-5", "its sweep varies optim.lr"),
        ("model.dim=8", "its sweep varies model.dim"),
        ("cluster.nodes=2", "cluster.nodes is the same for all runs that share a job"),
    ],
)
def test_of_a_run_in_a_sweep_nothing_is_set_that_the_sweep_decides(override: str, told: str) -> None:
    """`sweep retry` and the tables would go by what it was before."""
    with pytest.raises(UsageError, match=f"{told}.*") as error:
        check_of_one_run(["train.steps=9", override], ["optim.lr=0.1", "model=tiny"])
    assert error.value.hint == "submit it as a separate run"
    check_of_one_run(["train.steps=9", "prepare.parts=2"], ["prepare.part=1", "model=tiny"])


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
    answer = cli("resume", "optim.lr=1", "cluster.env.MODE=slow", path, "--code")
    assert answer.returncode == 0 and "bug is fixed slow" in answer.stdout, answer.stdout + answer.stderr
    assert (run_dir / "config.0001.yaml").read_text() == before and (run_dir / "code.0002" / "step.py").exists()
    info = json.loads((run_dir / "run.json").read_text())
    second = ["optim.lr=1", "cluster.env.MODE=slow"]
    assert [each["set"] for each in info["changes"]] == [["+cluster.env.MODE=fast"], second]
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


def parts_of(run: RunDir) -> set[bool]:
    """Of the parts of a run: whether each is that of after the change of the next test."""
    info = run.info()
    return {
        load_frozen(run.config_file).cluster.env == {"A": "1"},
        "export A=1" in run.script.read_text(),
        (run.code / "step.py").read_text() == "new",
        "new.py" in run.code_record_file.read_text(),
        len(info.get("changes", [])) == 1,
    }


def killed_at(count: int, action: Callable[[], object]) -> bool:
    """Whether a process was killed instead of its n-th rename, replacement or link of a file; else it has done all."""
    pid = os.fork()
    if pid == 0:
        changes = iter(range(count))

        def counted(event: str, _: object) -> None:
            if event in ("os.rename", "os.link") and next(changes, None) is None:  # a replacement is a rename, too
                os._exit(9)

        sys.addaudithook(counted)
        try:
            action()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_a_change_that_is_killed_at_any_moment_is_made_whole_or_not_at_all(
    project: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    (project / "step.py").write_text("old")
    words = ("cluster=local", "job=command", "job.command='python step.py'", "job.snapshot=cwd")
    before = submitted_run(project, *words)
    (project / "step.py").write_text("new")
    (project / "new.py").touch()
    seen, killed, count = set(), True, 0
    while killed:
        run = RunDir(before.path.with_name(f"{before.id}-{count}"))
        shutil.copytree(before.path, run.path, symlinks=True)
        killed = killed_at(count, lambda run=run: change(run, ["+cluster.env.A=1"], project, code=True))  # type: ignore[misc]
        killed_at(count // 3, lambda run=run: finish_change(run))  # type: ignore[misc]  # who completes it, is killed, too
        finish_change(run)
        (made,) = parts_of(run)
        seen.add(made)
        if made:
            for name in ("config.0001.yaml", "job.0001.sbatch", "code.0001.json", "code.0001/step.py"):
                assert (run.path / name).read_bytes() == (before.path / name.replace(".0001", "")).read_bytes()
        assert not (run.path / ".change").exists()
        count += every
    assert seen == {True, False}
