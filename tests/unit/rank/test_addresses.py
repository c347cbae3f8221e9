"""The port on which ranks or a program meet: within cluster.port_range, and free until they listen there."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from slurmtrain.config.fields import ports_of
from slurmtrain.errors import ConfigError
from slurmtrain.rank.addresses import RendezvousError, bind_port, hold_port


@pytest.fixture
def three_ports() -> range:
    """Three ports in a row that are free now."""
    for first in range(21000, 32000, 3):
        try:
            for port in range(first, first + 3):
                with socket.socket() as probe:
                    probe.bind(("", port))
        except OSError:
            continue
        return range(first, first + 3)
    raise AssertionError("no three ports in a row are free")


def test_a_range_is_read_as_it_is_typed_and_what_is_none_is_refused_with_the_value() -> None:
    assert ports_of("29000-29100") == range(29000, 29101) and ports_of("29500") == range(29500, 29501)
    said = dict.fromkeys(("many", "29000-"), "is not a range of ports")
    said |= dict.fromkeys(("80-90", "65000-70000"), "outside of the ports from 1024 to 65535")
    for typed, why in {**said, "29100-29000": "29000 is less than 29100"}.items():
        with pytest.raises(ConfigError, match=why) as error:
            ports_of(typed)
        assert typed in str(error.value)


def test_a_port_of_the_range_that_somebody_has_is_left_to_him(three_ports: range) -> None:
    held = [bind_port("127.0.0.1", three_ports, "n3") for _ in range(3)]
    try:
        assert {each.getsockname()[1] for each in held} == set(three_ports)
        with pytest.raises(
            RendezvousError, match=rf"no port of cluster.port_range={three_ports[0]}-{three_ports[2]} is free on n3"
        ):
            bind_port("127.0.0.1", three_ports, "n3")
        held.pop().close()
        with hold_port(three_ports, "n3") as program_s:
            assert {each.getsockname()[1] for each in (*held, program_s)} == set(three_ports)
    finally:
        for each in held:
            each.close()


@pytest.fixture
def port() -> Iterator[socket.socket]:
    with hold_port(None, "n3") as holder:
        yield holder


def test_a_port_that_is_held_is_given_to_nobody_else(port: socket.socket) -> None:
    held, others = port.getsockname()[1], [hold_port(None, "n3") for _ in range(100)]
    assert held not in {other.getsockname()[1] for other in others}
    with socket.socket() as somebody, pytest.raises(OSError) as refused:  # who chooses it by a formula of their own
        somebody.bind(("", held))
    assert refused.value.errno == errno.EADDRINUSE
    for other in (port, *others):
        other.close()
    with socket.socket() as somebody:
        somebody.bind(("", held))


@pytest.mark.parametrize("libuv", [True, False])
def test_a_program_listens_on_the_port_that_is_held_for_it(libuv: bool, port: socket.socket) -> None:
    number = port.getsockname()[1]
    store = dist.TCPStore("127.0.0.1", number, 1, True, timedelta(seconds=20), use_libuv=libuv)
    store.set("said", "hello")
    assert store.get("said") == b"hello"
    del store
    with socket.create_server(("", number)):
        pass
