"""Paths in a config, and the program of job.command: made absolute, and looked for before a job is queued."""

from __future__ import annotations

import difflib
import functools
import json
import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace

from slurmtrain.checkpoint.format.directory import MANIFEST, committed
from slurmtrain.choices import Backend, JobKind
from slurmtrain.config.known_models import HUGGING_FACE, is_our_decoder
from slurmtrain.config.launched_program import IN_A_SHELL, paths_in, repeated_launcher, script_and_module
from slurmtrain.config.schema import Config
from slurmtrain.data.sources import config_check
from slurmtrain.errors import ConfigError
from slurmtrain.launch.code_source import CodeSource
from slurmtrain.system.paths import URL, absolute

if TYPE_CHECKING:
    from slurmtrain.config.sight import Seen


IMAGE_FILES = (".sif", ".sqsh", ".img", ".simg")
TEMPLATE_WORDS = ("chatml", "none")  # for prepare.chat_template in place of a path


def _path(path: str, cwd: Path) -> str:
    return str(absolute(path, cwd))


def _file_or_url(name: str, cwd: Path) -> str:
    return name if URL.match(name) else _path(name, cwd)


def _program(name: str, cwd: Path) -> str:
    # A name is looked up where the job runs.
    return _path(name, cwd) if os.sep in name or name.startswith("~") else name


def _if_there(name: str, cwd: Path) -> str:
    # Or it is a reference to a registry, or a name that the container knows.
    is_path = name.startswith((".", "~")) or name.endswith(IMAGE_FILES) or (name and (cwd / name).exists())
    return _path(name, cwd) if is_path and not URL.match(name) else name


def _mount(mount: str, cwd: Path) -> str:
    source, colon, target = mount.partition(":")
    return f"{_if_there(source, cwd)}{colon}{target}"


class Field(NamedTuple):
    """A field of the config that holds a path, or a list of them.

    Attributes:
        absolute: makes one absolute.
        what: what must be there when the job begins; "": nothing has to be.
        has: what must be in the folder, if it is one; a name or a pattern.
    """

    absolute: Callable[[str, Path], str]
    what: str = ""
    has: str = ""


OF_CLUSTER = {
    "container.image": Field(_if_there, "image"),
    "container.mounts": Field(_mount, "file or folder"),
    "venv": Field(_path, "virtual environment", "bin/activate"),
    "conda_env": Field(_program, "environment"),
    "python": Field(_program, "interpreter"),
    "stage.data": Field(lambda path, cwd: os.path.normpath(_path(path, cwd)), "file or folder"),
    "slurm_conf": Field(_path),
}
PATHS = {
    "job.runs_dir": Field(_path),
    **{f"cluster.{key}": field for key, field in OF_CLUSTER.items()},
    **{f"eval.cluster.{key}": field._replace(what="") for key, field in OF_CLUSTER.items()},
    "checkpoint.restore_from": Field(_file_or_url, "checkpoint", MANIFEST),
    "checkpoint.mirror": Field(_file_or_url),
    "prepare.inputs": Field(_path, "file or folder"),
    "prepare.output": Field(_path),
    "prepare.tokenizer": Field(lambda name, cwd: name if name == "bytes" else _path(name, cwd), "file"),
    "prepare.chat_template": Field(lambda name, cwd: name if name in TEMPLATE_WORDS else _path(name, cwd), "file"),
}


def with_absolute_paths(config: Config, cwd: Path) -> Config:
    """Make paths that are relative to `cwd`, the folder of the command, absolute: all jobs of the run run elsewhere."""
    found = config
    for key, field in PATHS.items():
        in_container = key == "cluster.python" and config.cluster.container.kind is not None
        if not in_container:
            found = _replaced(found, key.split("."), field.absolute, cwd)
    data, sets = (config_check.with_absolute_paths(each, cwd) for each in (config.data, config.eval.sets))
    model = {**config.model, "path": _path(config.model["path"], cwd)} if _has_weights(config.model) else config.model
    return replace(found, data=data, model=model, eval=replace(found.eval, sets=sets))


def _replaced(node: Any, keys: Sequence[str], how: Callable[[str, Path], str], cwd: Path) -> Any:
    """Return a group of fields, or a mapping of some of them, with text under a key changed; the same if nothing changes."""
    name, *rest = keys
    old = node.get(name) if isinstance(node, Mapping) else getattr(node, name, None)
    new = old
    if rest and old is not None:
        new = _replaced(old, rest, how, cwd)
    elif isinstance(old, list):
        new = [how(each, cwd) if isinstance(each, str) else each for each in old]
    elif isinstance(old, str) and old:
        new = how(old, cwd)
    if new == old:
        return node
    return {**node, name: new} if isinstance(node, Mapping) else replace(node, **{name: new})


def _has_weights(model: Mapping[str, Any]) -> bool:
    """Return whether the config group `model` names a folder of weights."""
    known = model.get("_target_") == HUGGING_FACE or is_our_decoder(model)
    return known and isinstance(model.get("path"), str) and bool(model["path"])


def check_named_paths(config: Config, cwd: Path, *, later: bool = False, begun: bool = False) -> list[str]:
    """Check that the paths in the config exist, as far as this machine can know.

    Each node has its own /tmp and the like, and a container its own paths, so these are not checked.

    Args:
        cwd: the folder of the command.
        later: the job waits for other jobs, which may still make its input.
        begun: the run has checkpoints of its own, so that what it began with is not read again.

    Returns:
        What only the nodes can know, and what was probably not meant, a sentence each for the person.

    Raises:
        ConfigError: something is missing, and the message names the first.
    """
    # What only makes paths absolute, as a dry run does, needs none of these.
    from slurmtrain.config.sight import OF_EACH_NODE, Sight, look

    config = with_absolute_paths(config, cwd)
    check_program(config, cwd)
    unknown: dict[str, None] = {}
    places: dict[str, None] = {}  # to name in cluster.node_paths
    for key, field, path in _named(config, later=later, begun=begun):
        seen = look(path / field.has, config.cluster.node_paths)
        if seen.sight == Sight.MISSING or (seen.sight == Sight.UNKNOWN and config.cluster.backend == Backend.LOCAL):
            raise _missing(key, field, path, seen, cwd)
        if seen.sight == Sight.UNKNOWN:
            unknown[f"{key} ({path})"] = None
            whole = seen.place in OF_EACH_NODE[1:] or seen.missing is None  # it is on every machine, with other files
            places[str(seen.place if whole else seen.place / (seen.missing or ""))] = None
    warnings = []
    if unknown:
        are = "is" if len(unknown) == 1 else "are"
        warnings.append(
            f"only the nodes can know whether {', '.join(unknown)} {are} there: this machine does not see "
            f"{' or '.join(places)}, or has its own; cluster.node_paths=[{','.join(places)}] says that this is meant"
        )
    if repeated := repeated_launcher(config):
        warnings.append(repeated)
    if config.job.kind == JobKind.COMMAND and config.cluster.backend != Backend.KUBERNETES:
        word, cluster = shlex.split(config.job.command or "")[0], config.cluster
        bring = (cluster.container.kind, cluster.modules, cluster.setup, cluster.venv, cluster.conda_env)
        known = os.sep in word or IN_A_SHELL.search(word) or any(bring) or "PATH" in cluster.env or shutil.which(word)
        if not known:
            warnings.append(f"job.command: there is no program {word} on this machine's PATH; do the nodes have it?")
    return warnings


def _missing(key: str, field: Field, path: Path, seen: Seen, cwd: Path) -> ConfigError:
    """Return the error for a path that is certainly not there."""
    missing, hint = seen.missing or "", f"relative paths start in the folder of the command, {cwd}"
    names = sorted(os.listdir(seen.place)) if seen.place.is_dir() and os.access(seen.place, os.R_OK | os.X_OK) else []
    folders = (path, path / "checkpoints")  # with the folder of a run, its newest checkpoint is meant
    if newest := next((found[-1] for folder in folders if (found := committed(folder))), None):
        hint = f"its newest one is {newest}"
    elif path.is_dir() and field.has:
        hint = f"it is incomplete, or no {field.what}"
    elif close := difflib.get_close_matches(missing, names, n=2, cutoff=0.7):
        hint = f"did you mean {' or '.join(str(seen.place / name) for name in close)}?"
    return ConfigError(f"{key}: there is no {field.what} {path}: {seen.place} has no {missing}", hint=hint)


def _named(config: Config, *, later: bool, begun: bool) -> Iterator[tuple[str, Field, Path]]:
    """Yield the fields whose paths must exist when the job begins, each with its name for messages, and the path."""
    kind, inside = config.job.kind, config.cluster.container.kind is not None  # which has its own files
    for key, field in PATHS.items():
        of_job = key.startswith("cluster.") or key.startswith("prepare.") == (kind == JobKind.PREPARE)
        to_come = later and (key == "cluster.stage.data" or not key.startswith("cluster."))
        unused = (begun and key == "checkpoint.restore_from") or (inside and not key.startswith("cluster.container."))
        if not field.what or not of_job or to_come or unused:
            continue
        value: Any = functools.reduce(getattr, key.split("."), config)
        for path in value if isinstance(value, list) else [value]:
            if path and os.path.isabs(path):  # else it is a name, or a URL
                of_mount = key == "cluster.container.mounts"
                where = path.partition(":")[0] if of_mount else path
                yield f"{key} has {path!r}" if of_mount else key, field, Path(where)
    if inside or later or kind != JobKind.TRAIN:
        return
    for values, name in ((config.data, "data"), (config.eval.sets, "eval.sets")):
        for path in config_check.prepared_folders(values):
            yield "data.path" if name == "data" else name, Field(_path, "folder of prepared data", MANIFEST), path
    if not _has_weights(config.model):
        return
    folder = Path(config.model["path"])
    if not begun or config.lora.r > 0:  # later starts read the weights of the checkpoint, but adapters not theirs
        for name in _files_of_weights(folder):
            yield "model.path", Field(_path, "folder of weights", name), folder
    elif not is_our_decoder(config.model):
        yield "model.path", Field(_path, "folder"), folder  # whose config.json describes the model


def _files_of_weights(folder: Path) -> Sequence[str]:
    """Return the files that a folder of weights must have, some of which an interrupted download has not written."""
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_bytes())
        return sorted({str(name) for name in index["weight_map"].values()})
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return ["*.safetensors"]


# What can be wrong with the program of job.command.


def check_program(config: Config, cwd: Path) -> None:
    """Check that the interpreter and the script or module of job.command exist, and that it can be executed.

    Raises:
        ConfigError: something is missing that this machine would see.
    """
    from slurmtrain.config.sight import Sight, look

    if config.job.kind != JobKind.COMMAND:
        return
    command = config.job.command or ""
    word, (script, module) = shlex.split(command)[0], script_and_module(command)
    for name in filter(None, (word if os.sep in word else None, script)):
        path = absolute(name, cwd)
        if not os.path.isabs(name):  # the job gets it from here, wherever this is
            missing = not path.exists()
        elif config.cluster.container.kind is not None:  # which has its own files
            continue
        else:
            missing = look(path, config.cluster.node_paths).sight == Sight.MISSING
        if missing:
            raise ConfigError(
                f"job.command: there is no {path.name} in {path.parent}",
                hint="its paths are relative to the folder of the command, which the job gets a snapshot of",
            )
    path = absolute(word, cwd)
    as_argument = f"submit -- {'python' if path.suffix == '.py' else 'bash'} {command}"
    if os.sep not in word and path.suffix in (".py", ".sh") and path.is_file() and shutil.which(word) is None:
        message = f"job.command: {word} is a file of this folder, and no program that is found in PATH"
        raise ConfigError(message, hint=f"{as_argument}, or ./{word} for an executable file")
    if os.sep in word and path.is_file() and not os.access(path, os.X_OK):
        raise ConfigError(f"job.command: {word} cannot be executed", hint=f"{as_argument}, or chmod +x {word}")
    # A folder without __init__.py may have further parts elsewhere.
    if module and (cwd / module.partition(".")[0] / "__init__.py").exists() and not _can_run(cwd, module):
        raise ConfigError(
            f"job.command: there is no module {module} in {cwd}, or it is a package without __main__.py",
            hint="python -m needs the name with dots, without .py",
        )


def _can_run(folder: Path, module: str) -> bool:
    """Return whether `python -m MODULE` finds the module in a folder: source, compiled, or a package with __main__.py."""
    path = folder.joinpath(*module.split("."))
    # name.py, name.so, name.cpython-311-....so
    return (path / "__main__.py").exists() or any(path.parent.glob(f"{path.name}.*[yo]"))


def check_in_snapshot(config: Config, workdir: Path, source: CodeSource, cwd: Path) -> list[str]:
    """Check that the program of job.command is in the snapshot, and return a warning for each other path that is not.

    Args:
        workdir: the working directory of the ranks.

    Raises:
        ConfigError: it is not, because git ignores it.
    """
    if source.root is None or config.job.kind != JobKind.COMMAND:  # without a root, it runs in `cwd` itself
        return []
    top, command = os.path.realpath(source.root), config.job.command or ""

    def why_missing(path: str) -> str:
        if not Path(os.path.realpath(cwd / path)).is_relative_to(top):
            return f"it lies outside of {source.root}"
        return "git ignores it" if source.git else "hidden files are not copied"

    script, module = script_and_module(command)
    refused = None
    if script is not None and not os.path.isabs(script) and not (workdir / script).exists():
        refused, why = script, why_missing(script)
    elif module is not None and _can_run(cwd, module) and not _can_run(workdir, module):
        refused, why = f"the module {module}", why_missing(module.replace(".", "/"))
    if refused is not None:
        ways = ["take it out of .gitignore", "copy the whole folder with job.snapshot=cwd"] if source.git else []
        raise ConfigError(
            f"job.command: {refused} is not in the snapshot that the job would run, because {why}",
            hint=", ".join([*ways, "or run in place: job.snapshot=none"]).removeprefix("or "),
        )
    return [
        f"{path} is not in the snapshot that the job runs, because {why_missing(path)}, so `{word}` does not name it there; "
        f"name it by its absolute path: {absolute(path, cwd)}"
        for word, path in dict.fromkeys(paths_in(command))
        if not os.path.isabs(path) and os.path.exists(cwd / path) and not os.path.exists(workdir / path)
    ]
