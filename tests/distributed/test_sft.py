"""Fine-tuning as people do it: conversations in, a folder that transformers generates from out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from slurmtrain.checkpoint.format.directory import committed
from slurmtrain.models.hf_export import export_hf
from slurmtrain.runs.run_dir import RunDir
from tests.distributed.test_training import alone, fit, losses
from tests.support import transformers_models as theirs
from tests.support.local_runs import assert_same_tensors
from tests.support.reading import checkpoint_tensors
from tests.unit.data.test_chat import QWEN, SPECIAL, messages, prepare, write_model_folder

VOCABULARY = 256 + len(SPECIAL)
ANSWER = "It is 42."


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Qwen2.5 with a tokenizer and a chat template."""
    pytest.importorskip("transformers")
    folder = write_model_folder(tmp_path_factory.mktemp("model"), QWEN)
    theirs.save("qwen2_5", folder, vocab_size=VOCABULARY, max_position_embeddings=128)
    return folder


def words(base: Path, data: Path, *more: str) -> list[str]:
    return [
        "experiment=sft",
        f"model.path={base}",
        f"data.path={data}",
        "parallel=ddp",
        "data.seq_len=96",
        "train.global_batch_size=4",
        "train.eval_every=0",
        "optim.warmup_steps=2",
        *more,
    ]


def test_what_does_not_count_has_no_gradient(base: Path, tmp_path: Path) -> None:
    """The last words of a user come after all that counts, so a step does not depend on what they are."""
    tokenizer = f"{base / 'tokenizer.json'}"
    weights = {}
    for loss_on in ("answers", "all"):
        for last in ("thanks", "bye..."):
            folder = tmp_path / f"{loss_on} {last}"
            said = [{"messages": messages([f"Question {n}?", ANSWER, last])} for n in range(8)]
            data = prepare(folder, said, tokenizer=tokenizer, loss_on=loss_on)
            fit(alone(), folder / "run", words(base, data, "train.steps=1", "data.packing=documents"))
            weights[loss_on, last] = checkpoint_tensors(RunDir(folder / "run").checkpoints)

    def model(key: tuple[str, str]) -> dict[str, torch.Tensor]:
        return {name: value for name, value in weights[key].items() if name.startswith("model.")}

    assert_same_tensors(model(("answers", "thanks")), model(("answers", "bye...")))
    with pytest.raises(AssertionError):
        assert_same_tensors(model(("all", "thanks")), model(("all", "bye...")))


def test_the_recipe_ends_with_a_folder_that_transformers_answers_from(base: Path, tmp_path: Path) -> None:
    import transformers

    said = [{"messages": messages([f"Question {n}?", ANSWER])} for n in range(16)]
    data = prepare(tmp_path, said, tokenizer=f"{base / 'tokenizer.json'}")
    fit(alone(), tmp_path / "run", words(base, data, "train.steps=45", "optim.lr=5e-3"))
    found = losses(tmp_path / "run")
    assert found[45] < 0.1 < found[1]
    export_hf(committed(RunDir(tmp_path / "run").checkpoints)[-1], tmp_path / "answers")

    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "answers")
    model = theirs.read(tmp_path / "answers")
    asked = tokenizer.apply_chat_template(
        messages(["Question 3?"]), add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    written = model.generate(**asked, max_new_tokens=96, do_sample=False)  # which knows where an answer ends
    answer = tokenizer.decode(written[0, asked["input_ids"].shape[1] :], skip_special_tokens=False)
    assert answer == f"<think>\n\n</think>\n\n{ANSWER}<|im_end|>"
    assert json.loads((tmp_path / "answers" / "config.json").read_text())["model_type"] == "qwen2"
