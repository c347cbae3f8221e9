"""runs compare|prune, and status for programs."""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurmtrain.checkpoint.format.directory import COMPLETE, checkpoint_name
from slurmtrain.checkpoint.store import retention
from slurmtrain.observe.metrics import MetricsLog
from slurmtrain.report import prune
from slurmtrain.runs.lookup import all_runs
from slurmtrain.runs.reasons import Event
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system.files import disk_usage
from tests.support.commands import refusal
from tests.support.fake_slurm import FakeSlurm
from tests.support.runs import add_attempt, printed, shown, submitted_run

Make = Callable[..., RunDir]
DAY = 86400.0
NAN = math.nan


@pytest.fixture
def make(project: Path, slurm: FakeSlurm) -> Make:
    """A run in a state, with what it logged; SLURM knows of job 1 as pending, and of no other."""
    slurm.command("squeue", "echo '1|1_N/A|PENDING|N/A|Resources'")

    def run(
        word: str = "finished", *overrides: str, losses: dict[int, float] | None = None, days_old: float = 0.0
    ) -> RunDir:
        local = word not in ("waiting", "prepared")
        cluster = "cluster=local" if local else "cluster=a100x4"
        run_dir = submitted_run(project, cluster, *overrides, job_ids=["1"] if word == "waiting" else [])
        log = MetricsLog(run_dir.metrics_file, -1)
        for step, loss in (losses or {}).items():
            log.write(step, loss=loss, step_time_s=time.time())
        log.close()
        verdicts = {"finished": ("done", "finished"), "failed": ("end", "crash"), "stopped": ("end", "asked")}
        if word in verdicts:
            verdict, reason = verdicts[word]
            add_attempt(run_dir, started=1.0, ended=2.0, verdict=verdict, reason=reason, sentence="x")
        elif word in ("running", "lost"):
            pid = os.getpid() if word == "running" else GONE_PID
            add_attempt(run_dir, started=1.0, pid=pid, host=socket.gethostname())
        age(run_dir, days_old)
        return run_dir

    return run


GONE_PID = 1 << 23  # above the largest that Linux gives


def age(run: RunDir, days: float) -> None:
    then = time.time() - days * DAY
    for path in [*run.path.rglob("*"), run.path]:
        os.utime(path, (then, then), follow_symlinks=False)


def add_checkpoint(run: RunDir, step: int = 10) -> Path:
    path = run.checkpoints / checkpoint_name(step)
    path.mkdir()
    (path / COMPLETE).write_text("digest\n")
    (path / "rank00000.safetensors").write_bytes(bytes(3_000_000))
    return path


# status and list, for programs.

PROGRESS_KEYS = "steps loss valid_loss logged tokens_per_s step_time_s eta_s reason expected_start"
RUN_KEYS = f"id name path state sentence job_id step {PROGRESS_KEYS} alive job_ids created doubt attempts"
ATTEMPT_KEYS = "number job_id nodes started ended first_step last_step reason verdict exit_code sentence"


def test_status_for_programs_is_one_object_or_a_list_of_them(make: Make) -> None:
    done, waits = make("finished", losses={10: 2.0, 20: 1.0}), make("waiting")
    listed = shown("status")
    assert [run["id"] for run in listed] == [run.id for run in all_runs(Path("runs"))]
    by_id = {run["id"]: run for run in listed}
    assert all(list(run) == RUN_KEYS.split() for run in listed)
    finished, waiting = by_id[done.id], by_id[waits.id]
    one = shown("status", done.id)
    assert sum(one["goodput"]["seconds"].values()) == pytest.approx(one["goodput"]["wall_s"])
    assert one == {**finished, "evaluations": [], "left_out": [], "slow_ranks": [], "goodput": one["goodput"]}
    assert list(finished["attempts"][0]) == ATTEMPT_KEYS.split()
    assert (finished["state"], finished["alive"], finished["step"], finished["job_id"]) == ("finished", False, 20, None)
    assert (finished["attempts"][0]["number"], finished["attempts"][0]["verdict"]) == (1, "done")
    assert (waiting["state"], waiting["alive"], waiting["step"], waiting["attempts"]) == ("waiting", True, None, [])
    assert (waiting["job_id"], waiting["job_ids"], waiting["name"]) == ("1", ["1"], "train")
    assert waiting["path"] == str(waits.path) and waiting["sentence"].startswith("job 1 is pending: it is next")
    assert (waiting["reason"], waiting["expected_start"], waiting["loss"]) == ("Resources", None, None)
    assert (finished["loss"], finished["eta_s"], finished["tokens_per_s"]) == (1.0, None, None)


# compare


def compared(a: RunDir, b: RunDir, *words: str) -> Any:
    return shown("runs", "compare", a.id, str(b.path), *words)


def test_two_runs_are_compared_in_config_code_and_metrics(make: Make, project: Path) -> None:
    (project / "mine.py").write_text("x = 1\n")
    words = ("job.snapshot=cwd",)
    a = make("finished", *words, losses={10: 2.0, 20: 1.5, 30: 1.0})
    (project / "mine.py").write_text("x = 2\n")
    b = make("finished", *words, "optim.lr=0.5", losses={10: 2.0, 20: 1.25, 40: NAN})
    (b.code / "other.py").touch()
    (b.code / "__pycache__").mkdir(exist_ok=True)
    (b.code / "__pycache__" / "mine.cpython-311.pyc").touch()  # as Python does when the run imports it
    text = printed("runs", "compare", a.id, b.id)
    assert ["optim.lr", "0.003", "0.5"] in [line.split() for line in text.splitlines()]
    assert "2 files of the snapshots of the code differ: mine.py and other.py" in text
    assert "they diverge at step 20 (loss), of the 2 steps that both have logged, 10 to 20" in text
    assert ["loss", "1", "nan", "20:", "1.5", "and", "1.25"] in [line.split() for line in text.splitlines()]

    found = compared(a, b)
    assert (found["a"]["id"], found["b"]["path"]) == (a.id, str(b.path))
    assert found["config"] == [{"key": "optim.lr", "a": 0.003, "b": 0.5}]
    assert found["files"] == ["mine.py", "other.py"]
    assert (found["steps"], found["first_divergence"]) == ([10, 20], {"step": 20, "a": 1.5, "b": 1.25})
    assert (found["final"]["loss"], found["divergences"]["loss"]) == ([1.0, "NaN"], found["first_divergence"])
    assert found["divergences"]["step_time_s"]["step"] == 10  # which is no reason to say that they diverge
    assert compared(a, b, "--tolerance", "0.2")["first_divergence"] is None


def test_what_differs_in_the_configs_stands_side_by_side_and_does_not_steer_the_terminal(make: Make) -> None:
    a, b = make(), make()
    usual = a.config_file.read_text()
    a.config_file.write_text(f"{usual}x: {{y: 1, z: [1, 2]}}\nonly_a: {{k: null}}\nsame: 3\nf: 1\nnan: .nan\n")
    b.config_file.write_text(f'{usual}x: {{y: 2, z: [1]}}\nsame: 3\nonly_b: "v\\e[31m"\nf: 1.0\nnan: .nan\n')
    assert compared(a, b)["config"] == [
        {"key": "x.y", "a": 1, "b": 2},
        {"key": "x.z", "a": [1, 2], "b": [1]},
        {"key": "only_a.k", "a": None},
        {"key": "f", "a": 1, "b": 1.0},
        {"key": "only_b", "b": "v\x1b[31m"},
    ]
    rows = [line.split() for line in printed("runs", "compare", a.id, b.id).splitlines()]
    assert ["only_b", "-", "v", "[31m"] in rows and ["only_a.k", "null", "-"] in rows and ["f", "1", "1.0"] in rows


def test_two_runs_are_compared_in_the_samples_they_have_seen(make: Make) -> None:
    a, b = make("finished"), make("finished")
    for run, hashes in zip((a, b), ("xyz", "xyw"), strict=True):
        records = ({"step": 10 * number, "loss": 1.0, "data_hash": each} for number, each in enumerate(hashes, 1))
        run.metrics_file.write_text("".join(json.dumps(record) + "\n" for record in records))
    text = printed("runs", "compare", a.id, b.id)
    assert "they have seen other samples, or another order, from step 30 on" in text
    assert "they are equal to the last bit at the 3 steps" in text
    assert compared(a, b)["data"] == {"steps": [10, 20, 30], "parts_at": 30}
    text = printed("runs", "compare", a.id, a.id)
    assert f"b: {a.path}, of no known revision" in text and "the configs are the same" in text
    assert "the files of the code are not compared" in text  # they ran in place, outside of git
    assert "the same samples in the same order up to step 30" in text


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("last", "last", "--tolerance", "-1"), "--tolerance: '-1' is not a number of at least 0"),
        (("last", "x"), "no run's id begins with 'x'"),
        (("last",), "required: RUN_B"),
    ],
)
def test_what_cannot_be_compared_is_one_sentence(words: tuple[str, ...], sentence: str, make: Make) -> None:
    run = make()
    assert sentence in refusal("runs", "compare", *words)
    run.config_file.unlink()
    assert "config.yaml cannot be read" in refusal("runs", "compare", "last", "last", code=78)


# prune


def test_what_has_ended_is_removed_as_a_dry_run_says_and_what_stays_is_told_with_the_reason(make: Make) -> None:
    gone = [make(word, days_old=2) for word in ("finished", "failed", "stopped", "lost")]
    silent = [make(word, days_old=2) for word in ("running", "prepared")]
    read, source, starting, elsewhere = make(), make(), make("lost"), make("lost")
    waits = make("waiting", f"checkpoint.restore_from={add_checkpoint(source)}")
    elsewhere.update_info(host="login-of-another-cluster")
    age(elsewhere, 1)
    words = ("runs", "prune", "--state", "finished", "failed", "stopped", "lost")
    with retention.reading(add_checkpoint(read)):
        would = printed(*words, "--dry-run")
        assert len(all_runs(Path("runs"))) == 11
        size = sum(disk_usage(run.path) for run in gone)
        done = printed(*words)
    removed = [line for line in done.splitlines() if " stays: " not in line]
    planned = would.replace("would remove", "removed").replace("would be", "were")
    assert removed == [line for line in planned.splitlines() if " stays: " not in line]
    assert f"({size} bytes)" in done and all(run.id in done for run in gone)
    for run, why in (
        (read, "somebody is reading"),
        (source, f"run {waits.id}, which has not ended, begins from its checkpoints"),
        (starting, "it looks lost, but something happened to it"),
        (elsewhere, "it looks lost from here, but was submitted on login-of-another-cluster"),
    ):
        assert f"{run.id} stays: {why}" in done
    left = {run.id for run in (*silent, read, source, starting, elsewhere, waits)}
    assert {run.id for run in all_runs(Path("runs"))} == {path.name for path in Path("runs/train").iterdir()} == left
    assert f"removed {read.id}" in printed(*words)  # it is read no more


def test_only_runs_of_the_age_and_the_states_that_were_named_are_removed(make: Make) -> None:
    old, fresh = make("failed", days_old=2), make("failed", days_old=0.5)
    finished = make("finished", days_old=2)
    assert f"would remove {fresh.id} (failed" in printed("runs", "prune", "--dry-run")  # without a word, all are shown
    printed("runs", "prune", "--older-than", "1", "--state", "failed", "stopped")
    assert not old.path.exists() and fresh.exists() and finished.exists()
    printed("runs", "prune", "--older-than", "1")
    assert fresh.exists() and not finished.path.exists()
    assert printed("runs", "prune", "--older-than", "1") == "nothing to remove\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((), "this would remove every run that has ended"),
        (("--state", "running"), "'running' is not a value of --state"),
        (("--older-than", "-1"), "--older-than: '-1' is not a number of at least 0"),
    ],
)
def test_what_would_be_dangerous_is_refused(words: tuple[str, ...], sentence: str, make: Make) -> None:
    run = make()
    assert sentence in refusal("runs", "prune", *words)
    assert run.exists()


def test_nothing_that_slurm_cannot_be_asked_about_is_removed(make: Make, slurm: FakeSlurm) -> None:
    waits, done = make("waiting", days_old=9), make("finished", days_old=9)
    slurm.command("squeue", "echo 'no controller' >&2; exit 1")
    assert "SLURM cannot be asked" in printed("runs", "prune", "--older-than", "1")
    assert waits.exists() and not done.path.exists()


@pytest.mark.parametrize("what", ["resumed", "read"])
def test_what_happens_between_the_decision_and_the_removal_saves_a_run(what: str, make: Make) -> None:
    run = make()
    (run.checkpoints / retention.READERS).mkdir()
    checkpoint = add_checkpoint(run)
    (removal,) = prune.plan(Path("runs"), now=time.time()).removals
    if what == "resumed":
        run.event(Event.RESUME_ASKED)
        assert not prune.remove(removal, now=time.time())
    else:
        with retention.reading(checkpoint):
            assert not prune.remove(removal, now=time.time())
    assert run.exists() and all_runs(Path("runs"))
    (again,) = prune.plan(Path("runs"), now=time.time()).removals
    assert prune.remove(again, now=time.time())


def test_a_removal_that_is_cut_short_leaves_nothing_that_looks_like_a_run(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make()
    add_checkpoint(run)

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    words = ["runs", "prune", "--state", "finished"]
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", killed)
        refusal(*words, code=130)
    assert all_runs(Path("runs")) == [] and not run.exists()
    left = [path for path in run.path.parent.iterdir() if path != run.path]
    assert [path.name.startswith(prune.REMOVED) for path in left] == [True]
    assert not (left[0] / "run.json").exists()
    assert "left by a removal that was cut short" in printed(*words)
    assert not left[0].exists()
