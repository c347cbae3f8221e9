"""What job.launcher makes of a config and of a command: processes per node, and which words are the launcher's own.

Pure functions, for the checks before the queue, the supervisor, and the tasks that start a launcher.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from slurmtrain.choices import JobKind, Launcher
from slurmtrain.config.program_words import PYTHON, SHELLS
from slurmtrain.config.schema import Config
from slurmtrain.errors import ConfigError

# The module by which Python starts a launcher, and what else people type for it.
MODULES: dict[str, str] = {
    Launcher.TORCHRUN: "torch.distributed.run",
    Launcher.ACCELERATE: "accelerate.commands.launch",
    Launcher.DEEPSPEED: "deepspeed.launcher.runner",
}
PACKAGES: dict[str, str] = {launcher: module.partition(".")[0] for launcher, module in MODULES.items()}
HEADS: dict[str, tuple[tuple[str, ...], ...]] = {
    Launcher.TORCHRUN: (("torchrun",),),
    Launcher.ACCELERATE: (("accelerate", "launch"), ("accelerate-launch",)),
    Launcher.DEEPSPEED: (("deepspeed",),),
}
# Options that are derived, by their names without dashes and underscores.
DERIVED: dict[str, tuple[str, ...]] = {
    Launcher.TORCHRUN: (
        *("nnodes", "nprocpernode", "noderank", "masteraddr", "masterport", "standalone", "maxrestarts"),
        *("rdzvbackend", "rdzvendpoint", "rdzvid", "rdzvconf"),
    ),
    Launcher.ACCELERATE: (
        *("numprocesses", "nummachines", "machinerank", "mainprocessip", "mainprocessport", "rdzvbackend", "rdzvconf"),
        *("maxrestarts", "samenetwork", "deepspeedhostfile", "deepspeedmultinodelauncher", "mpirunhostfile"),
    ),
    Launcher.DEEPSPEED: (
        *("hostfile", "numnodes", "numgpus", "include", "exclude", "noderank", "masteraddr", "masterport", "nossh"),
        *("launcher", "launcherargs", "forcemulti", "nosshcheck"),
    ),
}
# Options by which a launcher that is typed for each node joins those of the other nodes.
OF_SEVERAL_NODES = ("nnodes", "nummachines", "hostfile", "numnodes")
SHORT = {"-H": "hostfile", "-i": "include", "-e": "exclude"}  # of deepspeed
OF_ONE_PROCESS = re.compile(r"\$(?:\{(RANK|LOCAL_RANK)\}|(RANK|LOCAL_RANK)\b)")


@dataclass(frozen=True)
class NodeShape:
    """What is started on each node.

    Attributes:
        tasks: tasks of srun.
        cpus_per_task: CPUs of each of them.
        processes: processes of the program.
        threads: CPUs of each of these.
    """

    tasks: int
    cpus_per_task: int
    processes: int
    threads: int


def node_shape(config: Config) -> NodeShape:
    """Return what is started on each node: one process per task, or one launcher that starts all processes."""
    cluster = config.cluster
    tasks, cpus = cluster.tasks_per_node, cluster.cpus_per_task
    if not has_launcher(config):
        return NodeShape(tasks, cpus, tasks, cpus)
    processes = tasks if tasks > 1 else max(1, cluster.gpus_per_node)
    return NodeShape(1, tasks * cpus, processes, max(1, tasks * cpus // processes))


def has_launcher(config: Config) -> bool:
    """Return whether a launcher starts the processes, and not srun."""
    return config.job.kind == JobKind.COMMAND and config.job.launcher != Launcher.NONE


def as_started(config: Config) -> Config:
    """Return the config with the tasks that srun starts, which are launchers where the config has one."""
    if not has_launcher(config):
        return config
    shape = node_shape(config)
    cluster = dataclasses.replace(config.cluster, tasks_per_node=shape.tasks, cpus_per_task=shape.cpus_per_task)
    return dataclasses.replace(config, cluster=cluster)


@dataclass(frozen=True)
class LaunchedProgram:
    """A command, taken apart for a launcher.

    Attributes:
        interpreter: the Python that the command names; None: it names none.
        beside: a launcher that the command names, beside whose file its Python lies; None: it names none.
        options: the launcher's own options in the command.
        words: the program: a Python script or module with its arguments and what Python takes before, or any program.
        python: the words are for Python, which is not among them.
        script_end: how many of the words come before the program's own arguments; 0: it is not known.
    """

    interpreter: str | None
    beside: str | None
    options: tuple[str, ...]
    words: tuple[str, ...]
    python: bool
    script_end: int


def launched_program(launcher: str, command: str) -> LaunchedProgram:
    """Take a command apart: `train.py ...`, `python train.py ...`, `torchrun OPTIONS train.py ...`, or any other program.

    Raises:
        ConfigError: it has options of the launcher that are derived, or no program can be found among its words.
    """
    words = shlex.split(command)
    rest = _after_launcher(launcher, words)
    if PYTHON.match(os.path.basename(words[0])):
        if rest is not None:
            return _of_launcher(launcher, words[0], None, rest, command)
        return LaunchedProgram(words[0], None, (), tuple(words[1:]), True, _script_end(words[1:]))
    if rest is not None:
        return _of_launcher(launcher, None, words[0], rest, command)
    is_script = words[0].endswith(".py")
    return LaunchedProgram(None, None, (), tuple(words), is_script, 1 if is_script else 0)


def _after_launcher(launcher: str, words: list[str]) -> list[str] | None:
    """Return the words after those that start a launcher; None: the command does not begin with it."""
    if PYTHON.match(os.path.basename(words[0])):
        return words[3:] if words[1:3] in (["-m", MODULES[launcher]], ["-m", "torch.distributed.launch"]) else None
    for head in HEADS[launcher]:
        if (os.path.basename(words[0]), *words[1 : len(head)]) == head:
            return words[len(head) :]
    return None


def _option(word: str) -> str:
    """Return the name of an option without dashes and underscores."""
    return SHORT.get(word) or word.partition("=")[0].lstrip("-").replace("-", "").replace("_", "")


def repeated_launcher(config: Config) -> str | None:
    """Return a warning where each of several tasks would start a launcher, whose processes know nothing of the others'."""
    job, cluster = config.job, config.cluster
    tasks = cluster.tasks_per_node * cluster.node_range.most
    if job.kind != JobKind.COMMAND or job.launcher != Launcher.NONE or tasks == 1:
        return None
    words = shlex.split(job.command or "")
    for launcher in HEADS if words else ():
        rest = _after_launcher(launcher, words)
        if rest is None or any(word.startswith("-") and _option(word) in OF_SEVERAL_NODES for word in rest):
            continue
        return (
            f"job.command: each of the {tasks} ranks starts {launcher} by itself, so that {tasks} trainings run beside each "
            f"other and write the same files; job.launcher={launcher} starts one on each node, and all of them train together"
        )
    return None


def _of_launcher(
    launcher: str, interpreter: str | None, beside: str | None, rest: list[str], command: str
) -> LaunchedProgram:
    """Divide the words after a launcher's name: its own options, and the program."""
    for at, word in enumerate(rest):
        if word.startswith("-") and _option(word) in DERIVED[launcher]:
            raise ConfigError(
                f"job.command: {word.partition('=')[0]} is derived with job.launcher={launcher}",
                hint="leave it out: cluster.nodes, gpus_per_node and tasks_per_node decide; or run the command as it is: "
                "job.launcher=none",
            )
        if word in ("-m", "--module"):
            return LaunchedProgram(
                interpreter, beside, tuple(rest[:at]), ("-m", *rest[at + 1 :]), True, 2 if rest[at + 1 :] else 0
            )
        if word in ("--no-python", "--no_python"):
            return LaunchedProgram(interpreter, beside, tuple(rest[:at]), tuple(rest[at + 1 :]), False, 0)
        if word.endswith(".py") and not word.startswith("-"):
            return LaunchedProgram(interpreter, beside, tuple(rest[:at]), tuple(rest[at:]), True, 1)
    raise ConfigError(
        f"job.command: which word of {command!r} is the program cannot be told",
        hint="a script whose name ends with .py, -m MODULE, or --no-python PROGRAM",
    )


def _script_end(words: Sequence[str]) -> int:
    """Return how many words of Python come before the program's own arguments; 0 where code stands in place of a script."""
    for at, word in enumerate(words):
        if word == "-m":
            return at + 2 if at + 1 < len(words) else 0
        if word == "-c":
            return 0
        if word.endswith(".py") and not word.startswith("-"):
            return at + 1
    return 0


def program_of(config: Config, python: str = "python") -> str:
    """Return the command without its launcher, as `python train.py ...`, for checks of what it runs.

    Args:
        python: stands where the command names no Python.
    """
    command = config.job.command or ""
    if not has_launcher(config):
        return command
    program = launched_program(config.job.launcher, command)
    words = [program.interpreter or program.beside or python, *program.words] if program.python else program.words
    return shlex.join(words)


def check_launched(config: Config) -> None:
    """Raise ConfigError where a command does not suit its launcher."""
    launcher = config.job.launcher
    command = config.job.command or ""
    program = launched_program(launcher, command)
    if not program.words or program.words == ("-m",):
        raise ConfigError(f"job.command={command!r} contains no program", hint="submit -- train.py --lr 1e-3")
    for word in program.words:
        if os.path.basename(word) in SHELLS:
            return
        found = OF_ONE_PROCESS.search(word)
        if found is not None:
            raise ConfigError(
                f"job.command: {found.group()} cannot be replaced with job.launcher={launcher}, which starts a process for "
                "each rank later",
                hint="read it from the environment in the program",
            )
