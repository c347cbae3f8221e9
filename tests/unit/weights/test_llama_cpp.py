"""llama.cpp's converter reads an exported folder.

`LLAMA_CPP=FOLDER tests/run --slow tests/unit/weights/test_llama_cpp.py`: the folder is a copy of its repository. The
converter also needs the package sentencepiece. Without them it is skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from slurmtrain.checkpoint.checkpointer import Checkpointer
from slurmtrain.checkpoint.format.directory import committed
from slurmtrain.config.known_models import with_sizes
from slurmtrain.models.decoder import Decoder
from slurmtrain.weights.hf_export import export_hf
from slurmtrain.weights.pretrained import load_pretrained
from tests.support import transformers_models as theirs
from tests.support.transformers_models import FAMILIES

CONVERTER = "convert_hf_to_gguf.py"
LAYER = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
OTHERS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_converter_of_llama_cpp_takes_each_family_bit_by_bit(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama_cpp = Path(os.environ.get("LLAMA_CPP", "/nowhere"))
    if not (llama_cpp / CONVERTER).is_file():
        pytest.skip("LLAMA_CPP names no copy of llama.cpp")
    pytest.importorskip("sentencepiece")
    monkeypatch.syspath_prepend(str(llama_cpp / "gguf-py"))
    import gguf
    from safetensors.torch import load_file

    theirs.save(family, tmp_path / "base")
    _write_sentencepiece(tmp_path / "base" / "tokenizer.model", 61)
    config = with_sizes({"_target_": "slurmtrain.models.Decoder", "path": str(tmp_path / "base"), "max_seq_len": None})
    model = Decoder(**{name: value for name, value in config.items() if name != "_target_"})
    load_pretrained(model, tmp_path / "base")
    checkpointer = Checkpointer(tmp_path / "checkpoints", run_id="r1", config={"model": config})
    checkpointer.save(7, model=model)
    checkpointer.close()
    export_hf(committed(tmp_path / "checkpoints")[-1], tmp_path / "out", shard_bytes=20_000)

    words = [sys.executable, str(llama_cpp / CONVERTER), str(tmp_path / "out"), "--outtype", "f32"]
    done = subprocess.run([*words, "--outfile", str(tmp_path / "out.gguf")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    read = gguf.GGUFReader(tmp_path / "out.gguf")
    architecture = read.fields["general.architecture"].contents()
    described = json.loads((tmp_path / "out" / "config.json").read_text())
    exported = {
        name: value for file in (tmp_path / "out").glob("*.safetensors") for name, value in load_file(file).items()
    }
    expected = {_gguf_name(name): _laid_out(name, value, architecture, described) for name, value in exported.items()}
    written = {tensor.name: tensor.data.tolist() for tensor in read.tensors}
    if family.startswith("llama3"):
        assert written.pop("rope_freqs.weight")
    assert written == {name: value.tolist() for name, value in expected.items()}
    assert read.fields[f"{architecture}.attention.head_count_kv"].contents() == described["num_key_value_heads"]
    assert len(read.fields["tokenizer.ggml.tokens"].contents()) == 61


def _gguf_name(name: str) -> str:
    module, kind = name.rsplit(".", 1)
    if module in OTHERS:
        return f"{OTHERS[module]}.{kind}"
    _, _, layer, inner = module.split(".", 3)
    return f"blk.{layer}.{LAYER[inner]}.{kind}"


def _laid_out(name: str, tensor: Tensor, architecture: str, config: dict[str, Any]) -> Tensor:
    """What llama.cpp keeps: for "llama" rotary pairs lie side by side, where transformers has first all first halves."""
    if architecture != "llama" or not name.endswith(("q_proj.weight", "k_proj.weight")):
        return tensor
    heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
    pairs: Tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2)
    return pairs.flatten(0, 2)


def _write_sentencepiece(path: Path, size: int) -> None:
    """A model of sentencepiece with letters for tokens."""
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto()
    for number, piece in enumerate(["<unk>", "<s>", "</s>", *(chr(0x100 + each) for each in range(size - 3))]):
        model.pieces.add(piece=piece, score=-float(number), type={0: 2, 1: 3, 2: 3}.get(number, 1))
    model.trainer_spec.model_type = 2
    path.write_bytes(model.SerializeToString())
