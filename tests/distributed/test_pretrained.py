"""Weights of a folder of Hugging Face in every layout: the same bits, the same logits, and a run that begins with them."""

from __future__ import annotations

import dataclasses
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from slurmtrain.checkpoint import module_state
from slurmtrain.checkpoint.checkpointer import Checkpointer
from slurmtrain.checkpoint.format.directory import committed, step_of
from slurmtrain.checkpoint.format.tensor_index import Box
from slurmtrain.checkpoint.local_tensors import box_of, local
from slurmtrain.checkpoint.safetensors_files import Wanted, read, tensors_of
from slurmtrain.checkpoint.store import retention
from slurmtrain.config.compose import compose
from slurmtrain.config.families import HUGGING_FACE, hugging_face_name, with_sizes
from slurmtrain.config.parallel_dims import parallel_dims_of
from slurmtrain.config.schema import Config
from slurmtrain.models.huggingface import HuggingFace
from slurmtrain.models.pretrained import load_pretrained
from slurmtrain.our_decoder import DECODER
from slurmtrain.parallel.parallelize import DistributedModel
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runtime.distributed_context import DistributedContext
from slurmtrain.runtime.exports import Exports
from slurmtrain.runtime.jobs.build_model import distribute_model
from tests.distributed.test_training import StopAt, alone, fit, trainer
from tests.support import transformers_models as theirs
from tests.support.gloo import GlooRanks
from tests.support.transformers_models import TOKENS

LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "ddp": {},
        "fsdp": {"dp_shard": 2},
        "tp": {"tp": 2, "sequence_parallel": True},
        "pp": {"pp": 2},
    },
    4: {
        "fsdp": {"dp_shard": 4},
        "fsdp x tp": {"dp_shard": 2, "tp": 2, "sequence_parallel": False},
        "fsdp x pp": {"dp_shard": 2, "pp": 2},
    },
}
# Tied and untied, GQA, biases, norms of queries and keys; a vocabulary that no number of ranks divides, except for tensor
# parallelism, which wants one that they do.
FAMILIES = ("llama3", "qwen2_5", "qwen3")
VOCABULARIES = {61: "odd", 62: "even"}
# As in tests/unit/models/test_pretrained.py; a sum over two ranks adds in yet another order.
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models of transformers, and beside each its logits, so that the ranks need not compute them."""
    pytest.importorskip("transformers")
    root = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        for size, name in VOCABULARIES.items():
            folder = root / f"{family}-{name}"
            torch.save(theirs.logits_of(theirs.save(family, folder, vocab_size=size)), folder / "logits")
    return root


def load_in_all_layouts(distributed: DistributedContext, root: Path, size: int) -> dict[str, list[str]]:
    """By layout and model, the tensors whose bits differ, and the logits' largest difference if it is too large."""
    plain = compose(["experiment=smoke", "train.device=cpu", f"cluster.tasks_per_node={size}"])
    found = {}
    for layout, sizes in LAYOUTS[size].items():
        for family in FAMILIES:
            folder = root / f"{family}-{'even' if 'tp' in sizes else 'odd'}"
            model = with_sizes({"_target_": DECODER, "path": str(folder)})
            name = f"{layout}, {family}"
            found[name] = loaded_wrongly(distributed, plain, sizes, model, folder, hugging_face_name)
    if size == 2:
        folder = root / "qwen2_5-odd"
        model = {"_target_": HUGGING_FACE, "path": str(folder)}
        name = "fsdp, model=huggingface"
        found[name] = loaded_wrongly(distributed, plain, {"dp_shard": 2}, model, folder, HuggingFace.stored_name)
    return found


def loaded_wrongly(
    distributed: DistributedContext,
    plain: Config,
    sizes: dict[str, Any],
    model: dict[str, Any],
    folder: Path,
    name_of: Callable[[str], str | None],
) -> list[str]:
    config = dataclasses.replace(plain, model=model, parallel=dataclasses.replace(plain.parallel, **sizes))
    laid_out, parameters, *_ = distribute_model(config, parallel_dims_of(config), distributed)
    load_pretrained(laid_out.model, folder)
    wrong = differing(laid_out.model, folder, name_of)
    held = sum(local(parameter).numel() for parameter in laid_out.model.parameters())
    off = (logits(laid_out) - torch.load(folder / "logits")).abs().max().item()
    wrong += [f"logits by {off:.2g}"] if off > TOLERANCE else []
    shards = sizes.get("dp_shard", 1) if sizes.keys() == {"dp_shard"} else 1
    uneven = sum(parameter.shape[-1] for parameter in laid_out.model.parameters())  # a row more or less of each
    return wrong + ([f"it holds {held} of {parameters}"] if held > parameters / shards + uneven else [])


def differing(model: torch.nn.Module, folder: Path, name_of: Callable[[str], str | None]) -> list[str]:
    """The tensors that this rank holds, and whose bits are not those of the folder."""
    stored, wrong = tensors_of(folder), []
    for name, tensor in module_state.entries(model).items():
        source = stored.get(name_of(name) or "") or stored["model.embed_tokens.weight"]
        whole = torch.empty(source.shape)
        read([Wanted(source, Box.whole(source.shape), whole)])
        if not torch.equal(whole[box_of(name, tensor).within(Box.whole(source.shape))], local(tensor.detach())):
            wrong.append(name)
    return wrong


@torch.no_grad()
def logits(laid_out: DistributedModel) -> Tensor:
    """The logits of TOKENS on every rank; through the stages of a pipeline, one after another."""
    if laid_out.dims.pp == 1:
        return whole(laid_out.stages[0](TOKENS), laid_out)
    x = TOKENS
    for stage in range(laid_out.stage_count):
        if stage in laid_out.stage_indices:
            x = whole(laid_out.stages[laid_out.stage_indices.index(stage)](x), laid_out)
        shape = [x.contiguous() if stage in laid_out.stage_indices else None]
        dist.broadcast_object_list(shape, src=laid_out.dims.first_rank(stage))
        x = shape[0]  # type: ignore[assignment]
    return x


def whole(output: Tensor, laid_out: DistributedModel) -> Tensor:
    """Logits that tensor parallelism has left divided along the vocabulary, put together."""
    if isinstance(output, DTensor):
        return output.full_tensor()
    if laid_out.dims.tp == 1:
        return output
    parts: list[Any] = [None] * laid_out.dims.tp
    dist.all_gather_object(parts, output.contiguous(), group=laid_out.group("tp"))
    return torch.cat(parts, dim=-1)


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_the_weights_and_the_logits_are_those_of_the_folder_in_every_layout(
    ranks: int, folders: Path, gloo_ranks: GlooRanks
) -> None:
    for found in gloo_ranks(ranks, load_in_all_layouts, folders, ranks, timeout_s=400):
        assert {where: what for where, what in found.items() if what} == {}


def test_a_run_begins_with_the_weights_exports_what_it_makes_of_them_and_goes_on_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    folder, run = tmp_path / "model", RunDir(tmp_path / "run")
    theirs.save("mistral", folder, vocab_size=259)
    words = ["model=hf", f"model.path={folder}", "data.seq_len=32", "train.eval_every=0", "checkpoint.every_steps=0"]
    begun = trainer(alone(), run.path, words, StopAt(0))
    assert begun.fit().step == 0
    assert differing(begun.state.distributed_model.model, folder, hugging_face_name) == []
    (started,) = [event for event in run.events() if event["event"] == "fresh start"]
    assert (started["weights_from"], started["step"]) == (str(folder), 0) and "weights_of_step" not in started

    trained = trainer(alone(), run.path, [*words, "train.steps=2", "checkpoint.export_every_steps=2"])
    assert trained.fit().finished
    (exported,) = [event for event in run.events() if event["event"] == "exported"]
    assert (exported["step"], exported["folder"]) == (2, str(run.exports / "step_0000002"))
    again = theirs.read(run.exports / "step_0000002")
    assert type(again).__name__ == "MistralForCausalLM"
    assert {name: value.tolist() for name, value in again.state_dict().items()} == {
        hugging_face_name(name): value.bfloat16().tolist()
        for name, value in trained.state.distributed_model.model.state_dict().items()
    }
    assert sorted(path.name for path in run.exports.iterdir()) == ["export.log", "step_0000002"]

    # From here on its own checkpoints count; and an export that fails is told, and fails nothing else.
    for file in folder.glob("*.safetensors"):
        file.unlink()
    monkeypatch.setattr(Exports, "_run", lambda self, words: ("the disk is full", 1))
    words += ["train.steps=4", "checkpoint.export_every_steps=4", "checkpoint.allow=[config]"]
    assert fit(alone(), run.path, words, attempt=2).first_step == 2
    (failed,) = [event for event in run.events() if event["event"] == "export failed"]
    assert (failed["step"], failed["error"]) == (4, "the disk is full")
    assert sorted(path.name for path in run.exports.iterdir()) == ["export.log", "step_0000002"]


def test_a_checkpoint_stays_until_it_is_exported_and_the_next_attempt_makes_what_this_one_could_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, begun, go_on = RunDir(tmp_path), threading.Event(), threading.Event()

    def slow(self: Exports, words: list[str]) -> tuple[str, int]:
        begun.set()
        with self._condition:
            self._condition.wait_for(lambda: self._ended or go_on.is_set(), 60)
        if self._ended:
            return "it was ended", -15
        Path(words[6]).mkdir()
        return "", 0

    monkeypatch.setattr(Exports, "_run", slow)
    model = torch.nn.Linear(2, 2)
    checkpointer = Checkpointer(run.checkpoints, run_id=run.id)
    events: list[Any] = []
    exports = Exports(run, "bfloat16", lambda event, **values: events.append((event, values["step"])))
    exports.ask(1)
    checkpointer.save(1, model=model).wait()
    exports.committed(1)
    assert begun.wait(60)
    for step in (2, 3, 4):
        checkpointer.save(step, model=model).wait()
    checkpointer.close()  # which finishes cleaning up, too
    assert [step_of(path) for path in committed(run.checkpoints)] == [1, 3, 4]
    exports.close()
    assert events == []
    go_on.set()
    second = Exports(run, "bfloat16", lambda event, **values: events.append((event, values["step"])))
    second.finish()
    second.close()
    assert events == [("exported", 1)] and (run.exports / "step_0000001").is_dir()
    assert [path.name for path in run.exports.iterdir()] == ["step_0000001"]
    assert retention.in_use(run.checkpoints, time.time()) == set()


def test_an_export_that_a_preemption_ends_before_the_ranks_have_stopped_is_made_by_the_next_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SLURM sends SIGTERM to all processes of the job, and the ranks first finish their step."""
    run, events = RunDir(tmp_path), list[tuple[str, int]]()
    checkpointer = Checkpointer(run.checkpoints, run_id=run.id)
    checkpointer.save(1, model=torch.nn.Linear(2, 2)).wait()
    checkpointer.close()

    def made(self: Exports, words: list[str]) -> tuple[str, int]:
        Path(words[6]).mkdir()
        return "", 0

    monkeypatch.setattr(Exports, "_run", lambda self, words: ("", -signal.SIGTERM))
    for _ in range(2):
        exports = Exports(run, None, lambda event, **values: events.append((event, values["step"])))
        exports.ask(1)
        exports.finish()
        exports.close()
        monkeypatch.setattr(Exports, "_run", made)
    assert events == [("exported", 1)]
