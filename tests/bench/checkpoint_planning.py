"""What rank 0 does to plan and to commit a checkpoint of very many ranks, simulated and without data: time and memory.

Nothing of what the other ranks do themselves (make their plan and table, digest their file) is counted, but all of what rank 0
receives from them is. The layout is the one with the most pieces: every tensor cut among all ranks, as FSDP2 does.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from slurmtrain.checkpoint.format import blocks
from slurmtrain.checkpoint.format.blocks import DIGEST_BYTES, FileRecord
from slurmtrain.checkpoint.format.coverage import check_coverage
from slurmtrain.checkpoint.format.directory import INDEX
from slurmtrain.checkpoint.format.manifest import FORMAT, Manifest
from slurmtrain.checkpoint.format.tensor_index import FileTable, Index
from slurmtrain.checkpoint.messages import decode, encode
from slurmtrain.checkpoint.ranks import RankGroup
from slurmtrain.checkpoint.save.job import RankContribution
from slurmtrain.checkpoint.save.plan import SavePlan, make_plan
from slurmtrain.checkpoint.store import commit
from slurmtrain.checkpoint.store.fencing import Incarnation, claim

T = TypeVar("T")
RANKS, TENSORS, BLOCKS = 4096, 1000, 100
WANTED_S, WANTED_MB = 5.0, 500.0


def main() -> None:
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=measure)
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"the simulation of rank 0 ended with {process.exitcode}")


def measure() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    mesh = init_device_mesh("cpu", (RANKS,))
    tensors: dict[str, Tensor] = {}
    for number in range(TENSORS):
        columns = 8 + number % 13
        part = DTensor.from_local(torch.zeros(1, columns), mesh, [Shard(0)], run_check=False)
        tensors[f"model.layers.{number // 10}.part{number % 10}.weight"] = part
    before = memory_mb("VmRSS")
    forget_peak()
    plan, planning_s = timed(lambda: make_plan(tensors, OneOfMany(), None))
    planning_mb = memory_mb("VmHWM") - before

    messages = received(plan)
    forget_peak()
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR", ".")) as name:
        size, commit_s = timed(lambda: commit_all(plan, messages, Path(name)))
    commit_mb = memory_mb("VmHWM") - before
    seconds, peak = planning_s + commit_s, max(planning_mb, commit_mb)
    print(f"planning: {RANKS} ranks x {TENSORS} tensors = {RANKS * len(plan.pieces):,} pieces, simulated")
    print(f"  plan            {planning_s:6.2f} s, {planning_mb:6.0f} MB more than before")
    print(f"  check, commit   {commit_s:6.2f} s, {commit_mb:6.0f} MB ({messages.numel() / 1e6:.0f} MB of it received)")
    print(f"  index.bin and manifest.json have {size / 1e6:.0f} MB")
    met = "met" if seconds <= WANTED_S and peak <= WANTED_MB else "MISSED"
    print(f"  together {seconds:.2f} s, at most {peak:.0f} MB   wanted <= {WANTED_S:g} s, {WANTED_MB:g} MB: {met}")


class OneOfMany(RankGroup):
    """Rank 0 of ranks that all say what it says."""

    def __init__(self) -> None:
        self.group, self.rank, self.size, self.global_rank = None, 0, RANKS, 0

    def gather(self, work: Callable[[], T]) -> list[T]:
        return [work()] * RANKS

    def tell(self, value: T, source: int) -> T:
        return value


def received(plan: SavePlan) -> Tensor:
    """All ranks' messages as rank 0 receives them: uint8 [ranks, longest], padded."""
    own = plan.table(own_bytes=3000)
    rows = []
    for rank in range(RANKS):
        shifted = own.boxes.copy()
        shifted[:, 0, 0] += rank
        table = FileTable(own.schema, own.data_start, own.tensors, shifted, own.own_bytes)
        digests = os.urandom(BLOCKS * DIGEST_BYTES)
        record = FileRecord(10**9, blocks.root(digests))
        none = np.empty((0, 4), dtype=np.int64)
        part = RankContribution(
            1, f"rank{rank:05d}.safetensors", record, digests, table.pack(), None, {"model": 7}, 0, none
        )
        rows.append(encode([part.to_json(), None]))
    longest = max(len(row) for row in rows)
    both = np.zeros((RANKS, longest), dtype=np.uint8)
    for row, data in enumerate(rows):
        both[row, : len(data)] = np.frombuffer(data, dtype=np.uint8)
    return torch.from_numpy(both)


def commit_all(plan: SavePlan, messages: Tensor, folder: Path) -> int:
    """From the messages to the commit; the size of what is written."""
    handed_in = [RankContribution.from_json(decode(row.numpy().data)[0]) for row in messages]
    check_coverage(plan.schemas, (part.table for part in handed_in))
    index = Index(
        plan.schemas,
        {part.name: part.table for part in handed_in},
        {part.name: part.digests for part in handed_in},
    )
    claim(folder, Incarnation(1, "bench"))
    temporary = commit.begin(folder, 1, Incarnation(1, "bench"))
    with (temporary / INDEX).open("wb") as file:
        file.writelines(index.chunks())
        file.flush()
        os.fsync(file.fileno())
    with blocks.threads() as pool:
        record, _ = blocks.digest_file(temporary / INDEX, pool)
    manifest = Manifest(
        format=FORMAT,
        run_id="bench",
        step=1,
        incarnation=1,
        incarnation_label="bench",
        world_size=RANKS,
        torch_version=torch.__version__,
        files={INDEX: record, **{part.name: part.record for part in handed_in}},
        tensors={key: {"shape": fact.shape, "dtype": fact.dtype} for key, fact in index.facts.items()},
        state={},
    )
    final = commit.commit(temporary, manifest, Incarnation(1, "bench"))
    return sum(path.stat().st_size for path in final.iterdir())


def timed(work: Callable[[], T]) -> tuple[T, float]:
    began = time.perf_counter()
    result = work()
    return result, time.perf_counter() - began


def memory_mb(field: str) -> float:
    """VmRSS: what is resident now; VmHWM: the most since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1e3 for line in lines if line.startswith(field))


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


if __name__ == "__main__":
    main()
