"""Paths in a config: made absolute, and checked on this machine before a job is queued."""

from __future__ import annotations

import dataclasses
import difflib
import glob
import json
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmtrain.checkpoint.format.directory import FINAL_NAME, MANIFEST, committed, step_of
from slurmtrain.choices import Backend, JobKind
from slurmtrain.config.families import HUGGING_FACE
from slurmtrain.config.launched_program import repeated_launcher
from slurmtrain.config.schema import ClusterConfig, Config, ContainerConfig, PrepareConfig
from slurmtrain.data.sources import config_check
from slurmtrain.errors import ConfigError
from slurmtrain.launch.program_check import check_program
from slurmtrain.our_decoder import is_our_decoder
from slurmtrain.runs.run_dir import RUN_DIR_VARIABLE
from slurmtrain.system.paths import URL, absolute
from slurmtrain.system.sight import OF_EACH_NODE, Seen, Sight, look, unwritable

IMAGE_FILES = (".sif", ".sqsh", ".img", ".simg")
TEMPLATE_WORDS = ("chatml", "none")  # for prepare.chat_template in place of a path
SOURCED = re.compile(r"^\s*(?:source|\.)\s+(.+?)\s*$")


def with_absolute_paths(config: Config, cwd: Path) -> Config:
    """Make paths that are relative to `cwd`, the folder of the command, absolute: all jobs of the run run elsewhere."""
    checkpoint = dataclasses.replace(
        config.checkpoint,
        restore_from=_file_or_url(config.checkpoint.restore_from, cwd),
        mirror=_file_or_url(config.checkpoint.mirror, cwd),
    )
    return dataclasses.replace(
        config,
        job=dataclasses.replace(config.job, runs_dir=str(absolute(config.job.runs_dir, cwd))),
        cluster=_cluster(config.cluster, cwd),
        data=config_check.with_absolute_paths(config.data, cwd),
        model=_model(config.model, cwd),
        eval=dataclasses.replace(
            config.eval,
            sets=config_check.with_absolute_paths(config.eval.sets, cwd),
            cluster=_changes(config.eval.cluster, cwd),
        ),
        checkpoint=checkpoint,
        prepare=_prepare(config.prepare, cwd),
    )


def _file_or_url(name: str | None, cwd: Path) -> str | None:
    return str(absolute(name, cwd)) if name and not URL.match(name) else name


def _cluster(cluster: ClusterConfig, cwd: Path) -> ClusterConfig:
    container = cluster.container
    return dataclasses.replace(
        cluster,
        container=dataclasses.replace(
            container,
            image=_image(container.image, cwd),
            mounts=[_mount(mount, cwd) for mount in container.mounts],
        ),
        stage=dataclasses.replace(
            cluster.stage, data=[os.path.normpath(absolute(path, cwd)) for path in cluster.stage.data]
        ),
        compile_cache=str(absolute(cluster.compile_cache, cwd)) if cluster.compile_cache else None,
        slurm_conf=str(absolute(cluster.slurm_conf, cwd)) if cluster.slurm_conf else cluster.slurm_conf,
        venv=str(absolute(cluster.venv, cwd)) if cluster.venv else cluster.venv,
        conda_env=_program(cluster.conda_env, cwd),
        # The interpreter of a container is a path inside of it.
        python=_program(cluster.python, cwd) if container.kind is None else cluster.python,
    )


def _changes(cluster: Mapping[str, Any], cwd: Path) -> dict[str, Any]:
    """Make the paths in eval.cluster absolute, which has only the fields that differ."""
    fields = {field.name for field in dataclasses.fields(ClusterConfig)} - {"container"}
    known: dict[str, Any] = {
        name: value for name, value in cluster.items() if name in fields and isinstance(value, str)
    }
    container = cluster.get("container")
    inside: dict[str, Any] = {}
    if isinstance(container, Mapping):
        image, mounts = container.get("image"), container.get("mounts")
        inside = {"image": _image(image, cwd)} if isinstance(image, str) else {}
        if isinstance(mounts, list):
            inside["mounts"] = [_mount(str(mount), cwd) for mount in mounts]
    whole = _cluster(ClusterConfig(**known), cwd)
    found = {**cluster, **{name: getattr(whole, name) for name in known}}
    return {**found, "container": {**container, **inside}} if isinstance(container, Mapping) else found


def _program(name: str | None, cwd: Path) -> str | None:
    """Make a program or environment absolute if it is a path; a name is looked up where the job runs."""
    return str(absolute(name, cwd)) if name and (os.sep in name or name.startswith("~")) else name


def _image(image: str | None, cwd: Path) -> str | None:
    """Make the image of a container absolute if it is a file; it may also be a reference to a registry."""
    if not image or URL.match(image):
        return image
    is_file = image.startswith((".", "~")) or image.endswith(IMAGE_FILES) or (cwd / image).exists()
    return str(absolute(image, cwd)) if is_file else image


def _mount(mount: str, cwd: Path) -> str:
    source, colon, target = mount.partition(":")
    is_path = source.startswith((".", "~")) or (source and not os.path.isabs(source) and (cwd / source).exists())
    return f"{absolute(source, cwd)}{colon}{target}" if is_path else mount


def _model(model: Mapping[str, Any], cwd: Path) -> dict[str, Any]:
    return {**model, "path": str(absolute(str(model["path"]), cwd))} if _has_weights(model) else dict(model)


def _has_weights(model: Mapping[str, Any]) -> bool:
    """Return whether the config group `model` names a folder of weights."""
    known = model.get("_target_") == HUGGING_FACE or is_our_decoder(model)
    return known and isinstance(model.get("path"), str) and bool(model["path"])


def _prepare(prepare: PrepareConfig, cwd: Path) -> PrepareConfig:
    def here(path: str) -> str:
        return str(absolute(path, cwd))

    named = prepare.tokenizer != "bytes"
    return dataclasses.replace(
        prepare,
        inputs=[here(path) for path in prepare.inputs],
        output=here(prepare.output) if prepare.output else None,
        tokenizer=here(prepare.tokenizer) if named else prepare.tokenizer,
        chat_template=prepare.chat_template
        if prepare.chat_template in (None, *TEMPLATE_WORDS)
        else here(prepare.chat_template),
    )


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
        ConfigError: something is missing, and the message names the first; or SLURM cannot write below the folder of
            runs.
    """
    runs = str(absolute(config.job.runs_dir, cwd))
    if config.cluster.backend == Backend.SLURM and "\\" in runs:
        raise ConfigError(
            f"runs cannot lie under {runs}: because of the backslash in its name, SLURM would write no job log there",
            hint="job.runs_dir, or SLURMTRAIN_RUNS, chooses another folder",
        )
    check_program(config, cwd)
    _check_steps_are_left(config)
    located = with_absolute_paths(config, cwd)
    if not later and not begun:
        _check_is_a_checkpoint(located)
    unknown = []
    for named in _named(located, cwd, later=later, begun=begun):
        seen = look(named.path, config.cluster.node_paths)
        if seen.sight == Sight.MISSING:
            raise _missing(named, seen, cwd)
        if seen.sight == Sight.UNKNOWN and config.cluster.backend == Backend.LOCAL:
            raise _missing(named, seen, cwd)
        if seen.sight == Sight.UNKNOWN:
            unknown.append((named, seen))
        elif seen.sight == Sight.THERE and (problem := named.problem(named.path)):
            raise ConfigError(f"{named.field}: {named.path} {problem[0]}", hint=problem[1])
    _check_outputs(located)
    repeated = repeated_launcher(config)
    return [
        *([_only_nodes_know(unknown)] if unknown else []),
        *_within_a_run(cwd),
        *([repeated] if repeated else []),
    ]


@dataclass(frozen=True)
class Named:
    """A path that must exist when the job begins.

    Attributes:
        field: the config's field, for messages.
        what: what it is to be.
        problem: says what is wrong with a path that is there, and what to do; None: nothing.
    """

    field: str
    path: Path
    what: str
    problem: Callable[[Path], tuple[str, str] | None] = lambda path: None


def _missing(named: Named, seen: Seen, cwd: Path) -> ConfigError:
    """Return the error for a path that is certainly not there."""
    hint = f"relative paths start in the folder of the command, {cwd}"
    if glob.has_magic(str(named.path)) and glob.has_magic(seen.missing or ""):
        return ConfigError(f"{named.field}: no {named.what} matches {named.path}", hint="check the spelling")
    if not os.access(seen.place, os.X_OK):
        return ConfigError(
            f"{named.field}: {named.path}: you have no permission to enter {seen.place}", hint="see `ls -ld` of it"
        )
    if close := _close_names(seen):
        hint = f"did you mean {close}?"
    if seen.place / (seen.missing or "") == named.path:
        return ConfigError(f"{named.field}: there is no {named.what} {named.path.name} in {seen.place}", hint=hint)
    return ConfigError(
        f"{named.field}: there is no {named.what} {named.path}: {seen.place} has no {seen.missing}", hint=hint
    )


def _close_names(seen: Seen) -> str | None:
    """Return names in the folder that are like the one that is missing."""
    try:
        names = sorted(os.listdir(seen.place))
    except OSError:
        return None
    close = difflib.get_close_matches(seen.missing or "", names, n=2, cutoff=0.7)
    return " or ".join(str(seen.place / name) for name in close) or None


def _only_nodes_know(unknown: Sequence[tuple[Named, Seen]]) -> str:
    """Return the sentence for the paths whose places this machine does not see."""
    places = {_place_of_nodes(seen): None for _, seen in unknown}
    named = ", ".join(dict.fromkeys(f"{each.field} ({each.path})" for each, _ in unknown))
    return (
        f"only the nodes can know whether {named} {'is' if len(unknown) == 1 else 'are'} there: this machine does not see "
        f"{' or '.join(places)}, or has its own; cluster.node_paths=[{','.join(places)}] says that this is meant"
    )


def _place_of_nodes(seen: Seen) -> str:
    """Return the folder to name in cluster.node_paths."""
    own = seen.place in OF_EACH_NODE[1:]  # which is there on every machine
    return str(seen.place if own or seen.missing is None else seen.place / seen.missing)


def _within_a_run(cwd: Path) -> list[str]:
    """Return a warning if a person submits from within another run's directory."""
    around = next((folder for folder in (cwd, *cwd.parents) if os.path.isfile(folder / "run.json")), None)
    if around is None or RUN_DIR_VARIABLE in os.environ:  # a program of that run submits
        return []
    return [f"this folder lies in the run {around.name}, which `runs prune` removes with all that is in it"]


def _check_outputs(config: Config) -> None:
    """Raise ConfigError if the job certainly cannot write where it is to write."""
    outputs = {}
    if config.job.kind == JobKind.PREPARE and config.prepare.output and config.cluster.container.kind is None:
        outputs["prepare.output"] = Path(config.prepare.output)
    for field, folder in outputs.items():
        if look(folder, config.cluster.node_paths).sight == Sight.UNKNOWN:
            continue
        if reason := unwritable(folder):
            raise ConfigError(
                f"{field}={folder} cannot be written: {reason}",
                hint="choose a folder that you can write to and that the nodes can see",
            )


def _check_is_a_checkpoint(config: Config) -> None:
    """Raise ConfigError if checkpoint.restore_from is a folder that this machine sees, or a run's id, and no checkpoint."""
    source = Path(config.checkpoint.restore_from or "")
    if not config.checkpoint.restore_from or URL.match(config.checkpoint.restore_from) or (source / MANIFEST).exists():
        return
    if source.is_dir():
        reason = f"it has no {MANIFEST}"
    elif of_run := next(Path(config.job.runs_dir).glob(f"*/{glob.escape(source.name)}/checkpoints"), None):
        source, reason = of_run.parent, "it is a run"
    else:
        return
    newest = [found[-1] for folder in (source, source / "checkpoints") if (found := committed(folder))]
    raise ConfigError(
        f"checkpoint.restore_from={source} is not a checkpoint: {reason}",
        hint=f"its newest one is {newest[0]}" if newest else "nor has it any; `checkpoints RUN` lists those of a run",
    )


def _check_steps_are_left(config: Config) -> None:
    """Raise ConfigError if the name of the checkpoint to continue from shows that all steps are done; the job looks into it."""
    source = Path(config.checkpoint.restore_from or "")
    if config.job.kind != JobKind.TRAIN or config.checkpoint.restore_only or not FINAL_NAME.fullmatch(source.name):
        return
    if step_of(source) >= config.train.steps:
        raise ConfigError(
            f"checkpoint.restore_from={source} is at step {step_of(source)} already, and "
            f"train.steps={config.train.steps}: there is nothing left to train",
            hint="to restart with its weights: checkpoint.restore_only=model; to continue from its step: more train.steps",
        )


def _named(config: Config, cwd: Path, *, later: bool, begun: bool) -> Iterator[Named]:
    """Yield everything that must exist when the job begins."""
    cluster, own = config.cluster, config.cluster.container.kind is None
    yield from _of_container(cluster.container)
    if cluster.venv and own:
        yield Named("cluster.venv", Path(cluster.venv), "virtual environment", _problem_of_venv)
    for field, name in (("cluster.conda_env", cluster.conda_env), ("cluster.python", cluster.python)):
        if name and os.path.isabs(name) and own:
            yield Named(field, Path(name), "environment" if field.endswith("env") else "interpreter")
    for line in cluster.setup:
        sourced = _sourced(line)
        if sourced is not None:
            yield Named(f"cluster.setup has {line!r}", absolute(sourced, cwd), "file")
    if later or not own:
        return
    for name in cluster.stage.data:
        yield Named("cluster.stage.data", Path(name), "file or folder")
    if config.job.kind == JobKind.PREPARE:
        yield from _of_prepare(config.prepare)
        return
    if config.checkpoint.restore_from and not begun and not URL.match(config.checkpoint.restore_from):
        yield Named("checkpoint.restore_from", Path(config.checkpoint.restore_from), "checkpoint")
    if config.job.kind != JobKind.TRAIN:
        return
    for values, field in ((config.data, "data"), (config.eval.sets, "eval.sets")):
        for path in _texts(values):
            yield Named("data.paths" if field == "data" else field, path, "file")
        for path in config_check.prepared_folders(values):
            yield Named("data.path" if field == "data" else field, path, "folder of prepared data")
    if _has_weights(config.model):
        folder, reads_weights = Path(config.model["path"]), not begun or config.lora.r > 0
        if reads_weights:
            yield Named("model.path", folder, "folder", _problem_of_weights)
        elif not is_our_decoder(config.model):
            yield Named("model.path", folder, "folder")  # whose config.json describes the model


def _of_container(container: ContainerConfig) -> Iterator[Named]:
    if container.image and os.path.isabs(container.image):
        yield Named("cluster.container.image", Path(container.image), "image")
    for mount in container.mounts:
        source = mount.partition(":")[0]
        if os.path.isabs(source):
            yield Named(f"cluster.container.mounts has {mount!r}", Path(source), "file or folder")


def _of_prepare(prepare: PrepareConfig) -> Iterator[Named]:
    for path in prepare.inputs:
        yield Named("prepare.inputs", Path(path), "file or folder")
    if prepare.tokenizer != "bytes":
        yield Named("prepare.tokenizer", Path(prepare.tokenizer), "file")
    if prepare.chat_template not in (None, *TEMPLATE_WORDS):
        yield Named("prepare.chat_template", Path(prepare.chat_template), "file")


def _problem_of_venv(folder: Path) -> tuple[str, str] | None:
    if os.path.exists(folder / "bin" / "activate"):
        return None
    return "is no virtual environment: it has no bin/activate", "name the folder that `python -m venv FOLDER` has made"


def _problem_of_weights(folder: Path) -> tuple[str, str] | None:
    """Say what is missing of the safetensors files of a folder of weights: a download may have stopped half-way."""
    again = "fetch the folder again, or name one as save_pretrained writes it"
    try:
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            files = {str(name) for name in json.loads(index.read_bytes())["weight_map"].values()}
        else:
            files = {path.name for path in folder.glob("*.safetensors")}
        if missing := sorted(name for name in files if not (folder / name).is_file()):
            return (
                f"lacks {missing[0]}, one of {len(missing)} of its {len(files)} files of weights that are not there",
                again,
            )
        if not files:
            others = next((path.name for path in folder.glob("*.bin")), None)
            return f"has no weights: no *.safetensors{f', only {others}' if others else ''}", again
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"has an index that cannot be read: {error}", again
    return None


def _sourced(line: str) -> str | None:
    """Return the file of `source FILE` if it is a plain path: only bash knows what other words become."""
    found = SOURCED.match(line)
    try:
        words = shlex.split(found.group(1), comments=True) if found else []
    except ValueError:
        return None
    plain = len(words) == 1 and os.sep in words[0] and not re.search(r"[$`*?;&|<>()\[\]{}]", words[0])
    return words[0] if plain else None


def _texts(values: Mapping[str, Any]) -> Iterator[Path]:
    """Yield the patterns of all text files that a data config names."""
    paths = values.get("paths")
    if values.get("_target_") == config_check.TEXT_FILES and paths:
        yield from (Path(path) for path in ([paths] if isinstance(paths, str) else paths) if isinstance(path, str))
    for value in values.values():
        if isinstance(value, Mapping):
            yield from _texts(value)
