"""The parity matrix: every layout computes what one process computes.

A row trains a small Decoder for a few steps through the trainer, on real ranks that meet through gloo, and compares loss and
gradient norm of every step with those of one process. Samples have very different numbers of tokens that count, so ranks and
micro batches have unequal shares; where they are packed, they hold documents of very different lengths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slurmtrain.config.compose import compose
from slurmtrain.config.schema import Config
from slurmtrain.data.loading.batches import IGNORED_TARGET
from slurmtrain.observe.metrics import read_metrics
from slurmtrain.rank.attempt_context import AttemptContext, Timeline
from slurmtrain.rank.distributed_context import DistributedContext
from slurmtrain.rank.jobs.train import build_trainer
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.environment import Environment
from slurmtrain.system import signals
from slurmtrain.training.agreement import StopAgreement

FIELDS = ("loss", "grad_norm", "param_norm", "valid_loss")
STEPS = 3  # the second is of updated weights, the third of moments that have a history
# Relative. Loss and gradient are sums over the n = 8 x 64 tokens of a step, whose terms another layout adds in another order:
# eps * sqrt(n) = 2**-24 * 22.6 = 1.3e-6 if rounding errors are independent (Higham 2002, section 2.8); measured, a fifth of it.
BOUND = 1e-6
# A number in bfloat16 is off by 2**-9 of itself at most. From token to loss it goes through 4 layers with about 8 roundings
# each: sqrt(32) * 2**-9 if they are independent. Compared with one process in float32.
BFLOAT16 = 32**0.5 * 2**-9


@dataclass(frozen=True)
class Row:
    """Attributes:
    overrides: the layout.
    model: the model's, also for the one process it is compared with.
    slow: not in every test run.
    """

    name: str
    ranks: int
    overrides: tuple[str, ...]
    model: tuple[str, ...] = ()
    bound: float = BOUND
    slow: bool = False


def _row(name: str, ranks: int, parallel: str, model: str = "", *, micro: int | None = None, **more: Any) -> Row:
    overrides = [f"parallel.{word}" for word in parallel.split()]
    if micro is not None:
        overrides.append(f"train.micro_batch_size={micro}")
    return Row(name, ranks, tuple(overrides), tuple(model.split()), **more)


UNTIED = "model.tie_embeddings=false"
OWN = "model._target_=tests.parity.own_model.OwnModel model.tie_embeddings=false"
QWEN = "model.qkv_bias=true model.qk_norm=true"
TWO_LAYERS = "model.n_layers=2"  # each is compiled by itself, which takes seconds
ONE_SIZE = "+data.valid=8"  # a smaller last batch is compiled anew, which takes TP longest; FSDP's row has one
PACKED = "+data.packed=true"
PACKED_UNTIED = f"{UNTIED} {PACKED}"
ROWS = [
    _row("DDP 4, accumulation", 4, "", micro=1),
    _row("FSDP 3, parts of unequal size", 3, "dp_replicate=1 dp_shard=3", "train.global_batch_size=6", slow=True),
    _row("FSDP 4, accumulation", 4, "dp_replicate=1 dp_shard=4", micro=1),
    _row("FSDP 2, nothing freed, accumulation", 2, "dp_replicate=1 dp_shard=2 reshard_after_forward=false", micro=1,
        slow=True),
    _row("FSDP 4, kept by groups of 2", 4, "dp_replicate=1 dp_shard=4 reshard_after_forward=2", micro=1, slow=True),
    _row("HSDP 2 x 2, accumulation", 4, "dp_shard=2", micro=1),
    _row("TP 2, untied", 2, "tp=2", UNTIED, slow=True),
    _row("TP 2, biases and qk-norm", 2, "tp=2", QWEN),
    _row("TP 2 without sequence parallel", 2, "tp=2 sequence_parallel=false", QWEN),
    _row("TP 4", 4, "tp=4", "model.n_kv_heads=4", slow=True),
    _row("CP 2", 2, "cp=2"),
    _row("CP 2, ulysses", 2, "cp=2 cp_method=ulysses", slow=True),
    _row("CP 4", 4, "cp=4", QWEN, slow=True),
    _row("PP 2, 1F1B, accumulation", 2, "pp=2", UNTIED, micro=1),
    _row("PP 4, GPipe", 4, "pp=4 pp_schedule=gpipe", UNTIED, slow=True),
    _row("PP 2, interleaved 1F1B", 2, "pp=2 pp_schedule=interleaved_1f1b", UNTIED, micro=2, slow=True),
    _row("PP 2, zero bubble", 2, "pp=2 pp_schedule=zero_bubble", UNTIED, micro=2, slow=True),
    _row("PP 2, 1F1B, tied", 2, "pp=2"),
    _row("PP 2, zero bubble, tied", 2, "pp=2 pp_schedule=zero_bubble", micro=2, slow=True),
    _row("PP 4, GPipe, tied", 4, "pp=4 pp_schedule=gpipe", slow=True),
    _row("PP 2 x FSDP 2, interleaved 1F1B, tied", 4, "dp_replicate=1 dp_shard=2 pp=2 pp_schedule=interleaved_1f1b",
        slow=True),
    _row("FSDP 2 x TP 2", 4, "dp_replicate=1 dp_shard=2 tp=2", micro=2),
    _row("FSDP 2 x CP 2", 4, "dp_replicate=1 dp_shard=2 cp=2", micro=2),
    _row("PP 2 x FSDP 2, zero bubble", 4, "dp_replicate=1 dp_shard=2 pp=2 pp_schedule=zero_bubble", UNTIED, micro=1),
    _row("HSDP 2 x 2 x TP 2", 8, "dp_shard=2 tp=2", micro=1, slow=True),
    _row("PP 2 x FSDP 2 x TP 2", 8, "dp_replicate=1 dp_shard=2 tp=2 pp=2", UNTIED, micro=1, slow=True),
    _row("FSDP 2 x CP 2 x TP 2", 8, "dp_replicate=1 dp_shard=2 tp=2 cp=2", QWEN, slow=True),
    _row("FSDP 2, full checkpointing", 2, "dp_replicate=1 dp_shard=2 activation_checkpointing=full"),
    _row("FSDP 2, selective checkpointing", 2, "dp_replicate=1 dp_shard=2 activation_checkpointing=selective", slow=True),
    _row("PP 2, full checkpointing", 2, "pp=2 activation_checkpointing=full", UNTIED, slow=True),
    _row("1 rank, bfloat16", 1, "param_dtype=bfloat16", bound=BFLOAT16),
    _row("FSDP 2, bfloat16", 2, "dp_replicate=1 dp_shard=2 param_dtype=bfloat16", bound=BFLOAT16),
    _row("TP 2, bfloat16", 2, "tp=2 param_dtype=bfloat16", bound=BFLOAT16, slow=True),
    _row("PP 2 x FSDP 2 x TP 2, bfloat16, sums too", 8,
        "dp_replicate=1 dp_shard=2 tp=2 pp=2 param_dtype=bfloat16 reduce_dtype=bfloat16", UNTIED, bound=BFLOAT16,
        slow=True),
    _row("FSDP 2, a model of one's own", 2, "dp_replicate=1 dp_shard=2", OWN),
    _row("TP 2, a model of one's own", 2, "tp=2", OWN),
    _row("PP 2 x FSDP 2, a model of one's own", 4, "dp_replicate=1 dp_shard=2 pp=2", OWN),
    _row("FSDP 2, compiled", 2, "dp_replicate=1 dp_shard=2 compile=true", TWO_LAYERS),
    _row("TP 2, compiled", 2, "tp=2 compile=true", f"model.n_layers=1 {ONE_SIZE}", slow=True),
    _row("DDP 2, packed", 2, "", PACKED, micro=2),
    _row("TP 2, packed", 2, "tp=2", PACKED),
    _row("TP 2 without sequence parallel, packed", 2, "tp=2 sequence_parallel=false", PACKED, slow=True),
    _row("CP 2, packed", 2, "cp=2", PACKED),
    _row("CP 2, ulysses, packed", 2, "cp=2 cp_method=ulysses", PACKED),
    _row("FSDP 2 x CP 2 x TP 2, packed", 8, "dp_replicate=1 dp_shard=2 tp=2 cp=2", PACKED, slow=True),
    _row("PP 2, GPipe, packed", 2, "pp=2 pp_schedule=gpipe", PACKED_UNTIED, micro=2, slow=True),
    _row("PP 2, interleaved 1F1B, packed", 2, "pp=2 pp_schedule=interleaved_1f1b", PACKED_UNTIED, micro=2, slow=True),
    _row("PP 2, zero bubble, packed", 2, "pp=2 pp_schedule=zero_bubble", PACKED_UNTIED, micro=2),
    _row("PP 2 x CP 2, packed", 4, "pp=2 cp=2 cp_method=ulysses", PACKED_UNTIED, slow=True),
    _row("PP 2 x FSDP 2 x TP 2, packed", 8, "dp_replicate=1 dp_shard=2 tp=2 pp=2", PACKED_UNTIED, micro=1, slow=True),
    _row("FSDP 2, packed, selective checkpointing", 2, "dp_replicate=1 dp_shard=2 activation_checkpointing=selective",
        PACKED),
]  # fmt: skip


class RaggedText:
    """Data in which sample i has 1 + i * i % 64 targets that count; if `packed`, of up to five documents."""

    def __init__(self, packed: bool = False, valid: int = 12, **ignored: Any):
        self.train, self.valid = _Ragged(packed, 64), _Ragged(packed, valid)


class _Ragged:
    def __init__(self, packed: bool, samples: int):
        self._packed, self._samples = packed, samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(256, (65,), generator=generator)
        targets = tokens[1:].clone()
        targets[1 + (index * index) % 64 :] = IGNORED_TARGET
        sample = {"inputs": tokens[:-1], "targets": targets}
        if self._packed:
            ends = torch.randint(1, 64, (4,), generator=generator).sort().values
            sample["documents"] = torch.searchsorted(ends, torch.arange(64), right=True).int()
        return sample


def config_of(row: Row) -> Config:
    return compose(
        [
            "experiment=smoke",
            f"data._target_={__name__}.RaggedText",
            f"cluster.tasks_per_node={row.ranks}",
            *("train.tensorboard=false", "train.log_every=1", f"train.steps={STEPS}", f"train.eval_every={STEPS}"),
            *("model.n_layers=4", "optim.lr=1e-3", "optim.grad_clip=0.5", "checkpoint.every_steps=0"),
            *row.model,
            *row.overrides,
        ]
    )


def train_row(distributed: DistributedContext, folder: Path, config: Config) -> None:
    """On every rank of the row."""
    folder.mkdir(parents=True, exist_ok=True)
    where = AttemptContext(RunDir(folder), 1, supervised=True)
    where.attempt_dir.path.mkdir(parents=True, exist_ok=True)
    build_trainer(
        config, distributed, where, StopAgreement(signals.StopFlag(), distributed.control_group), Timeline()
    ).fit()


def train_rows(distributed: DistributedContext, folder: Path, configs: Mapping[str, Config]) -> None:
    """One row after another, on the ranks that they all have.

    Args:
        configs: by the rows' names; made once for all ranks, since that takes as long as to train.
    """
    for name, config in configs.items():
        train_row(distributed, folder / name, config)


def train_alone(folder: Path, model: Sequence[str]) -> None:
    torch.set_num_threads(1)
    row = Row("alone", 1, (), tuple(model))
    alone = DistributedContext(Environment(source="single"), torch.device("cpu"))
    train_row(alone, folder / reference_name(model), config_of(row))


def reference_name(model: Sequence[str]) -> str:
    return " ".join(["one process", *model])


def compare(folder: Path, row: Row) -> dict[str, float]:
    """Largest relative difference to one process, over all steps, of losses and norms."""
    ours, theirs = (_values(folder / name) for name in (row.name, reference_name(row.model)))
    assert ours.keys() == theirs.keys() and len(ours) == 3 * STEPS + 1
    found = dict.fromkeys(FIELDS, 0.0)
    for (field, step), value in theirs.items():
        found[field] = max(found[field], abs(ours[field, step] - value) / abs(value))
    return found


def _values(folder: Path) -> dict[tuple[str, int], float]:
    return {
        (field, record["step"]): record[field]
        for record in read_metrics(RunDir(folder).metrics_file)
        for field in FIELDS
        if field in record
    }
