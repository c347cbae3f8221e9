"""Weights of other programs as a checkpoint."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp

from slurmtrain.checkpoint import safetensors_files
from slurmtrain.checkpoint.checkpointer import Checkpointer
from slurmtrain.checkpoint.errors import CheckpointError
from slurmtrain.checkpoint.format.directory import committed
from slurmtrain.checkpoint.format.headers import find_unsound
from slurmtrain.checkpoint.format.manifest import read_manifest
from slurmtrain.checkpoint.restore.reader import load
from slurmtrain.errors import UsageError
from slurmtrain.models.decoder import Decoder
from slurmtrain.weights.import_weights import import_weights, imported_names

SIZES: dict[str, Any] = {"vocab_size": 61, "dim": 48, "n_layers": 2, "n_heads": 4, "max_seq_len": 16}


@pytest.fixture
def model() -> Decoder:
    torch.manual_seed(3)
    return Decoder(**SIZES)


def restored(checkpoint: Path, model: Decoder) -> dict[str, Tensor]:
    """The state of another decoder that begins with a checkpoint, as checkpoint.restore_only=model does."""
    other = Decoder(**SIZES)
    checkpointer = Checkpointer(checkpoint.parent.parent / "other", config={"model": {"dim": 48}})
    assert checkpointer.restore(path=checkpoint, as_start=True, model=other) is not None
    checkpointer.close()
    return other.state_dict()


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_state_dict_of_torch_becomes_a_checkpoint(model: Decoder, tmp_path: Path) -> None:
    for number, values in enumerate(
        [
            model.state_dict(),
            {"model": model.state_dict(), "optimizer": {"lr": torch.tensor(0.1)}, "step": 5},
            {f"module._orig_mod.{name}": value for name, value in model.state_dict().items()},
        ]
    ):
        torch.save(values, tmp_path / "weights.pt")
        done = import_weights(tmp_path / "weights.pt", tmp_path / f"start{number}")
        assert done.path == committed(tmp_path / f"start{number}")[-1] and done.path.name == "checkpoint_0000000"
        assert same(restored(done.path, model), model.state_dict())
        assert find_unsound(done.path, read_manifest(done.path)) == []
    assert done.tensors == len(model.state_dict()) and done.size == 4 * model.num_parameters()


def test_types_without_a_name_in_safetensors_are_kept(tmp_path: Path) -> None:
    weights = {"freqs": torch.randn(4, 2, dtype=torch.complex64), "w": torch.randn(3, 4).to(torch.float8_e4m3fnuz)}
    torch.save(weights | {"turned": weights["freqs"].conj()}, tmp_path / "weights.pt")
    found = load(import_weights(tmp_path / "weights.pt", tmp_path / "start").path)
    assert torch.equal(found["model.turned"], weights["freqs"].conj())
    assert torch.equal(found["model.freqs"], weights["freqs"])
    assert torch.equal(found["model.w"].view(torch.uint8), weights["w"].view(torch.uint8))


def test_a_file_that_holds_code_is_refused_and_executes_nothing(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "executed"),)

    torch.save({"weight": torch.zeros(2), "evil": Evil()}, tmp_path / "weights.pt")
    with pytest.raises(CheckpointError, match="could execute code"):
        import_weights(tmp_path / "weights.pt", tmp_path / "start")
    assert not (tmp_path / "executed").exists() and not (tmp_path / "start").exists()


@pytest.mark.parametrize("content", [b"", b"hello", b"\n"])
def test_a_file_that_torch_has_not_written_is_refused_in_a_sentence(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "weights.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"weights\.pt is not a torch\.save file: \S|could execute code: \S"):
        import_weights(tmp_path / "weights.pt", tmp_path / "start")


def test_a_folder_of_torch_distributed_checkpoint_is_refused_with_torchs_own_conversion(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(2)}, "optim": {"lr": torch.tensor(0.1)}}, tmp_path / "state.pt")
    torch_save_to_dcp(tmp_path / "state.pt", tmp_path / "dcp")
    with pytest.raises(UsageError, match="is a folder of torch") as refused:
        import_weights(tmp_path / "dcp", tmp_path / "start")
    assert refused.value.hint is not None and f"dcp_to_torch {tmp_path / 'dcp'} FILE.pt" in refused.value.hint
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "again.pt")
    assert list(load(import_weights(tmp_path / "again.pt", tmp_path / "start").path)) == ["model.w"]
    with pytest.raises(UsageError, match="holds no tensors 'modle'"):
        import_weights(tmp_path / "again.pt", tmp_path / "start", only="modle")


def test_names_of_hugging_face_become_the_decoders() -> None:
    names = [
        "model.embed_tokens.weight",
        "model.layers.11.mlp.up_proj.weight",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
    ]
    assert imported_names([*names, "lm_head.weight"], None) == {
        "model.embed_tokens.weight": "embedding.weight",
        "model.layers.11.mlp.up_proj.weight": "blocks.11.feed_forward.up.weight",
        "lm_head.weight": "output.weight",
    }
    assert imported_names(["model.a.weight", "optim.state.a"], None) == {"model.a.weight": "a.weight"}
    phi = ["model.layers.0.self_attn.qkv_proj.weight", "lm_head.weight"]
    assert imported_names(phi, None) == {name: name for name in phi}
    assert imported_names(["encoder.a", "head.b"], None) == {"encoder.a": "encoder.a", "head.b": "head.b"}


def test_tensors_of_a_family_that_the_decoder_does_not_compute_keep_their_names(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"model.norm.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    for kind, name in (("gemma", "model.norm.weight"), ("llama", "norm.weight")):
        (tmp_path / "config.json").write_text(f'{{"model_type": "{kind}"}}')
        assert list(load(import_weights(tmp_path, tmp_path / kind).path)) == [f"model.{name}"]


def test_a_file_of_safetensors_is_imported(model: Decoder, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    done = import_weights(tmp_path / "weights.safetensors", tmp_path / "start")
    assert same(restored(done.path, model), model.state_dict())
    (tmp_path / "weights.safetensors").write_bytes(b"no file of safetensors")
    with pytest.raises(CheckpointError, match="is damaged, or not a safetensors file"):
        safetensors_files.tensors_of(tmp_path / "weights.safetensors")
