"""Compiled code that jobs share: which archive is read, which never is, and that torch compiles nothing it has from one."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from slurmtrain.config.compose import compose
from slurmtrain.config.parallel_dims import parallel_dims_of
from slurmtrain.runtime.compile_cache import (
    CompileCache,
    Part,
    archive_bytes,
    compile_cache_of,
    key_of,
    part_of,
    read_archive,
)
from slurmtrain.slurm.environment import Environment

CPU = torch.device("cpu")
KEY = {"torch": "1"}
# Compiles a small function as one job after another would, each with a cache of its node that is new.
JOB = """
import sys, torch
from pathlib import Path
from torch._dynamo.utils import counters
from slurmtrain.runtime.compile_cache import CompileCache, Part

cache = CompileCache(Path(sys.argv[1]), {"torch": torch.__version__}, Part(0, 0, True))
loaded = cache.load()
torch.compile(lambda x: torch.sin(x) * 2)(torch.ones(8))
print(loaded > 0, counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"], cache.publish())
"""


def test_a_later_job_compiles_nothing_that_is_in_the_archive_and_publishes_only_what_is_new(tmp_path: Path) -> None:
    said = []
    for job in range(2):
        done = subprocess.run(
            [sys.executable, "-c", JOB, str(tmp_path / "archives")],
            # Without a look at what this CPU's vectors can do, which compiles programs of its own.
            env={
                **os.environ,
                "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / f"node-{job}"),
                "TORCHINDUCTOR_VEC_ISA_OK": "0",
                "TORCHINDUCTOR_COMPILE_THREADS": "1",
            },
            capture_output=True,
            text=True,
            check=True,
        )
        said.append(done.stdout.split())
    assert said == [["False", "0", "1", "True"], ["True", "1", "0", "False"]]
    (archive,) = (tmp_path / "archives").iterdir()
    assert archive.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "spoiled",
    [
        lambda whole: whole[:-1],
        lambda whole: whole[:20],
        lambda whole: whole[:-1] + b"x",
        lambda whole: b"",
        lambda whole: archive_bytes(b"content", {"torch": "2"}),
    ],
)
def test_a_torn_or_foreign_archive_is_not_used(spoiled: object, tmp_path: Path) -> None:
    path, whole = tmp_path / "x.compiled", archive_bytes(b"content", KEY)
    path.write_bytes(whole)
    path.chmod(0o600)
    assert read_archive(path, KEY) == b"content"
    path.write_bytes(spoiled(whole))  # type: ignore[operator]
    assert read_archive(path, KEY) is None


def test_an_archive_that_others_could_have_written_is_not_run(tmp_path: Path) -> None:
    path = tmp_path / "x.compiled"
    assert read_archive(path, KEY) is None
    path.write_bytes(archive_bytes(b"content", KEY))
    path.chmod(0o620)
    assert read_archive(path, KEY) is None


def test_whatever_torch_raises_the_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no such kind of artifact")

    cache = CompileCache(tmp_path, KEY, Part(0, 0, publishes=True))
    cache.path.write_bytes(archive_bytes(b"content", KEY))
    cache.path.chmod(0o600)
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", fail)
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", fail)
    assert cache.load() == 0 and cache.publish() is False
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert all("no such kind of artifact" in record.message for record in caplog.records)


def test_other_versions_shapes_and_layouts_have_other_archives(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["parallel.compile=true", "cluster.compile_cache=/shared/compiled"]

    def path(*more: str) -> Path:
        config = compose([*words, *more])
        cache = compile_cache_of(config, parallel_dims_of(config), Environment("single"), CPU)
        assert cache is not None
        return cache.path

    plain = path()
    assert plain.parent == Path("/shared/compiled") and path("train.steps=7", "optim.lr=1.0") == plain
    assert len({plain, path("model.dim=128"), path("train.global_batch_size=32"), path("lora.r=4")}) == 4
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    assert path() != plain and "torch-9.9.9" in path().name


def test_nothing_is_kept_where_nothing_is_compiled_or_no_folder_is_named() -> None:
    for words in (["parallel.compile=true"], ["cluster.compile_cache=/shared"]):
        config = compose(words)
        assert compile_cache_of(config, parallel_dims_of(config), Environment("single"), CPU) is None


def test_one_rank_publishes_for_all_that_compile_the_same_code() -> None:
    config = compose(["cluster.nodes=2", "cluster.tasks_per_node=2", "parallel.pp=2", "parallel.dp_shard=-1"])
    config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, dp_replicate=1))
    dims = parallel_dims_of(config)
    both = Environment("slurm", world_size=4, local_world_size=2, nodes=("a", "b"), tasks_per_node=(2, 2))
    ranks = [dataclasses.replace(both, rank=rank, local_rank=rank % 2, node_rank=rank // 2) for rank in range(4)]
    parts = [part_of(rank, dims) for rank in ranks]
    assert {(part.device_index, part.stage) for part in parts if part.publishes} == {
        (part.device_index, part.stage) for part in parts
    }
    assert sum(part.publishes for part in parts) == len({(part.device_index, part.stage) for part in parts})
    replicas = parallel_dims_of(compose(["cluster.nodes=2", "cluster.tasks_per_node=2"]))
    assert [part_of(rank, replicas).publishes for rank in ranks] == [True, True, False, False]
    assert key_of(config, dims, CPU) != key_of(config, replicas, CPU)
