"""cluster.port_range: the port on which ranks meet lies within it, and is one that is free."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from slurmtrain.config.port_range import PortRange
from slurmtrain.config.schema import Config
from slurmtrain.errors import ConfigError, RendezvousError
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runtime.addresses import HeldPort, bind_port
from slurmtrain.runtime.attempt_context import AttemptContext
from slurmtrain.runtime.jobs.program_start import rank_variables
from slurmtrain.slurm.environment import Environment


@pytest.fixture
def three_ports() -> PortRange:
    """Three ports in a row that are free now."""
    for first in range(21000, 32000, 3):
        try:
            for port in range(first, first + 3):
                with socket.socket() as probe:
                    probe.bind(("", port))
        except OSError:
            continue
        return PortRange(first, first + 2)
    raise AssertionError("no three ports in a row are free")


def test_a_range_is_read_as_it_is_typed() -> None:
    assert PortRange.parse("29000-29100") == PortRange(29000, 29100) and PortRange.parse(" 29500 ") == PortRange(
        29500, 29500
    )
    assert PortRange(5000, 5003).ports_from(6) == [5002, 5003, 5000, 5001]


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("many", "is not a range of ports"),
        ("29000-", "is not a range of ports"),
        ("29100-29000", "29000 is less than 29100"),
        ("80-90", "outside of the ports from 1024 to 65535"),
        ("65000-70000", "outside of the ports from 1024 to 65535"),
    ],
)
def test_what_is_no_range_of_ports_is_refused_with_the_value(typed: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        PortRange.parse(typed)
    assert typed in str(error.value)


def test_a_port_of_the_range_that_somebody_has_is_left_to_him(three_ports: PortRange) -> None:
    held = [bind_port("127.0.0.1", three_ports, "n3") for _ in range(3)]
    try:
        assert {each.getsockname()[1] for each in held} == set(three_ports.ports_from(0))
        with pytest.raises(RendezvousError, match=rf"no port of cluster.port_range={three_ports} is free on n3"):
            bind_port("127.0.0.1", three_ports, "n3")
        held.pop().close()
        assert HeldPort(three_ports).take() in three_ports.ports_from(0)
    finally:
        for each in held:
            each.close()


def test_programs_of_several_jobs_hold_different_ports_of_a_range_and_one_that_was_just_left(
    three_ports: PortRange,
) -> None:
    held = [HeldPort(three_ports) for _ in range(3)]
    assert {each.take() for each in held} == set(three_ports.ports_from(0))
    for each in held:
        each.release()
    only = PortRange(three_ports.first, three_ports.first)
    with bind_port("127.0.0.1", only, "n3") as listener, socket.create_connection(listener.getsockname()):
        listener.accept()[0].close()
    again = HeldPort(only)
    with socket.create_server(("", again.take())):
        again.release()


def test_a_port_that_a_job_has_just_left_can_be_used_at_once(three_ports: PortRange) -> None:
    """Its connections are still being closed, on the side that has closed them first."""
    only = PortRange(three_ports.first, three_ports.first)
    with bind_port("127.0.0.1", only, "n3") as listener, socket.create_connection(listener.getsockname()):
        listener.accept()[0].close()
    bind_port("127.0.0.1", only, "n3").close()


def test_a_program_is_given_a_port_of_the_range(three_ports: PortRange, tmp_path: Path) -> None:
    config = Config()
    config.cluster.port_range = str(three_ports)
    for world_size in (1, 2):
        context = AttemptContext(RunDir(tmp_path), 1, supervised=True)
        context.attempt_dir.path.mkdir(parents=True, exist_ok=True)
        environment = Environment(
            "slurm", world_size=world_size, local_world_size=world_size, tasks_per_node=(world_size,)
        )
        port = HeldPort(config.cluster.ports, "n3")
        assert int(rank_variables(config, environment, context, port)["MASTER_PORT"]) == port.take()
        assert port.take() in three_ports.ports_from(0)
        port.release()
