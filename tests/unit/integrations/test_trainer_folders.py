"""A checkpoint of Hugging Face's Trainer that a kill left torn is recognised, whatever the kill has left out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from slurmtrain.integrations.trainer_folders import newest_complete, torn


def write(folder: Path, step: int, *, ranks: int = 2) -> Path:
    """As Trainer writes it on several ranks, with the callback."""
    checkpoint = folder / f"checkpoint-{step}"
    checkpoint.mkdir(parents=True)
    save_file({"weight": torch.ones(100)}, checkpoint / "model.safetensors")
    for name in ("optimizer.pt", "scheduler.pt", *(f"rng_state_{rank}.pth" for rank in range(ranks))):
        torch.save({"values": torch.ones(100)}, checkpoint / name)
    callback = {"args": {}, "attributes": {"world_size": ranks}}
    state = {"global_step": step, "stateful_callbacks": {"SlurmtrainCallback": callback}}
    (checkpoint / "trainer_state.json").write_text(json.dumps(state))
    return checkpoint


def cut(name: str) -> Callable[[Path], None]:
    def change(checkpoint: Path) -> None:
        path = checkpoint / name
        path.write_bytes(path.read_bytes()[:-30])

    return change


def zeros(name: str) -> Callable[[Path], None]:
    def change(checkpoint: Path) -> None:
        path = checkpoint / name
        path.write_bytes(bytes(path.stat().st_size))

    return change


def without(name: str) -> Callable[[Path], None]:
    return lambda checkpoint: (checkpoint / name).unlink()


def shards(checkpoint: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (without("trainer_state.json"), "it has no trainer_state.json, which Trainer writes last"),
        (cut("trainer_state.json"), "its trainer_state.json is not whole"),
        (without("rng_state_1.pth"), "the random state of rank 1 is missing"),
        (cut("model.safetensors"), "model.safetensors: it is cut"),
        (zeros("model.safetensors"), "model.safetensors: it is cut"),
        (cut("optimizer.pt"), "optimizer.pt: it is cut"),
        (shards, "model.safetensors.index.json: there is no model-00001-of-00002.safetensors"),
        (
            lambda checkpoint: (checkpoint / "checkpoint-is-incomplete.txt").touch(),
            "it has a checkpoint-is-incomplete.txt",
        ),
    ],
)
def test_a_torn_checkpoint_is_moved_aside_and_the_one_before_it_is_taken(
    damage: Callable[[Path], None], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    older, newest = write(tmp_path, 90), write(tmp_path, 100)
    damage(newest)
    assert torn(newest) == reason
    assert newest_complete(tmp_path) == older
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-90", "torn-checkpoint-100"]
    assert reason in caplog.text and "torn-checkpoint-100" in caplog.text


def test_complete_checkpoints_are_taken_as_they_are(tmp_path: Path) -> None:
    assert newest_complete(tmp_path / "missing") is None
    write(tmp_path, 9)
    newest = write(tmp_path, 10, ranks=1)
    (newest / "rng_state_0.pth").rename(newest / "rng_state.pth")  # a single rank's is called so
    (tmp_path / "checkpoint-best").mkdir()  # not Trainer's
    (newest / "evaluated").touch()  # of a callback of somebody's, as is the next
    (newest / "answers.json").write_text('{"line": 1}\n{"line": 2}\n')
    assert newest_complete(tmp_path) == newest
    assert torn(newest) is None


def test_folders_that_were_torn_twice_at_a_step_are_both_kept(tmp_path: Path) -> None:
    for _ in range(2):
        without("trainer_state.json")(write(tmp_path, 5))
        assert newest_complete(tmp_path) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["torn-checkpoint-5", "torn-checkpoint-5.2"]
