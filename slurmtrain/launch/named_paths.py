"""Paths in a config: made absolute, and checked on this machine before a job is queued."""

from __future__ import annotations

import dataclasses
import glob
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slurmtrain.checkpoint.format.directory import FINAL_NAME, MANIFEST, committed, step_of
from slurmtrain.choices import Backend, JobKind
from slurmtrain.config.schema import ClusterConfig, Config, ContainerConfig, PrepareConfig
from slurmtrain.data.sources import config_check
from slurmtrain.errors import ConfigError
from slurmtrain.launch.program_check import check_program
from slurmtrain.system.paths import URL, absolute

IMAGE_FILES = (".sif", ".sqsh", ".img", ".simg")
OF_EACH_NODE = tuple(map(Path, ("/", "/tmp", "/var/tmp", "/dev/shm")))  # each node has its own
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
    path = model.get("path")
    ours = model.get("_target_") == config_check.HUGGING_FACE and isinstance(path, str) and path
    return {**model, "path": str(absolute(str(path), cwd))} if ours else dict(model)


def _prepare(prepare: PrepareConfig, cwd: Path) -> PrepareConfig:
    def here(path: str) -> str:
        return str(absolute(path, cwd))

    named = prepare.tokenizer != "bytes"
    return dataclasses.replace(
        prepare,
        inputs=[here(path) for path in prepare.inputs],
        output=here(prepare.output) if prepare.output else None,
        tokenizer=here(prepare.tokenizer) if named else prepare.tokenizer,
    )


def check_named_paths(config: Config, cwd: Path, *, later: bool = False) -> None:
    """Check that the paths in the config exist, if this machine sees the folder around them.

    Each node has its own /tmp and the like, and a container its own paths, so these are not checked.

    Args:
        cwd: the folder of the command.
        later: the job waits for other jobs, which may still make its input.

    Raises:
        ConfigError: something is missing, and the message names the first; or SLURM cannot write below the folder of
            runs.
    """
    runs = str(absolute(config.job.runs_dir, cwd))
    if config.cluster.backend == Backend.SLURM and "\\" in runs:
        raise ConfigError(
            f"runs cannot lie under {runs}: with a backslash in its name SLURM writes a job's log elsewhere, or not at all",
            hint="job.runs_dir, or SLURMTRAIN_RUNS, names another folder",
        )
    check_program(config, cwd)
    _check_steps_are_left(config)
    located = with_absolute_paths(config, cwd)
    if not later:
        _check_is_a_checkpoint(located)
    for field, path, what in _named(located, cwd, later=later):
        if glob.has_magic(str(path)):
            if _fixed_part(path).is_dir() and next(glob.iglob(str(path), recursive=True), None) is None:
                raise ConfigError(f"{field}: no {what} matches {path}", hint="check the spelling")
        elif path.parent not in OF_EACH_NODE and path.parent.is_dir() and not path.exists():
            raise ConfigError(
                f"{field}: there is no {what} {path.name} in {path.parent}",
                hint=f"relative paths start in the folder of the command, {cwd}",
            )


def _check_is_a_checkpoint(config: Config) -> None:
    """Raise ConfigError if checkpoint.restore_from is a folder that this machine sees, and no checkpoint."""
    source = Path(config.checkpoint.restore_from or "")
    if not config.checkpoint.restore_from or not source.is_dir() or (source / MANIFEST).exists():
        return
    newest = [found[-1] for folder in (source, source / "checkpoints") if (found := committed(folder))]
    raise ConfigError(
        f"checkpoint.restore_from={source} is no checkpoint: it has no {MANIFEST}",
        hint=f"its newest one is {newest[0]}" if newest else "`checkpoints RUN` lists those of a run",
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
            hint="begin anew with its weights: checkpoint.restore_only=model; to go on from its step: more train.steps",
        )


def _fixed_part(pattern: Path) -> Path:
    """Return the folder of a pattern up to its first wildcard."""
    return next(parent for parent in pattern.parents if not glob.has_magic(str(parent)))


def _named(config: Config, cwd: Path, *, later: bool) -> Iterator[tuple[str, Path, str]]:
    """Yield field, path and kind of everything that must exist when the job begins."""
    cluster = config.cluster
    yield from _of_container(cluster.container)
    if cluster.venv and cluster.container.kind is None:
        yield "cluster.venv", Path(cluster.venv), "virtual environment"
    for field, name in (("cluster.conda_env", cluster.conda_env), ("cluster.python", cluster.python)):
        if name and os.path.isabs(name) and cluster.container.kind is None:
            yield field, Path(name), "environment" if field.endswith("env") else "interpreter"
    for line in cluster.setup:
        sourced = _sourced(line)
        if sourced is not None:
            yield f"cluster.setup has {line!r}", absolute(sourced, cwd), "file"
    if later or cluster.container.kind or config.job.kind == JobKind.PREPARE:
        return
    if config.checkpoint.restore_from and not URL.match(config.checkpoint.restore_from):
        yield "checkpoint.restore_from", Path(config.checkpoint.restore_from), "checkpoint"
    if config.job.kind != JobKind.TRAIN:
        return
    for path in _texts(config.data):
        yield "data.paths", path, "file"
    for path in _texts(config.eval.sets):
        yield "eval.sets", path, "file"
    if config.model.get("_target_") == config_check.HUGGING_FACE and isinstance(config.model.get("path"), str):
        yield "model.path", Path(config.model["path"]), "folder"


def _of_container(container: ContainerConfig) -> Iterator[tuple[str, Path, str]]:
    if container.image and os.path.isabs(container.image):
        yield "cluster.container.image", Path(container.image), "image"
    for mount in container.mounts:
        source = mount.partition(":")[0]
        if os.path.isabs(source):
            yield f"cluster.container.mounts has {mount!r}", Path(source), "file or folder"


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
