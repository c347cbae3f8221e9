"""checkpoints RUN list|verify|prune|export."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from slurmtrain.checkpoint.checkpointer import Checkpointer
from slurmtrain.checkpoint.format.directory import committed, set_aside
from slurmtrain.checkpoint.store import retention
from slurmtrain.checkpoint.store.commit import Incarnation, claim
from slurmtrain.checkpoint.store.retention import Keep
from slurmtrain.runs.create import create_run_dir
from slurmtrain.runs.run_dir import RunDir
from tests.support.commands import refusal
from tests.support.runs import printed

SHARD = "rank00000.safetensors"
LOSSES = {10: 3.0, 20: 1.0, 30: 2.0, 40: 2.5}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run with four checkpoints, and a config that keeps two."""
    monkeypatch.setenv("SLURMTRAIN_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    run_dir = create_run_dir(tmp_path / "runs", "train")
    run_dir.info_file.write_text(json.dumps({"id": run_dir.id}))
    configure(run_dir)
    checkpointer = Checkpointer(run_dir.checkpoints, incarnation=Incarnation(3, "attempt 3, job 7"), keep=Keep(last=10))
    for step, loss in LOSSES.items():
        checkpointer.save(step, model=torch.nn.Linear(64, 64), metrics={"valid_loss": loss})
    checkpointer.close()
    return run_dir


def configure(run_dir: RunDir, **values: object) -> None:
    run_dir.config_file.write_text(yaml.safe_dump({"checkpoint": {"keep_last": 2, **values}}))


def steps(run_dir: RunDir) -> list[int]:
    return [int(path.name.partition("_")[2]) for path in committed(run_dir.checkpoints)]


def flip(path: Path, name: str = SHARD) -> None:
    content = bytearray((path / name).read_bytes())
    content[len(content) // 2] ^= 1
    (path / name).write_bytes(content)


def leave_behind(run_dir: RunDir, name: str, *, hours_old: float) -> Path:
    path = run_dir.checkpoints / name
    path.mkdir()
    (path / SHARD).write_bytes(bytes(5000))
    for each in (path / SHARD, path):
        then = each.stat().st_mtime - hours_old * 3600
        os.utime(each, (then, then))
    return path


def last(*words: str, code: int = 0) -> str:
    """What `checkpoints last` prints."""
    return printed("checkpoints", "last", *words, code=code)


def contents(run_dir: RunDir) -> list[str]:
    return sorted(name for name in os.listdir(run_dir.checkpoints) if name != ".readers")


def refused(*words: str, code: int = 2) -> str:
    return refusal("checkpoints", "last", *words, code=code)


def rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.rstrip().split("   ")] for line in text.splitlines()[2:]]


# list and verify


def test_the_list_has_a_row_for_each_and_says_what_is_not_sound(run: RunDir) -> None:
    checkpointer = Checkpointer(run.checkpoints, keep=Keep(last=10))
    checkpointer.save(40, model=torch.nn.Linear(2, 2))
    checkpointer.close()
    row = rows(last())[1]
    assert (row[0], row[-1]) == ("checkpoint_0000020", "complete")
    for part in ("1 rank, 2 tensors", "valid_loss 1"):
        assert part in row
    found = committed(run.checkpoints)
    (found[0] / SHARD).unlink()
    set_aside(found[1])
    (found[2] / "COMPLETE").unlink()
    (found[3] / "manifest.json").write_text("{}")
    leave_behind(run, "checkpoint_0000050.tmp-3", hours_old=0)
    leave_behind(run, "checkpoint_0000005.removed-3", hours_old=2)
    assert [(row[0].removeprefix("checkpoint_00000"), row[-1][:42]) for row in rows(last("list"))] == [
        ("05.removed-3", "being removed, or left by a process that w"),
        ("10", f"{SHARD} cannot be read: No s"),
        ("20.damaged-1", "set aside as damaged"),
        ("30", "was not committed: it has no COMPLETE"),
        ("40", "the digest of manifest.json is not the one"),
        ("40.2", "complete"),
        ("50.tmp-3", "being written, or left by a process that w"),
    ]


def test_a_program_reads_the_same(run: RunDir) -> None:
    (run.checkpoints / "checkpoint_0000020" / SHARD).write_bytes(b"short")
    assert last("--json") == last("list", "--json") == last("--json", "list")
    found = json.loads(last("--json"))
    sound = {each["step"]: (each["complete"], bool(each["damage"])) for each in found}
    assert sound == {step: (step != 20, step == 20) for step in LOSSES} and len(found) == len(sound)
    assert (found[0]["torch"], found[0]["written_by"]) == (torch.__version__, "attempt 3, job 7")
    assert found[0]["metrics"] == {"valid_loss": 3.0} and found[0]["bytes"] > 64 * 64 * 4
    assert [each["sound"] for each in json.loads(last("verify", "--json", code=1))] == [True, False, True, True]


def test_verify_finds_one_wrong_bit_and_looks_at_one_step_if_it_is_told_to(run: RunDir) -> None:
    assert last("verify").count("sound") == 4
    flip(committed(run.checkpoints)[-1])
    assert "digest" not in last("list")  # sizes only
    said = last("verify", code=1)
    assert "checkpoint_0000010: sound (1 files" in said
    assert f"checkpoint_0000040: DAMAGED: {SHARD} is not what was written" in said
    assert last("verify", "20").startswith("checkpoint_0000020: sound")
    last("verify", "40", code=1)
    assert "has no checkpoint of step 50\n  hint: there are: 10, 20, 30, 40" in refused("verify", "50")


# prune


def test_prune_keeps_what_the_config_of_the_run_says_and_a_dry_run_says_the_same(run: RunDir) -> None:
    configure(run, keep_best=1)
    young = leave_behind(run, "checkpoint_0000050.tmp-3", hours_old=0.5)
    leave_behind(run, "checkpoint_0000050.tmp-2", hours_old=1.5)
    before, size = contents(run), sum(file.stat().st_size for file in committed(run.checkpoints)[0].iterdir())
    dry = last("prune", "--dry-run")
    assert contents(run) == before
    said = last("prune")
    assert dry.replace("would remove", "removed").replace("would be", "were") == said
    assert steps(run) == [20, 30, 40]
    assert "removed checkpoint_0000010 (not kept, " in said and f"({size + 5000} bytes)" in said
    left = [f"checkpoint_00000{step}" for step in (20, 30, 40)]
    assert sorted(os.listdir(run.checkpoints)) == [".incarnations", ".readers", *left, young.name]
    assert "nothing to remove" in last("prune")


@pytest.mark.parametrize(("words", "left"), [(["--keep-last", "3"], [20, 30, 40]), (["--damaged"], [10, 20, 30, 40])])
def test_prune_keeps_what_it_is_told_to(words: list[str], left: list[int], run: RunDir) -> None:
    set_aside(leave_behind(run, "checkpoint_0000005", hours_old=0))
    last("prune", *words)
    assert steps(run) == left
    assert bool(list(run.checkpoints.glob("*damaged*"))) == ("--damaged" not in words)  # these go on request alone


@pytest.mark.parametrize("words", [[], ["--keep-last", "2"], ["--damaged"]])
def test_nothing_goes_when_the_newest_is_damaged_or_none_is_valid(words: list[str], run: RunDir) -> None:
    found = committed(run.checkpoints)
    set_aside(found[0])
    flip(found[-1])
    before = contents(run)
    said = refused("prune", *words, code=1)
    assert "checkpoint_0000040, the newest checkpoint, is damaged, so nothing was removed" in said
    assert contents(run) == before
    for path in found[1:]:
        set_aside(path)
    before = contents(run)
    assert "has no valid checkpoint, so nothing was removed" in refused("prune", "--damaged", code=1)
    assert contents(run) == before


def test_what_is_damaged_counts_for_nothing_and_what_is_read_or_yet_to_be_evaluated_stays(run: RunDir) -> None:
    (committed(run.checkpoints)[2] / SHARD).unlink()
    with retention.reading(run.checkpoints / "checkpoint_0000010"):
        said = last("prune")
    assert steps(run) == [10, 20, 30, 40]
    assert "checkpoint_0000030 is damaged and is left alone" in said
    retention.hold(run.checkpoints, 10, "evaluation")
    last("prune")
    assert steps(run) == [10, 20, 30, 40]
    retention.release(run.checkpoints, 10, "evaluation")
    last("prune")
    assert steps(run) == [20, 30, 40]  # 30 is not one of the two that are kept


def test_a_running_job_is_not_fenced_off_by_it(run: RunDir) -> None:
    own = claim(run.checkpoints, Incarnation(4, "attempt 4"))
    checkpointer = Checkpointer(run.checkpoints, incarnation=own, keep=Keep(last=10))
    saving = checkpointer.save(50, model=torch.nn.Linear(2, 2))
    last("prune")
    saving.result()
    checkpointer.save(60, model=torch.nn.Linear(2, 2)).result()
    checkpointer.close()
    assert steps(run)[-2:] == [50, 60]


# export


def test_export_takes_the_newest_or_the_step_that_is_named(run: RunDir) -> None:
    assert last("export", "new.safetensors").startswith("new.safetensors: 2 tensors of model from checkpoint_0000040, ")
    last("export", "old.safetensors", "--step", "10", "--dtype", "bfloat16")
    new, old = (load_file(f"{name}.safetensors") for name in ("new", "old"))
    assert new["weight"].dtype == torch.float32 and old["weight"].dtype == torch.bfloat16
    assert "new.safetensors exists\n  hint: choose another name, or remove it" in refused("export", "new.safetensors")
    refused("export", "x.safetensors", "--only", "optimizer")
    flip(committed(run.checkpoints)[-1])
    refused("export", "x.safetensors", code=1)
    assert not Path("x.safetensors").exists()


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["out", "--format", "hf"], 1, "it does not say what model it holds"),
        (
            ["o.pt", "--format", "hf"],
            2,
            "--format hf writes a folder, and o.pt is the name of a file",
        ),
        (["out"], 2, "out is not the name of a file of weights"),
    ],
)
def test_an_export_that_cannot_be_is_one_sentence(words: list[str], code: int, message: str, run: RunDir) -> None:
    assert message in refused("export", *words, code=code) and not list(Path().glob("o*"))


# What RUN may be.


def test_a_directory_of_own_checkpoints_or_one_checkpoint_will_do(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = run.checkpoints.rename(run.path.parent.parent.parent / "own")
    assert len(rows(printed("checkpoints", str(directory)))) == 4
    path = directory / "checkpoint_0000020"
    assert [row[0] for row in rows(printed("checkpoints", str(path)))] == [path.name]
    assert printed("checkpoints", str(path), "verify").startswith("checkpoint_0000020: sound")
    assert "from checkpoint_0000020, " in printed("checkpoints", str(path), "export", "out.safetensors")
    refusal("checkpoints", str(path), "prune")
    printed("checkpoints", str(set_aside(path)), "verify")
    monkeypatch.chdir(directory)
    printed("checkpoints", ".", "prune")
    assert [path.name for path in committed(directory)] == ["checkpoint_0000030", "checkpoint_0000040"]


def test_a_run_without_any_is_one_sentence(tmp_path: Path) -> None:
    run_dir = create_run_dir(tmp_path, "train")
    run_dir.info_file.write_text("{}")
    for words in ([], ["verify"], ["export", str(tmp_path / "out.safetensors")]):
        assert "has no checkpoint yet" in refusal("checkpoints", str(run_dir.path), *words)
    printed("checkpoints", str(run_dir.path), "prune")
