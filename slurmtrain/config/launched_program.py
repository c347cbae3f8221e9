"""What job.command runs: its script or module, and the files that it names. Pure functions, for the checks before the queue."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence

from slurmtrain.choices import JobKind
from slurmtrain.config.overrides import all_keys, literal_override, shipped_groups, unknown_field
from slurmtrain.config.schema import Config
from slurmtrain.errors import UsageError, nearest

PYTHON = re.compile(r"python(\d+(\.\d+)?)?$")
SHELLS = ("bash", "sh", "dash", "zsh", "ksh", "fish", "csh", "tcsh")
IN_A_SHELL = re.compile(r"[$`*?{}]")  # characters that only a shell, or a rank, can expand
WITH_VALUE = re.compile(r"-[XW]|--check-hash-based-pycs")  # options of Python
# What starts several processes of a program: its training and another one know nothing of each other if each rank starts one.
LAUNCHERS = (
    *("torchrun", "python -m torch.distributed.run", "python -m torch.distributed.launch"),
    *("accelerate launch", "accelerate-launch", "deepspeed"),
)
# Options by which a launcher that is typed for each node joins those of the other nodes.
OF_SEVERAL_NODES = ("nnodes", "nummachines", "hostfile", "numnodes")


def repeated_launcher(config: Config) -> str | None:
    """Return a warning where each of several tasks would start a launcher, whose processes know nothing of the others'."""
    tasks = config.cluster.tasks_per_node * config.cluster.node_range.most
    words = shlex.split(config.job.command or "") if config.job.kind == JobKind.COMMAND else []
    if not words or tasks == 1:
        return None
    program = os.path.basename(words[0])
    typed = ["python" if PYTHON.match(program) else program, *words[1:]]
    rest = next((typed[len(head.split()) :] for head in LAUNCHERS if typed[: len(head.split())] == head.split()), None)
    options = {re.sub("[-_]", "", word.partition("=")[0]) for word in rest or () if word.startswith("-")}
    if rest is None or not options.isdisjoint(OF_SEVERAL_NODES):
        return None
    return (
        f"job.command: each of the {tasks} ranks starts {os.path.basename(words[0])} by itself, so that {tasks} trainings run "
        "beside each other and write the same files; without it, as in `python train.py`, all ranks train together"
    )


# What a command runs, and which files it names.


def script_and_module(command: str) -> tuple[str | None, str | None]:
    """Return the file that a command runs, or the module that it runs with `-m`; None where it names neither."""
    words = _words(command)
    program = os.path.basename(words[0]) if words else ""
    python, shell = PYTHON.match(program) is not None, program in SHELLS
    if not (python or shell or program in ("torchrun", "accelerate", "deepspeed")):
        is_path = bool(words) and os.sep in words[0] and not IN_A_SHELL.search(words[0])
        return (words[0] if is_path else None), None
    rest = iter(words[1:])
    for word in rest:
        if word in ("-m", "--module") and not shell:
            module = next(rest, "")
            return None, module if re.fullmatch(r"\w+(\.\w+)*", module) else None
        if (python and WITH_VALUE.fullmatch(word)) or (shell and re.fullmatch(r"[-+]\w*[oO]", word)):
            next(rest, None)
        elif not word.startswith("-") and (python or shell or (word.endswith(".py") and "=" not in word)):
            return None if IN_A_SHELL.search(word) else word, None
        elif (python or shell) and re.match(r"-[^-XW]*[cm]|-$", word):  # code, or short options that end with -m
            break
    return None, None


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
    given = {match[2]: word for word in overrides if (match := re.match(r"\+(job\.args\.)?([a-z_]\w*)=", word))}
    used: dict[str, str] = {}

    def reference(match: re.Match[str]) -> str:
        name = match[1]
        if name in given:
            used[name] = f"job.args.{name}"
        elif "." not in name and name not in all_keys():
            raise UsageError(
                f"the program has {match[0]}, and the config no {name}: choose it with +{name}=VALUE",
                hint=nearest(name, given) if given else None,
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
    renamed = {given[name]: f"+{key}={given[name].partition('=')[2]}" for name, key in used.items()}
    kind = [] if "job=command" in overrides else ["job=command"]
    return [*(renamed.get(word, word) for word in overrides), *kind, command]
