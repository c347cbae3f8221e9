"""A checkpoint of Hugging Face's Trainer that a kill left torn is recognised, whatever the kill has left out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from slurmtrain.integrations.transformers import newest_complete, torn


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


ASIDE = ".incomplete-checkpoint-100-attempt-0"


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (without("trainer_state.json"), "it has no trainer_state.json, which Trainer writes last"),
        (cut("trainer_state.json"), "its trainer_state.json is not whole"),
        (without("rng_state_1.pth"), "the random state of rank 1 is missing"),
        (cut("model.safetensors"), "model.safetensors: it is cut"),
        (zeros("model.safetensors"), "model.safetensors: it is cut"),
        (cut("optimizer.pt"), "optimizer.pt: it is cut"),
    ],
)
def test_a_torn_checkpoint_is_moved_aside_and_the_one_before_it_is_taken(
    damage: Callable[[Path], None], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    older, newest = write(tmp_path, 90), write(tmp_path, 100)
    damage(newest)
    assert torn(newest) == reason
    assert newest_complete(tmp_path) == older
    assert sorted(path.name for path in tmp_path.iterdir()) == [ASIDE, "checkpoint-90"]
    assert reason in caplog.text and ASIDE in caplog.text


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


def test_a_checkpoint_of_an_older_trainer_is_complete(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, 10)
    (checkpoint / "trainer_state.json").write_text('{"global_step": 10}')
    assert newest_complete(tmp_path) == checkpoint
