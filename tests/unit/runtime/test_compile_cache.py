"""Compiled code that jobs share: which archive is read, which never is, and that torch compiles nothing it has from one."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from slurmtrain.config.compose import compose
from slurmtrain.config.parallel_dims import parallel_dims_of
from slurmtrain.runtime import compile_cache
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
# Compiles small functions as one job after another would, each with a cache of its node that is new. They are products of
# matrices, for which no compiler of C++ is needed.
JOB = """
import sys, torch
from pathlib import Path
from torch._dynamo.utils import counters
from slurmtrain.runtime.compile_cache import CompileCache, Part

functions = {"a": lambda x: x @ x, "b": lambda x: x @ x @ x}
cache = CompileCache(Path(sys.argv[1]), {"torch": torch.__version__}, Part(0, 0, True))
loaded = cache.load()
for name in sys.argv[2]:
    torch.compile(functions[name])(torch.ones(8, 8))
print(loaded > 0, counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"], cache.publish())
"""


def test_a_later_job_compiles_nothing_that_a_job_before_has_published(tmp_path: Path) -> None:
    for functions, said in (("a", ["False", "0", "1", "True"]), ("ab", ["True", "1", "1", "True"])):
        variables = {
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / f"node-{functions}"),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }
        job = subprocess.run(
            [sys.executable, "-c", JOB, str(tmp_path / "archives"), functions],
            # Without a look at what this CPU's vectors can do, which compiles programs of its own.
            env={**os.environ, **variables, "TORCHINDUCTOR_VEC_ISA_OK": "0"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        assert job.stdout.split() == said
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "archives").iterdir()} == {0o600}


def test_archives_add_up_and_one_that_holds_all_of_another_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_cache, "MOST_ARCHIVES", 3)

    def info(names: str) -> object:
        return SimpleNamespace(artifacts={"inductor": list(names)})

    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", lambda content: info(content.decode()))

    def job(compiles: str, cache: CompileCache | None = None) -> CompileCache:
        cache = cache or CompileCache(tmp_path, KEY, Part(0, 1, publishes=True))
        monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: (compiles.encode(), info(compiles)))
        cache.publish()
        return cache

    def held() -> list[str]:
        paths = sorted(tmp_path.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        return [(read_archive(path, KEY) or b"").decode() for path in paths]

    early = CompileCache(tmp_path, KEY, Part(0, 1, publishes=True))  # begins when there is nothing yet
    job("ab")
    job("bc", early)
    assert held() == ["ab", "bc"]  # of two jobs at the same time, neither loses what the other one has published
    later = CompileCache(tmp_path, KEY, Part(0, 1, publishes=True))
    assert later.load() == 3
    job("ac", later)  # all of that is there
    assert held() == ["ab", "bc"]
    job("abd", later)
    assert held() == ["bc", "abd"]
    other = CompileCache(tmp_path, KEY, Part(0, 11, publishes=True))
    assert other.load() == 0
    for index, path in enumerate(sorted(tmp_path.iterdir())):
        os.utime(path, (index, index))
    oldest = held()[0]
    job("e")
    job("f")
    assert len(held()) == 3 and oldest not in held()


def test_an_archive_that_is_torn_or_foreign_or_that_others_could_have_written_is_not_run(tmp_path: Path) -> None:
    path, whole = tmp_path / "x.compiled", archive_bytes(b"content", KEY)
    assert read_archive(path, KEY) is None
    path.write_bytes(whole)
    path.chmod(0o600)
    assert read_archive(path, KEY) == b"content"
    for spoiled in (whole[:-1], whole[:20], whole[:-1] + b"x", b"", archive_bytes(b"content", {"torch": "2"})):
        path.write_bytes(spoiled)
        assert read_archive(path, KEY) is None
    path.write_bytes(whole)
    path.chmod(0o620)
    assert read_archive(path, KEY) is None


def test_whatever_torch_raises_the_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no such kind of artifact")

    cache = CompileCache(tmp_path, KEY, Part(0, 0, publishes=True))
    path = tmp_path / f"{cache.name}-0.compiled"
    path.write_bytes(archive_bytes(b"content", KEY))
    path.chmod(0o600)
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
        return cache.folder / cache.name

    for nothing in (words[:1], words[1:]):  # nothing is compiled, or no folder is named
        config = compose(nothing)
        assert compile_cache_of(config, parallel_dims_of(config), Environment("single"), CPU) is None
    plain = path()
    assert plain.parent == Path("/shared/compiled")
    assert path("train.steps=7", "optim.lr=1.0", "data.max_bytes=7") == plain
    others = ("model.dim=128", "train.global_batch_size=32", "lora.r=4", "data.seq_len=32", "+eval.sets.x={seq_len: 8}")
    assert len({plain, *map(path, others)}) == len(others) + 1
    mixed = [
        f"+data.sources.a={{path: /{where}, seq_len: {length}}}" for where, length in (("a", 8), ("b", 8), ("a", 16))
    ]
    first, moved, longer = (path("data=mixture", words) for words in mixed)
    assert first == moved != longer
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    assert path() != plain and "torch-9.9.9" in path().name


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
