"""Compiled code that jobs share: which archive is read, which never is, and that torch compiles nothing it has from one."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import torch

from slurmtrain.config.compose import compose
from slurmtrain.config.parallel_dims import parallel_dims_of
from slurmtrain.runtime.compile_cache import CompileCache, compile_cache_of
from slurmtrain.slurm.environment import Environment
from tests.support.gloo import GlooRanks

CPU = torch.device("cpu")


def compile_as_a_job(folder: Path, archives: Path, names: str) -> tuple[bool, int, int, bool]:
    """Compile small functions as one job after another would, each with a cache of its node that is new.

    Returns:
        Whether there was something to load, how much was found and how much was not, and whether it was published.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "node")
    import torch._inductor.config as inductor
    from torch._dynamo.utils import counters

    # Without a look at what this CPU's vectors can do, which compiles programs of its own.
    inductor.compile_threads, inductor.cpp.vec_isa_ok = 1, False
    # Products of matrices, for which no compiler of C++ is needed.
    functions = {"a": lambda x: x @ x, "b": lambda x: x @ x @ x}
    cache = CompileCache(archives / "x.compiled", publishes=True)
    loaded = cache.load()
    for name in names:
        torch.compile(functions[name])(torch.ones(8, 8))
    of_graphs = counters["inductor"]
    return loaded, of_graphs["fxgraph_cache_hit"], of_graphs["fxgraph_cache_miss"], cache.publish()


def test_a_later_job_compiles_nothing_that_a_job_before_has_published(tmp_path: Path) -> None:
    archives = tmp_path / "archives"
    with GlooRanks(tmp_path) as processes:
        for names, said in (("a", (False, 0, 1, True)), ("ab", (True, 1, 1, True))):
            assert processes.start(1, compile_as_a_job, archives, names).results() == [said]
    assert {path.stat().st_mode & 0o777 for path in archives.iterdir()} == {0o600}


def test_an_archive_that_others_could_have_written_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[bytes] = []
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", loaded.append)
    cache = CompileCache(tmp_path / "x.compiled", publishes=True)
    assert not cache.load()
    cache.path.write_bytes(b"content")
    cache.path.chmod(0o620)
    assert not cache.load() and loaded == []
    cache.path.chmod(0o600)
    assert cache.load() and loaded == [b"content"]


def test_whatever_torch_raises_the_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no such kind of artifact")

    cache = CompileCache(tmp_path / "x.compiled", publishes=True)
    cache.path.write_bytes(b"content")
    cache.path.chmod(0o600)
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", fail)
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", fail)
    assert not cache.load() and not cache.publish()
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert all("no such kind of artifact" in record.message for record in caplog.records)


def test_other_versions_shapes_and_layouts_have_other_archives(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["parallel.compile=true", "cluster.compile_cache=/shared/compiled"]

    def path(*more: str) -> Path:
        config = compose([*words, *more])
        cache = compile_cache_of(config, parallel_dims_of(config), Environment("single"), CPU)
        assert cache is not None
        return cache.path

    for nothing in (words[:1], words[1:]):  # nothing is compiled, or no folder is named
        config = compose(nothing)
        assert compile_cache_of(config, parallel_dims_of(config), Environment("single"), CPU) is None
    plain = path()
    assert plain.parent == Path("/shared/compiled")
    assert path("train.steps=7", "optim.lr=1.0", "data.max_bytes=7") == plain
    others = ("model.dim=128", "train.global_batch_size=32", "lora.r=4", "data.seq_len=32")
    assert len({plain, *map(path, others)}) == len(others) + 1
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    assert path() != plain and "torch-9.9.9" in path().name


def test_one_rank_publishes_for_all_that_compile_the_same_code() -> None:
    words = ["cluster.nodes=2", "cluster.tasks_per_node=2", "parallel.compile=true", "cluster.compile_cache=/shared"]
    both = Environment("slurm", world_size=4, local_world_size=2, nodes=("a", "b"), tasks_per_node=(2, 2))
    ranks = [dataclasses.replace(both, rank=rank, local_rank=rank % 2, node_rank=rank // 2) for rank in range(4)]
    for more, replicas in (([], -1), (["parallel.pp=2", "parallel.dp_shard=-1"], 1)):
        config = compose([*words, *more])
        config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, dp_replicate=replicas))
        caches = [compile_cache_of(config, parallel_dims_of(config), rank, CPU) for rank in ranks]
        published = [cache.path for cache in caches if cache is not None and cache.publishes]
        assert sorted(published) == sorted({cache.path for cache in caches if cache is not None})
        assert more or len(published) == 2  # one of each local GPU
