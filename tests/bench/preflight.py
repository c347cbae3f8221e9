"""The checks before training: quick on ranks of this machine, and the facts of 4,096 simulated ranks through one store.

    python -m tests.bench preflight [--ranks 4] [--simulated 4096]

Wanted: quick under 2 s on 4 ranks; the facts of 4,096 ranks gathered, compared and answered in less than 10 s. The simulated
ranks share some connections, since 4,096 do not fit into a laptop, and send as much as real ones: 300 packages and 200
source files for each node of 8 ranks.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from slurmtrain.runs.lookup import all_runs
from slurmtrain.runtime.preflight.check import Verdict
from slurmtrain.runtime.preflight.compare import compare
from slurmtrain.runtime.preflight.exchange import Exchange
from slurmtrain.runtime.preflight.expected import Expected
from slurmtrain.runtime.preflight.facts import Message, NodeFacts, RankFacts, gathered
from slurmtrain.system.files import read_json

OF_NODE = 8
PROCESSES = 2
CONNECTIONS = 16  # of each process
STARTS = 5


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench preflight", description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--simulated", type=int, default=4096)
    parser.add_argument("--starts", type=int, default=STARTS, help="clean starts in which nothing may be found")
    arguments = parser.parse_args(sys.argv[2:])
    if arguments.starts:
        quick(arguments.ranks, arguments.starts)
    simulated(arguments.simulated)


def quick(ranks: int, starts: int) -> None:
    """Start small trainings, and say how long their checks have taken, and in how many something was found."""
    words = f"+cluster=local +experiment=smoke cluster.tasks_per_node={ranks} train.steps=2 train.eval_every=0"
    words += " train.tensorboard=false"
    seconds, stages, found = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(starts):
            command = [sys.executable, "-m", "slurmtrain", *words.split(), f"job.name=s{number}", "submit"]
            variables = {**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
            subprocess.run(command, cwd=folder, env=variables, check=True, capture_output=True)
            (run,) = [each for each in all_runs(Path(folder) / "runs") if each.path.parent.name == f"s{number}"]
            record = read_json(run.attempt(1).preflight_file) or {}
            seconds.append(float(record["seconds"]))
            stages.append(float((read_json(run.attempt(1).record_file) or {})["start_up_s"]["preflight"]))
            found += [each["sentence"] for each in record["findings"]]
    print(
        f"quick on {ranks} ranks, {starts} starts: {statistics.median(seconds) * 1000:.0f} ms (most "
        f"{max(seconds) * 1000:.0f} ms); with its imports {statistics.median(stages) * 1000:.0f} ms (most "
        f"{max(stages) * 1000:.0f} ms); {len(found)} findings"
    )
    for each in found:
        print(f"  {each}")


def messages(ranks: int) -> list[str]:
    """What the ranks send."""
    packages = {f"package-{number}": f"{number}.1.{number}" for number in range(300)}
    code = {f"slurmtrain/room/module_{number}.py": f"{number:012x}" for number in range(200)}
    found = []
    for rank in range(ranks):
        node = f"node{rank // OF_NODE:04d}"
        facts = RankFacts(
            rank, node, rank % OF_NODE, 1000 + rank, ranks, "cuda:0", 8, f"{rank % 8}-{rank % 8 + 7}", 128
        )
        facts = replace(facts, variables={f"NCCL_SETTING_{number}": "1" for number in range(6)})
        leader = NodeFacts(node, rank, {"torch": "2.13.0", "driver": "550.1"}, packages, code, "cafe")
        leader = replace(leader, clock=(1000.0, 1000.1), interface="ib0", interface_mbit=400_000)
        found.append(Message(facts, leader if rank % OF_NODE == 0 else None).encode())
    return found


def simulated(ranks: int) -> None:
    """Gather and compare the facts of so many ranks, and tell each the verdict."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=300), wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    parts = [range(part, ranks, PROCESSES) for part in range(PROCESSES)]
    sent = messages(ranks)
    workers = [
        context.Process(target=be_ranks, args=(store.port, part, ranks, [sent[rank] for rank in part]))
        for part in parts
    ]
    for each in workers:
        each.start()
    store.wait([f"ready/{part.start}" for part in parts], timedelta(seconds=300))
    began = time.perf_counter()
    store.set("go", "")
    exchange = Exchange(store, 0, ranks, 300)
    collected = exchange.collect("facts")
    gathered_s = time.perf_counter() - began
    facts = gathered(map(Message.decode, collected))
    found = compare(facts, Expected(world_size=ranks))
    compared_s = time.perf_counter() - began - gathered_s
    exchange.send("verdict", Verdict.of(found).encode())
    store.wait([f"done/{part.start}" for part in parts], timedelta(seconds=300))
    took = time.perf_counter() - began
    for each in workers:
        each.join()
    print(
        f"{ranks} simulated ranks: {sum(map(len, sent)) / 1e6:.1f} MB gathered in {gathered_s:.2f} s, compared in "
        f"{compared_s:.2f} s, all have heard the verdict after {took:.2f} s; {len(found)} findings"
    )


def be_ranks(port: int, ranks: range, world_size: int, sent: list[str]) -> None:
    """Be some ranks: send their facts, and wait for the verdict on behalf of each."""

    def connect(_: int) -> dist.Store:
        return dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=300), wait_for_workers=False)

    def send(number: int) -> None:
        for rank, text in list(zip(ranks, sent, strict=True))[number::CONNECTIONS]:
            Exchange(stores[number], rank, world_size, 300).send("facts", text)

    def hear(number: int) -> None:
        for rank in ranks[number::CONNECTIONS]:
            exchange = Exchange(stores[number], rank, world_size, 300)
            assert Verdict.decode(exchange.receive("verdict", 0)).error is None

    with ThreadPoolExecutor(CONNECTIONS) as pool:
        stores = list(pool.map(connect, range(CONNECTIONS)))
        stores[0].set(f"ready/{ranks.start}", "")
        stores[0].wait(["go"], timedelta(seconds=300))
        list(pool.map(send, range(CONNECTIONS)))
        list(pool.map(hear, range(CONNECTIONS)))
        stores[0].set(f"done/{ranks.start}", "")


if __name__ == "__main__":
    main()
