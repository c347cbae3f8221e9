"""The dry run of a layout: the real model on the real mesh, without GPUs, ranks or memory; against sums by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmtrain.cli import main
from slurmtrain.config.compose import compose
from slurmtrain.config.parallel_dims import parallel_dims_of
from slurmtrain.config.schema import Config
from slurmtrain.errors import ConfigError
from slurmtrain.launch import checks
from slurmtrain.planner.fit import memory_of
from slurmtrain.runtime.jobs.dry_run import dry_run
from tests.support.commands import Cli
from tests.support.fake_slurm import FakeSlurm
from tests.support.runs import refused

pytestmark = pytest.mark.filterwarnings("ignore")

ROOT = str(Path(__file__).parents[3])
TIGHT = ["+cluster=h100x8", "model=llama3_8b", "parallel=fsdp", "cluster.gpu_memory_gb=40"]
TIGHT += ["parallel.param_dtype=null", "data.seq_len=256"]
# Bytes of an element: parameter, gradient, two moments of Adam. Adam counts its steps in 4 bytes for each parameter.
FLOAT32 = 4


def test_72b_on_16_nodes_of_8_gpus_is_what_one_counts_by_hand() -> None:
    """128 ranks: TP 8 x PP 2 x FSDP 8. 64 micro batches of one sequence go through two stages."""
    config = compose(
        [
            *("cluster=a100x8", "cluster.nodes=16", "model=qwen2_5_72b", "data.seq_len=4096"),
            *("parallel=fsdp_tp", "parallel.tp=8", "parallel.pp=2", "parallel.param_dtype=bfloat16"),
            *("parallel.activation_checkpointing=full", "train.global_batch_size=512", "train.micro_batch_size=1"),
        ]
    )
    assert str(parallel_dims_of(config)) == "128 ranks = 8 data-parallel groups (8 shards) x TP 8 x PP 2"
    first, last = dry_run(config)
    assert (first.stage, first.rank, last.stage, last.rank) == (0, 0, 1, 64)

    query_and_out, key_and_value, feed_forward = 2 * 8192 * 8192, 2 * 1024 * 8192, 3 * 29568 * 8192
    biases, norms = 8192 + 2 * 1024, 2 * 8192  # norms are cut by FSDP alone
    of_a_layer, vocabulary = query_and_out + key_and_value + feed_forward + biases, 152064 * 8192
    held = 40 * (of_a_layer // 64 + norms // 8) + vocabulary // 64  # 40 layers and the embedding
    assert first.parameters == first.gradients == FLOAT32 * held == 2_272_355_328
    assert first.optimizer == 2 * FLOAT32 * held + 4 * (40 * 12 + 1)
    held += 8192 // 8  # 40 layers, the output, and the last norm
    assert last.parameters == last.gradients == FLOAT32 * held
    assert last.optimizer == 2 * FLOAT32 * held + 4 * (40 * 12 + 2)

    # Kept over the micro batches of a step: whole parameters in bfloat16, whole gradients in float32, of a TP rank.
    whole = 40 * (of_a_layer // 8 + norms) + vocabulary // 8
    assert first.gathered == whole * (2 + FLOAT32)
    assert last.gathered == (whole + 8192) * (2 + FLOAT32)
    # A token, elements: the input of each layer, and all of one layer that is computed again: two pieces of the residual
    # stream, two gathered inputs, q k v and their result, four of the feed-forward.
    inputs = 40 * 8192 // 8
    again = 2 * 8192 // 8 + 2 * 8192 + (64 + 8 + 8 + 64) * 128 // 8 + 4 * 29568 // 8
    assert first.activations == 4096 * 2 * (2 * inputs + again)  # two micro batches in flight, bfloat16
    logits = 152064 // 8 * (4 + 4 + 2)
    assert last.activations == 4096 * (2 * (inputs + again) + logits + (8192 // 8 + 8192) * 2)
    assert first.total == sum((first.parameters, first.gradients, first.optimizer, first.gathered, first.activations))


def test_of_a_model_with_adapters_these_alone_have_gradients() -> None:
    pytest.importorskip("peft")
    config = compose(["cluster=a100x4", "model=llama3_1b", "parallel=fsdp", "lora.r=8"])
    ((found,), (expected,)) = (dry_run(config), memory_of(config, parallel_dims_of(config)) or [])
    attention, feed_forward = (2048 + 2048) * 2 + (2048 + 512) * 2, (2048 + 8192) * 3
    adapters = 16 * 8 * (attention + feed_forward) // 4  # 16 layers, on one of four ranks
    assert found.gradients == expected.gradients == FLOAT32 * adapters
    assert found.parameters == expected.parameters == FLOAT32 * (1_235_814_400 // 4 + adapters)
    assert found.optimizer == 2 * FLOAT32 * adapters + 4 * 16 * 7 * 2  # a counter for each of the two matrices


@pytest.mark.parametrize(
    "words",
    [
        ["parallel.tp=1"],
        ["parallel=hsdp", "cluster.nodes=2", "parallel.dp_shard=4"],
        ["parallel=fsdp", "parallel.cp=2", "parallel.tp=2", "model.qkv_bias=true", "model.tie_embeddings=true"],
        ["parallel.pp=2", "parallel.pp_schedule=interleaved_1f1b", "model.n_layers=5", "model.tie_embeddings=true"],
    ],
    ids=" ".join,
)
def test_arithmetic_agrees_with_the_model_that_is_built(words: list[str]) -> None:
    base = ["cluster=a100x8", "model.tie_embeddings=false", "model.n_kv_heads=2", "train.global_batch_size=64"]
    config = compose([*base, *words])
    built, counted = dry_run(config), memory_of(config, parallel_dims_of(config))
    assert counted is not None and built[0].parameters > 0
    for stage, expected in zip(built, counted, strict=True):
        # Adam's counts of steps are all there is besides.
        assert (stage.parameters, stage.gradients) == (expected.parameters, expected.gradients)
        assert expected.optimizer < stage.optimizer < expected.optimizer + 4 * 200


REPORT = """
import sys
from slurmtrain.cli import main
print("CODE", main(sys.argv[1:]), "torch" in sys.modules)
"""


def test_submit_builds_what_is_tight_and_imports_no_torch(cli: Cli, slurm: FakeSlurm) -> None:
    done = cli(*TIGHT, "submit", program=("-c", REPORT), PYTHONPATH=ROOT)
    assert done.stdout.splitlines()[-1] == "CODE 0 False" and "warning" not in done.stderr, done
    assert len(slurm.submitted) == 1


def test_a_model_of_ones_own_is_refused_when_its_state_cannot_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    config = own_model(100_000)
    monkeypatch.setattr(checks, "memory_by_dry_run", dry_run)
    with pytest.raises(ConfigError, match=r"needs 149\.0 GB \(parameters 37\.3, gradients 37\.3, optimiser 74\.5\)"):
        checks.check_memory(config, parallel_dims_of(config))
    assert checks.check_memory(own_model(50_000), parallel_dims_of(config)) == []


def own_model(width: int) -> Config:
    config = compose(["cluster=h100x8"])
    config.model = {"_target_": "torch.nn.Linear", "in_features": width, "out_features": width}
    return config


@pytest.mark.usefixtures("project")
def test_a_layout_for_which_the_model_is_not_made_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", ROOT)
    config = own_model(8)
    config.parallel.tp = 2
    with pytest.raises(ConfigError, match=r"parallel\.tp: Linear has no plan for tensor parallelism"):
        checks.check_memory(config, parallel_dims_of(config))


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize("missing", ["torch", "model"])
def test_where_it_cannot_be_known_there_is_a_warning(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = own_model(8)
    if missing == "torch":
        (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    else:
        config.model = {"_target_": "only.in.the.Container"}
        monkeypatch.setattr(checks, "memory_by_dry_run", dry_run)
    (warning,) = checks.check_memory(config, parallel_dims_of(config))
    assert warning.startswith("whether it fits into cluster.gpu_memory_gb=79 is not known: ")
    assert ("no torch here" if missing == "torch" else "only.in.the.Container") in warning


@pytest.mark.usefixtures("project", "slurm")
def test_of_a_sweep_the_largest_point_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def built(config: Config) -> list[object]:
        asked.append(config.model["n_layers"])
        return list(dry_run(config))

    monkeypatch.setattr(checks, "memory_by_dry_run", built)
    sweep = ["-m", *TIGHT, "submit", "--dry-run"]
    assert main([*sweep, "model.n_layers=2,32,3"]) == 0
    assert asked == [32]
    assert "point 1 (model.n_layers=320): 8 ranks = " in refused(*sweep, "model.n_layers=2,320", code=78)
    assert asked == [32]


@pytest.mark.usefixtures("project", "slurm")
def test_a_point_with_a_range_of_nodes_is_as_large_as_on_the_fewest(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int | str] = []

    def built(config: Config) -> list[object]:
        asked.append(config.cluster.nodes)
        return list(dry_run(config))

    monkeypatch.setattr(checks, "memory_by_dry_run", built)
    assert main(["-m", *TIGHT, "cluster.nodes=2,1-4", "submit", "--dry-run"]) == 0
    assert asked == [1]  # on 4 nodes there is no doubt
