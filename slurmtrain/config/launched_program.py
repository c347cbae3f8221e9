"""What job.command runs, and what job.launcher makes of it: processes per node, the launcher's own words, the script.

Pure functions, for the checks before the queue, the supervisor, and the tasks that start a launcher.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from slurmtrain.choices import JobKind, Launcher
from slurmtrain.config.overrides import all_keys, literal_override, shipped_groups, unknown_field
from slurmtrain.config.schema import Config
from slurmtrain.errors import ConfigError, UsageError, nearest

PYTHON = re.compile(r"python(\d+(\.\d+)?)?$")
SHELLS = ("bash", "sh", "dash", "zsh", "ksh", "fish", "csh", "tcsh")
IN_A_SHELL = re.compile(r"[$`*?{}]")  # characters that only a shell, or a rank, can expand
WITH_VALUE = re.compile(r"-[XW]|--check-hash-based-pycs")  # options of Python
# The module by which Python starts a launcher, and the words that people type for it.
MODULES: dict[str, str] = {
    Launcher.TORCHRUN: "torch.distributed.run",
    Launcher.ACCELERATE: "accelerate.commands.launch",
    Launcher.DEEPSPEED: "deepspeed.launcher.runner",
}
HEADS: dict[str, tuple[str, ...]] = {
    Launcher.TORCHRUN: ("torchrun", "python -m torch.distributed.launch"),
    Launcher.ACCELERATE: ("accelerate launch", "accelerate-launch"),
    Launcher.DEEPSPEED: ("deepspeed",),
}
# Options of launchers that are derived, by their names without dashes and underscores.
DERIVED = {
    *("nnodes", "nprocpernode", "noderank", "masteraddr", "masterport", "standalone", "maxrestarts", "rdzvbackend"),
    *("rdzvendpoint", "rdzvid", "rdzvconf", "numprocesses", "nummachines", "machinerank", "mainprocessip"),
    *("mainprocessport", "samenetwork", "deepspeedhostfile", "deepspeedmultinodelauncher", "mpirunhostfile"),
    *("hostfile", "numnodes", "numgpus", "include", "exclude", "nossh", "launcher", "launcherargs", "forcemulti"),
    "nosshcheck",
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
    is_python, rest = PYTHON.match(os.path.basename(words[0])) is not None, _after_launcher(launcher, words)
    interpreter = words[0] if is_python else None
    if rest is None:
        own = tuple(words[1:] if is_python else words)
        is_python = is_python or words[0].endswith(".py")
        return LaunchedProgram(interpreter, None, (), own, is_python, _script_end(own) if is_python else 0)
    beside = None if is_python else words[0]
    for at, word in enumerate(rest):
        if word.startswith("-") and _option(word) in DERIVED:
            raise ConfigError(
                f"job.command: {word.partition('=')[0]} is derived with job.launcher={launcher}",
                hint="leave it out: cluster.nodes, gpus_per_node and tasks_per_node decide; or run the command as it is: "
                "job.launcher=none",
            )
        if word in ("--no-python", "--no_python"):
            return LaunchedProgram(interpreter, beside, tuple(rest[:at]), tuple(rest[at + 1 :]), False, 0)
        if word in ("-m", "--module") or (word.endswith(".py") and not word.startswith("-")):
            own = (word if word.endswith(".py") else "-m", *rest[at + 1 :])
            return LaunchedProgram(interpreter, beside, tuple(rest[:at]), own, True, _script_end(own))
    raise ConfigError(
        f"job.command: which word of {command!r} is the program cannot be told",
        hint="a script whose name ends with .py, -m MODULE, or --no-python PROGRAM",
    )


def _script_end(words: Sequence[str]) -> int:
    """Return how many words of Python come before the program's own arguments; 0 where code stands in place of a script."""
    return max(0, _named(["python", *words])[2] - 1)


def _after_launcher(launcher: str, words: Sequence[str]) -> list[str] | None:
    """Return the words after those that start a launcher; None: the command does not begin with it."""
    program = os.path.basename(words[0])
    typed = ["python" if PYTHON.match(program) else program, *words[1:]]
    for head in (f"python -m {MODULES[launcher]}", *HEADS[launcher]):
        if typed[: len(head.split())] == head.split():
            return list(words[len(head.split()) :])
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


def program_of(config: Config) -> str:
    """Return the command without its launcher, as `python train.py ...`, for checks of what it runs."""
    command = config.job.command or ""
    if not has_launcher(config):
        return command
    program = launched_program(config.job.launcher, command)
    words = [program.interpreter or program.beside or "python", *program.words] if program.python else program.words
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


# What a command runs, and which files it names.


def script_and_module(command: str) -> tuple[str | None, str | None]:
    """Return the file that a command runs, or the module that it runs with `-m`; None where it names neither."""
    script, module, _ = _named(_words(command))
    return script, module


def _named(words: Sequence[str]) -> tuple[str | None, str | None, int]:
    """Return the script or the module that words run, and how many words there are up to its name; 0: they name none."""
    program = os.path.basename(words[0]) if words else ""
    python, shell = PYTHON.match(program) is not None, program in SHELLS
    if not (python or shell or program in ("torchrun", "accelerate", "deepspeed")):
        is_path = bool(words) and os.sep in words[0] and not IN_A_SHELL.search(words[0])
        return (words[0], None, 1) if is_path else (None, None, 0)
    rest = iter(enumerate(words[1:], 2))
    for end, word in rest:
        if word in ("-m", "--module") and not shell:
            end, module = next(rest, (0, ""))
            return None, module if re.fullmatch(r"\w+(\.\w+)*", module) else None, end
        if (python and WITH_VALUE.fullmatch(word)) or (shell and re.fullmatch(r"[-+]\w*[oO]", word)):
            next(rest, None)
        elif not word.startswith("-") and (python or shell or (word.endswith(".py") and "=" not in word)):
            return None if IN_A_SHELL.search(word) else word, None, end
        elif (python or shell) and re.match(r"-[^-XW]*[cm]|-$", word):  # code, or short options that end with -m
            break
    return None, None, 0


def paths_in(command: str) -> Iterator[tuple[str, str]]:
    """Yield each word of a command that may name a file by a relative path, and that path: `--data=a.bin`, `a.bin`.

    Words that only a shell or a rank can complete are left out, and so are the program and its script or module. The code of
    `bash -c CODE` is taken apart, too, unless it changes the folder.
    """
    words = _words(command)
    if words and os.path.basename(words[0]) in SHELLS and "-c" in words[1:-1]:
        code = _words(words[words.index("-c") + 1])
        words = ["bash", *code] if not {"cd", "pushd"} & set(code) else []
    runs = script_and_module(command)
    for word in words[1:]:
        path = word.partition("=")[2] if "=" in word else word
        if word in runs or not path or path.startswith(("-", "~", "/")) or IN_A_SHELL.search(path):
            continue
        yield word, path


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:
        return []


# Reads a field of the config: `${optim.lr}`, or `${lr}` of a `+lr=1e-3`. Names of variables have capitals.
REFERENCE = re.compile(r"\$\{([a-z_]\w*(?:\.\w+)*)\}")


def with_program(overrides: Sequence[str], program: Sequence[str]) -> list[str]:
    """Return the overrides that make every rank of job=command run this program, word for word.

    `${optim.lr}` in its words stands for the field of the config, and `${lr}` for the value of `+lr=...`, which becomes
    `job.args.lr`. Both are resolved when the config is composed, for each point of a sweep. The code of `bash -c` and
    `python -c` is left as it is.

    Raises:
        UsageError: a word refers to what the config does not have, or none to what was made for it.
    """
    given = {word[1:].partition("=")[0]: word for word in overrides if re.match(r"\+[a-z_]\w*=", word)}
    used: dict[str, str] = {}

    def reference(match: re.Match[str]) -> str:
        name = match[1]
        if name in given:
            used[name] = f"job.args.{name}"
        elif "." not in name and name not in all_keys():
            raise UsageError(
                f"the program has {match[0]}, and the config no {name}: choose it with +{name}=VALUE",
                hint=nearest(name, [*given, *(key for key in all_keys() if "." in key)]),
            )
        elif (unknown := unknown_field(name, f" (in {match[0]} of the program)")) is not None:
            raise unknown
        return f"\0{used.get(name, name)}\1"

    words, code = [], False
    for at, word in enumerate(program):
        words.append(word if code else REFERENCE.sub(reference, word))
        before = [os.path.basename(each) for each in program[:at]]
        runs_code = any(name in SHELLS or name.startswith("python") for name in before)
        code = runs_code and re.fullmatch(r"-\w*c", word) is not None
    for name in given.keys() - used.keys() - {*all_keys()} - shipped_groups():
        raise UsageError(
            f"no word of the program refers to {given[name]}",
            hint=f"write '${{{name}}}', in quotes, or the shell empties it",
        )
    command = literal_override("job.command", shlex.join(words)).replace("\0", "${in_quotes:${").replace("\1", "}}")
    renamed = {given[name]: f"+{key}{given[name][1 + len(name) :]}" for name, key in used.items()}
    kind = [] if "job=command" in overrides else ["job=command"]
    return [*(renamed.get(word, word) for word in overrides), *kind, command]
