"""MASTER_PORT: chosen before the program starts, and still free when it listens there, seconds later."""

from __future__ import annotations

import errno
import socket
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from slurmtrain.runtime.addresses import HeldPort, is_taken
from tests.unit.runtime.test_own_programs import ended, start


@pytest.fixture
def port() -> HeldPort:
    return HeldPort()


def test_a_port_that_is_held_is_given_to_nobody_else(port: HeldPort) -> None:
    held, others = port.take(), [HeldPort() for _ in range(100)]
    assert held == port.take() and held not in {other.take() for other in others}
    with socket.socket() as somebody, pytest.raises(OSError) as refused:  # who chooses it by a formula of their own
        somebody.bind(("", held))
    assert refused.value.errno == errno.EADDRINUSE
    for other in (port, *others):
        other.release()
    with socket.socket() as somebody:
        somebody.bind(("", held))


@pytest.mark.parametrize("libuv", [True, False])
def test_a_program_listens_on_the_port_that_is_held_for_it(libuv: bool, port: HeldPort) -> None:
    store = dist.TCPStore("127.0.0.1", port.take(), 1, True, timedelta(seconds=20), use_libuv=libuv)
    store.set("said", "hello")
    assert store.get("said") == b"hello"
    del store
    with socket.create_server(("", port.take())):
        assert is_taken(port.take())
    assert not is_taken(port.take())


def test_a_port_of_the_environment_that_is_taken_is_named_before_the_program_starts(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as somebody:
        taken = str(somebody.getsockname()[1])
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", taken)
        once = ("cluster.tasks_per_node=2", "cluster.srun_wait_s=1", "requeue.max_attempts_without_progress=1")
        code, said = ended(start(project, "touch started", *once))
    assert code == 1 and not (project / "started").exists()
    assert f"MASTER_PORT={taken} from the environment is in use on" in said and "unset MASTER_ADDR" in said
