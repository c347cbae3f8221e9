"""Ranks find each other, say who is missing, and take nobody else for one of theirs."""

from __future__ import annotations

import os
import signal
import socket
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from slurmtrain.errors import EnvironmentMismatchError
from slurmtrain.rank.addresses import RendezvousError, machine
from slurmtrain.rank.distributed_context import DistributedContext, init_distributed
from slurmtrain.slurm.environment import LAUNCHER_VARIABLE, NODES_VARIABLE, Environment
from slurmtrain.system import signals
from slurmtrain.system.files import write_json
from slurmtrain.system.records import read_json
from slurmtrain.system.signals import StopDuringStartError
from tests.support.gloo import GlooRanks, cluster_config, wait_until


def sums(distributed: DistributedContext) -> list[float]:
    """Each of the three groups adds up every rank's number."""
    answers = []
    for group in (distributed.device_group, distributed.control_group, distributed.checkpoint_group):
        value = torch.tensor([float(distributed.environment.rank + 1)])
        dist.all_reduce(value, group=group)
        answers.append(value.item())
    return answers


def hear(distributed: DistributedContext, word: str) -> str:
    return distributed.broadcast_text(word if distributed.environment.rank == 0 else None)


def try_to_join(directory: Path, timeout_s: int) -> tuple[str, float]:
    """What became of it, and how long that took in seconds."""
    environment, stop = Environment.detect(), signals.install_signal_handlers()
    started = time.monotonic()
    (directory / f"looking-{environment.rank}").touch()
    try:
        distributed = init_distributed(cluster_config(timeout_s), "cpu", environment, directory, stop)
        return hear(distributed, "met"), time.monotonic() - started
    except (RendezvousError, StopDuringStartError) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - started


WORDS = ("", "ä", "x" * 100_000)


def meet_and_talk(distributed: DistributedContext) -> tuple[list[float], list[str]]:
    return sums(distributed), [hear(distributed, word) for word in WORDS]


def test_all_ranks_meet_in_three_groups_and_hear_what_rank_0_tells_as_it_was(gloo_ranks: GlooRanks) -> None:
    assert gloo_ranks(3, meet_and_talk) == [([6.0, 6.0, 6.0], list(WORDS))] * 3


def test_when_a_rank_is_missing_every_rank_names_it_and_its_node(gloo_ranks: GlooRanks) -> None:
    answers = gloo_ranks.start(4, try_to_join, 2, ranks=[0, 1, 3]).results()
    for answer, took in answers:
        assert answer.startswith("RendezvousError")
        assert "rank 2" in answer
        assert socket.gethostname() in answer
        assert took < 60
    assert max(took for _, took in answers) > 1.5  # the last one to come waits for what is left of the time


def test_a_stop_request_to_one_rank_ends_the_wait_of_all_at_once(gloo_ranks: GlooRanks) -> None:
    waiting = gloo_ranks.start(3, try_to_join, 600, ranks=[0, 1])
    published = wait_until(lambda: read_json(waiting.directory / "rendezvous.json"), "published")
    store = dist.TCPStore("127.0.0.1", published["port"], None, False, timedelta(seconds=60))
    store.wait(["here/0", "here/1"])
    os.kill(waiting.pid(1), signal.SIGTERM)
    assert [answer.partition(":")[0] for answer, _ in waiting.results(60)] == ["StopDuringStartError"] * 2


def test_when_rank_0_dies_before_all_have_met_the_others_say_so(gloo_ranks: GlooRanks) -> None:
    waiting = gloo_ranks.start(3, try_to_join, 600, ranks=[0, 1])
    published = wait_until(lambda: read_json(waiting.directory / "rendezvous.json"), "published")
    store = dist.TCPStore("127.0.0.1", published["port"], None, False, timedelta(seconds=60))
    wait_until(lambda: store.check(["here/1"]), "connected")
    os.kill(waiting.pid(0), signal.SIGKILL)
    rank_0, rank_1 = waiting.endings(60)
    assert rank_0.exit_code == -signal.SIGKILL
    assert rank_1.value[0].startswith(f"RendezvousError: rank 0 on {socket.gethostname()} exited before all ranks")


def test_another_store_on_the_published_port_is_not_taken_for_that_of_rank_0(
    gloo_ranks: GlooRanks, tmp_path: Path
) -> None:
    theirs = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    theirs.set("token", "theirs")
    directory = tmp_path / "meeting"
    directory.mkdir()
    published = directory / "rendezvous.json"
    address = {"host": "127.0.0.1", "port": theirs.port, "machine": machine(), "token": "ours"}
    write_json(published, address)
    early = gloo_ranks.start(2, try_to_join, 120, ranks=[1], directory=directory)
    wait_until(lambda: (directory / "looking-1").exists(), "looking")
    late = gloo_ranks.start(2, try_to_join, 120, ranks=[0], directory=directory)
    assert [late.results()[0][0], early.results()[0][0]] == ["met", "met"]


def lost(directory: Path) -> str:
    """Four ranks on four nodes; rank 3 cannot connect to anybody."""
    rank = os.environ["RANK"]
    os.environ |= {NODES_VARIABLE: "n0,n1,n2,n3", "GROUP_RANK": rank, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    if rank == "3":

        def refuse(*_: object, **__: object) -> socket.socket:
            raise TimeoutError("timed out")

        socket.create_connection = refuse
    return try_to_join(directory, 2)[0]


def test_a_node_that_cannot_reach_rank_0_says_by_which_network_it_has_tried(gloo_ranks: GlooRanks) -> None:
    *others, last = gloo_ranks.start(4, lost).results()
    assert last.startswith(
        "RendezvousError: rank 3 on n3: rank 0, expected on node n0, cannot be reached at 127.0.0.1:"
    )
    assert " by lo: timed out" in last and "cluster.network_interface" in last and "cluster.port_range" in last
    said = "RendezvousError: 1 of 4 ranks did not arrive within 2 s: rank 3 (on n3)"
    assert [each.splitlines()[0] for each in others] == [said] * 3


def twice(directory: Path, size: int) -> str:
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(size)
    try:
        return try_to_join(directory, 600)[0]
    except EnvironmentMismatchError as error:
        return f"{type(error).__name__}: {error.message}"


def test_two_processes_that_are_the_same_rank_are_named_and_nobody_waits(gloo_ranks: GlooRanks) -> None:
    one = gloo_ranks.start(3, twice, 3, ranks=[0, 1])
    wait_until((one.directory / "looking-1").exists, "looking")
    published = wait_until(lambda: read_json(one.directory / "rendezvous.json"), "published")
    store = dist.TCPStore("127.0.0.1", published["port"], None, False, timedelta(seconds=60))
    store.wait(["here/1"])
    other = gloo_ranks.start(3, twice, 3, ranks=[1], directory=one.directory)
    node = socket.gethostname()
    said = f"preflight, ranks: rank 1 is there twice, on {node} and on {node}"
    assert [each.partition(": ")[2].splitlines()[0] for each in [*one.results(60), *other.results(60)]] == [said] * 3


def test_a_rank_that_was_told_another_number_of_ranks_is_named(gloo_ranks: GlooRanks) -> None:
    three = gloo_ranks.start(3, twice, 3, ranks=[0])
    published = wait_until(lambda: read_json(three.directory / "rendezvous.json"), "published")
    assert published
    two = gloo_ranks.start(2, twice, 2, ranks=[1], directory=three.directory)
    said = f"preflight, ranks: rank 1 on {socket.gethostname()} was told that the job has 2 ranks, and rank 0 that it has 3"
    assert all(said in answer for answer in [*three.results(60), *two.results(60)])


def with_launcher(directory: Path, port: int, host: str) -> str:
    launcher = {"TORCHELASTIC_RUN_ID": "x", "MASTER_ADDR": host, "MASTER_PORT": str(port), "GROUP_RANK": "0"}
    os.environ |= launcher
    del os.environ[LAUNCHER_VARIABLE]
    return try_to_join(directory, 1)[0]


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid"])
def test_a_wrong_address_of_a_launcher_is_named_as_such(gloo_ranks: GlooRanks, host: str) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and nobody listens there
        (answer,) = gloo_ranks.start(2, with_launcher, closed.getsockname()[1], host, ranks=[1]).results(60)
    assert answer.startswith(f"RendezvousError: rank 1 on {socket.gethostname()} cannot reach rank 0 at {host}:")
    assert "(MASTER_ADDR, MASTER_PORT)" in answer
