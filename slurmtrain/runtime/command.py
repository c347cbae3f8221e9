"""job=command: any program on every rank, with the same attempts, signals, requeue and status as our own trainer.

This process stands between SLURM and the program: it survives the signals, gives ranks and addresses in the variables
that torch.distributed's env:// reads, and turns the program's end into the contract's exit codes. Imports no torch.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from slurmtrain.config.schema import ClusterConfig, Config
from slurmtrain.errors import EXIT_CONFIG, EXIT_REQUEUE, ConfigError, RendezvousError
from slurmtrain.rundir import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE, read_json, write_json
from slurmtrain.runtime import attempts, place
from slurmtrain.runtime.addresses import free_port, machine, own_addresses
from slurmtrain.runtime.environment import Environment, check_gpu_files
from slurmtrain.runtime.place import Place
from slurmtrain.runtime.signals import StopSignals
from slurmtrain.runtime.watch import Watch

# Of the signal itself, or as a shell reports it.
DIED_OF_A_STOP = {sign for number in (signal.SIGTERM, signal.SIGUSR2) for sign in (-number, 128 + number)}
SIGNAL_LAG_S = 1.0


def run_command(config: Config, environment: Environment, where: Place, stop: StopSignals, watch: Watch | None) -> int:
    """Run job.command as this rank's program; returns the exit code for this rank.

    0 finished; 75 it ended after a stop signal, or said 75 itself; 78 it said so; anything else is a crash.

    Args:
        watch: rank 0's; None on the others.

    Raises:
        ConfigError: there is no such program.
        EnvironmentMismatch: GPUs were asked for, and this node has none.
    """
    if config.train.device != "cpu":
        check_gpu_files(environment, config.cluster.gpus_per_node)
    words = shlex.split(config.job.command or "")
    variables = {**os.environ, **rank_variables(config, environment, where)}
    try:
        # Whatever this process blocks or ignores, the program starts with the defaults and may set its own traps.
        program = subprocess.Popen(words, env=variables, preexec_fn=_default_signals)
    except OSError as error:
        raise ConfigError(
            f"job.command: cannot start {words[0]!r}: {error.strerror}", hint="is it on the PATH of the nodes?"
        ) from None
    if environment.source != "slurm":
        _pass_signals_on(stop, program)
    code = program.wait()
    if code in DIED_OF_A_STOP:
        # The program had the signal at the same moment as this process, whose reader thread may be a little behind.
        stop.wait(SIGNAL_LAG_S)
    if code not in (0, EXIT_REQUEUE, EXIT_CONFIG):
        if stop.requested:
            print(
                f"slurmtrain: the program ended with {_described(code)} after it was told to stop",
                file=sys.stderr,
                flush=True,
            )
            code = EXIT_REQUEUE
        elif not (where.attempt_dir / f"failed-{environment.rank}.json").exists():
            attempts.record_failure(
                where.attempt_dir,
                environment.rank,
                exit_code=code,
                sentence=f"{words[0]} ended with {_described(code)}",
            )
    if watch is not None and stop.requested:
        watch.wait_for_record()
    if environment.rank == 0 and code in (0, EXIT_REQUEUE):
        place.update_attempt(where, said="finished" if code == 0 else "stopped")
    return code if code >= 0 else 128 - code


def rank_variables(config: Config, environment: Environment, where: Place) -> dict[str, str]:
    """What the program is told: torch.distributed's env:// variables, and ours."""
    variables = {
        "RANK": str(environment.rank),
        "WORLD_SIZE": str(environment.world_size),
        "LOCAL_RANK": str(environment.local_rank),
        "LOCAL_WORLD_SIZE": str(environment.local_world_size),
        "NODE_RANK": str(environment.node_rank),
        RUN_DIR_VARIABLE: str(where.run_dir.path),
        ATTEMPT_VARIABLE: str(where.number),
    }
    if environment.world_size > 1 and "MASTER_ADDR" not in os.environ:
        host, port = _master(environment, where.attempt_dir, config.cluster)
        variables |= {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
    return variables


def _master(environment: Environment, directory: Path, cluster: ClusterConfig) -> tuple[str, int]:
    """Rank 0's address, for programs that rendezvous by themselves: published by rank 0, read by the others."""
    published = directory / "master.json"
    address_of_rank_0 = Published(published, environment)
    atexit.register(address_of_rank_0.forget)
    if environment.rank == 0:
        address = {
            "hosts": own_addresses(environment, cluster.network_interface),
            "port": free_port(),
            "machine": machine(),
        }
        write_json(published, address)
        address_of_rank_0.look()  # hands it on to the ranks beside this one
        return "127.0.0.1" if environment.single_node else _reachable(address), int(str(address["port"]))
    deadline, pauses = time.monotonic() + cluster.rendezvous_timeout_s, Pauses()
    while (found := address_of_rank_0.look()) is None:
        if time.monotonic() > deadline:
            raise RendezvousError(
                f"rank 0, expected on node {environment.expected_node(0)}, did not publish its address within "
                f"{cluster.rendezvous_timeout_s} s",
                hint="see rank 0's log",
            )
        pauses.pause()
    return ("127.0.0.1" if found["machine"] == machine() else _reachable(found)), int(found["port"])


def _reachable(address: dict[str, object]) -> str:
    """The first of the published names that resolves here."""
    hosts = address["hosts"]
    assert isinstance(hosts, list)
    for host in hosts:
        try:
            socket.getaddrinfo(host, None)
            return str(host)
        except OSError:
            continue
    return str(hosts[0])


def _default_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2, signal.SIGTERM})


def _pass_signals_on(stop: StopSignals, program: subprocess.Popen[bytes]) -> None:
    """Outside of SLURM a signal may be for this process alone; srun signals the whole step by itself."""

    def forward() -> None:
        stop.wait()
        if program.poll() is None:
            program.terminate()

    threading.Thread(target=forward, name="pass-signals-on", daemon=True).start()


def _described(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {-code} ({signal.Signals(-code).name})"
