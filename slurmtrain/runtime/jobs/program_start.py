"""How a rank of job=command starts its program: the words, the environment, and what its end is called.

Without a launcher a rank starts the program itself; with job.launcher it starts the launcher of its node.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmtrain.choices import StopSignal
from slurmtrain.config.launched_program import SHELLS, has_launcher, launched_program, node_shape
from slurmtrain.config.schema import ClusterConfig, Config
from slurmtrain.runs.run_dir import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE
from slurmtrain.runtime.addresses import (
    HeldPort,
    RendezvousError,
    address_of,
    interface_addresses,
    is_taken,
    machine,
    own_addresses,
)
from slurmtrain.runtime.attempt_context import AttemptContext
from slurmtrain.runtime.jobs.launched_process import STOPS, reset_signals
from slurmtrain.runtime.jobs.program_exit_code import ProcessEnd, end_of_node
from slurmtrain.runtime.jobs.program_loggers import checked, logger_variables, of_rank
from slurmtrain.runtime.jobs.torchrun import torchrun_variables, torchrun_words
from slurmtrain.runtime.shared_file_wait import Pauses, look
from slurmtrain.slurm.environment import Environment
from slurmtrain.system.files import write_json
from slurmtrain.system.signals import StopDuringStartError

SCRIPT_MAX = 1 << 20  # bytes; a longer file is no script
EARLY_WARNING = "SIGUSR2"
VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


@dataclass(frozen=True)
class ProgramStart:
    """What a rank starts.

    Attributes:
        words, variables: of the process, which is the program or a launcher.
        prepare: called in the new process before it becomes that.
        folder: where the processes of a launcher write how they have ended; None without one.
        name: what the program is called in a sentence.
        port: MASTER_PORT, on the rank that has chosen it: held until the program has ended.
        finished_code: job.finished_when if it is an exit code.
    """

    words: list[str]
    variables: dict[str, str]
    prepare: Callable[[], None]
    folder: Path | None
    name: str
    port: HeldPort
    finished_code: int | None = None

    def end(self, code: int, *, told: bool) -> ProcessEnd:
        """Return how the program has ended, given the exit code of what was started. Call it once, when nothing is left."""
        self.port.release()
        if self.folder is None:
            return ProcessEnd(-1, code, 0.0)
        ends = []
        for path in self.folder.glob("*.json"):
            # A full disk, or killed while it wrote: the launcher's code tells.
            with contextlib.suppress(OSError, ValueError):
                ends.append(ProcessEnd(**json.loads(path.read_text())))
        shutil.rmtree(self.folder, ignore_errors=True)
        return end_of_node(code, ends, told=told, finished_code=self.finished_code)


def start_of(
    config: Config, environment: Environment, context: AttemptContext, stop_requested: Callable[[], bool]
) -> ProgramStart:
    """Return what this rank starts.

    Raises:
        RendezvousError: rank 0 did not publish its address, or cannot listen on the port that the environment names.
        StopDuringStartError: a stop was requested before rank 0 had published its address.
    """
    command, port = config.job.command or "", HeldPort(config.cluster.ports, environment.node)
    if has_launcher(config):
        return _start_of_torchrun(config, environment, context, port, stop_requested)
    given = rank_variables(config, environment, context, port, stop_requested)
    words = with_variables(shlex.split(command), given, os.environ)
    heard = [signal.Signals[name] for name in heard_signals(config.job.stop_signal, words)]
    # Whatever this process blocks or ignores, the program starts with the defaults and may set its own traps.
    return ProgramStart(words, {**os.environ, **given}, lambda: reset_signals(heard), None, words[0], port)


def _start_of_torchrun(
    config: Config,
    environment: Environment,
    context: AttemptContext,
    port: HeldPort,
    stop_requested: Callable[[], bool],
) -> ProgramStart:
    """Return the start of torchrun on this node."""
    processes = node_shape(config).processes
    given = rank_variables(config, environment, context, port, stop_requested)
    variables = torchrun_variables(environment, processes, {"MASTER_PORT": "29500", **os.environ, **given})
    variables |= {name: given[name] for name in (RUN_DIR_VARIABLE, ATTEMPT_VARIABLE)} | checked(given, {})
    # RANK and LOCAL_RANK are this task's, and those of the program's processes come later.
    known = {name: variables[name] for name in (*given, "MASTER_ADDR", "MASTER_PORT") if name in variables}
    command = with_variables(shlex.split(config.job.command or ""), known, os.environ)
    program = launched_program(shlex.join(command))
    finished_when = config.job.finished_when or ""
    finished_code = int(finished_when) if finished_when.isdigit() else None
    folder = Path(tempfile.mkdtemp(prefix="slurmtrain-launched-"))
    words = torchrun_words(
        program,
        variables,
        nodes=len(environment.nodes),
        folder=folder,
        heard=heard_signals(config.job.stop_signal, program.words),
        finished_code=finished_code,
    )
    name = shlex.join(program.words[: max(1, program.script_end)])
    return ProgramStart(words, variables, _block_stops, folder, f"{name} (torchrun)", port, finished_code)


def heard_signals(stop_signal: str, words: Sequence[str]) -> list[str]:
    """Return the names of the stop signals that a program starts with the default for; it ignores SLURM's others.

    A shell cannot trap a signal that it was started to ignore. So one whose script has a trap for the early warning gets
    the default for that, too, if job.stop_signal is SIGTERM.
    """
    if stop_signal != StopSignal.SIGTERM or not any(_traps_warning(words, at) for at in range(len(words))):
        return [stop_signal]
    return [stop_signal, EARLY_WARNING]


def _traps_warning(words: Sequence[str], at: int) -> bool:
    """Return whether a word is a shell's code, or the name of its script, with the early warning in it."""
    of_shell = any(os.path.basename(word) in SHELLS for word in words[:at])
    if of_shell and "USR2" in words[at]:
        return True
    try:
        path = Path(words[at])
        if not path.is_file() or path.suffix == ".py" or path.stat().st_size > SCRIPT_MAX:
            return False
        text = path.read_bytes()
    except (OSError, ValueError):  # words that are no paths
        return False
    first = text.partition(b"\n")[0]
    return b"USR2" in text and (of_shell or (first.startswith(b"#!") and b"sh" in first))


def _block_stops() -> None:
    """Let a launcher, and what it starts before the program, hear no stop signal: the program and this package do."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)


def rank_variables(
    config: Config,
    environment: Environment,
    context: AttemptContext,
    master_port: HeldPort,
    stop_requested: Callable[[], bool],
) -> dict[str, str]:
    """Return the variables of the program: those of torch.distributed's env://, and ours.

    Args:
        master_port: taken on rank 0.

    Raises:
        RendezvousError, StopDuringStartError: as `start_of`.
    """
    variables = {
        "RANK": str(environment.rank),
        "WORLD_SIZE": str(environment.world_size),
        "LOCAL_RANK": str(environment.local_rank),
        "LOCAL_WORLD_SIZE": str(environment.local_world_size),
        "NODE_RANK": str(environment.node_rank),
        RUN_DIR_VARIABLE: str(context.run_dir.path),
        ATTEMPT_VARIABLE: str(context.number),
    }
    own = logger_variables(config, context) if environment.rank == 0 else {}
    if environment.rank == 0:
        _check_given_port(os.environ, environment)
    if environment.world_size == 1:
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(master_port.take()), **own}
    else:  # also where there is an address: rank 0 publishes its own when it has looked at the program's checkpoints
        published = context.attempt_dir.master_file
        host, port, of_loggers = _master(environment, published, config.cluster, own, master_port, stop_requested)
        own = checked(of_rank(checked(of_loggers, {}), environment.rank), config.cluster.env)
        variables |= own
        if (
            not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
        ):  # an engine tells pods the name of the first, and no port
            variables |= {"MASTER_ADDR": os.environ.get("MASTER_ADDR", host), "MASTER_PORT": str(port)}
    return variables


def with_variables(words: Sequence[str], given: Mapping[str, str], environment: Mapping[str, str]) -> list[str]:
    """Replace `$NAME` and `${NAME}` in a program's words for the variables that are only known when the rank runs.

    Words after the name of a shell are left to that shell. Every other `$` is unchanged, since no shell runs.

    Args:
        given: variables of this rank, all of which may be replaced.
        environment: variables of this process; its SLURM_* and MASTER_* may be replaced, and the folders of cluster.stage.
    """
    replaced = ("SLURM_", "MASTER_", "SLURMTRAIN_CODE", "SLURMTRAIN_DATA")
    known = {name: value for name, value in environment.items() if name.startswith(replaced)} | dict(given)
    shell = next((context for context, word in enumerate(words) if os.path.basename(word) in SHELLS), len(words))

    def value_of(match: re.Match[str]) -> str:
        return known.get(match.group(1) or match.group(2), match.group())

    return [VARIABLE.sub(value_of, word) if context < shell else word for context, word in enumerate(words)]


def _check_given_port(variables: Mapping[str, str], environment: Environment) -> None:
    """Raise RendezvousError if the environment names a port of this node on which the program cannot listen."""
    host, port = variables.get("MASTER_ADDR", ""), variables.get("MASTER_PORT", "")
    if environment.world_size == 1 or not port.isdigit() or address_of(host) not in interface_addresses().values():
        return
    if is_taken(int(port)):
        raise RendezvousError(
            f"MASTER_PORT={port} from the environment is in use on {environment.node}: another program listens there",
            hint="unset MASTER_ADDR and MASTER_PORT: each attempt then gets its own free port",
        )


def _master(
    environment: Environment,
    published: Path,
    cluster: ClusterConfig,
    own: Mapping[str, str],
    master_port: HeldPort,
    stop_requested: Callable[[], bool],
) -> tuple[str, int, object]:
    """Return rank 0's address, for programs that rendezvous by themselves: published by rank 0, read by the others.

    Args:
        own: further variables of the program, on rank 0; they are published, too, and returned everywhere.
    """
    if environment.rank == 0:
        address = {
            "hosts": own_addresses(environment, cluster.network_interface),
            "port": master_port.take(),
            "machine": machine(),
            "variables": dict(own),
        }
        write_json(published, address)
        return "127.0.0.1" if environment.single_node else _reachable(address), int(str(address["port"])), own
    deadline, pauses = time.monotonic() + cluster.rendezvous_timeout_s, Pauses.of_rank(environment)
    while (found := look(published)) is None:
        if time.monotonic() > deadline:
            raise RendezvousError(
                f"rank 0, expected on node {environment.expected_node(0)}, did not publish its address within "
                f"{cluster.rendezvous_timeout_s} s",
                hint="see rank 0's log",
                because_of_peer=True,
            )
        if stop_requested():
            raise StopDuringStartError
        pauses.pause()
    host = "127.0.0.1" if found["machine"] == machine() else _reachable(found)
    return host, int(found["port"]), found.get("variables")


def _reachable(address: dict[str, object]) -> str:
    """Return the first of the published names that resolves here."""
    hosts = address["hosts"]
    assert isinstance(hosts, list)
    for host in hosts:
        try:
            socket.getaddrinfo(host, None)
            return str(host)
        except OSError:
            continue
    return str(hosts[0])
