"""The rules that involve several fields of a config, checked before anything is submitted.

A rule is pure: it takes a `Config` and yields a `ConfigError` for each problem, which names the fields, their values and
what to write instead. What a field alone can be is said by its type in the schema.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import Any

import msgspec

from slurmtrain.choices import (
    Backend,
    EvalMode,
    JobKind,
    PpSchedule,
    PreflightMode,
    RequeueMode,
    SnapshotMode,
)
from slurmtrain.config.evaluation import evaluation_config
from slurmtrain.config.fields import CONTROL, raise_all, words_of, written
from slurmtrain.config.frozen import SECRET_REFERENCE
from slurmtrain.config.known_models import LINEAR_LAYERS, OUTPUTS, check_sizes, is_our_decoder
from slurmtrain.config.parallel_dims import ParallelDims, at_most, parallel_dims_of, sequence_lengths
from slurmtrain.config.schema import Config, defaults
from slurmtrain.config.secrets import scalars
from slurmtrain.errors import EXIT_CONFIG, EXIT_REQUEUE, ConfigError, SlurmtrainError, nearest
from slurmtrain.system.redaction import SECRET_VARIABLE

SLURM_EARLY_S = 60  # `man sbatch`, --signal: the signal may be sent up to 60 seconds earlier than specified
DEFAULTS = defaults()
BUILT_IN_METRICS = ("perplexity", "bits_per_byte", "accuracy")
# Options of sbatch that the script sets, or that would break what slurmtrain does with a job -> what decides them. All
# others are cluster.sbatch's, and sbatch itself judges them: each version of SLURM has more.
SBATCH_OPTIONS = {
    **{
        option: f"cluster.{option.replace('-', '_')}"
        for option in ("account", "constraint", "cpus-per-task", "exclude", "exclusive", "gpus-per-node", "nodes")
    },
    **{option: f"cluster.{option}" for option in ("partition", "qos", "reservation")},
    **dict.fromkeys(("ntasks", "ntasks-per-gpu", "ntasks-per-node", "tasks-per-node"), "cluster.tasks_per_node"),
    **dict.fromkeys(("gpus", "gpus-per-socket", "gpus-per-task"), "cluster.gpus_per_node"),
    "mem": "cluster.mem_per_node_gb",
    "mem-per-cpu": "cluster.mem_per_cpu_gb",
    "mem-per-gpu": "cluster.mem_per_gpu_gb",
    "time": "cluster.time_limit_min",
    "signal": "cluster.signal_lead_s",
    "job-name": "job.name",
    **dict.fromkeys(("requeue", "no-requeue"), "requeue.mode"),
    **dict.fromkeys(("output", "error", "open-mode"), "the run directory"),
    "clusters": "SLURM_CLUSTERS of the shell",  # status, cancel and resume follow it, too
    **dict.fromkeys(("array", "chdir", "export", "export-file", "input", "wait", "wrap"), "slurmtrain itself"),
    # What sbatch answers is read for the id of the job.
    **dict.fromkeys(("help", "parsable", "quiet", "test-only", "usage", "verbose", "version"), "slurmtrain itself"),
}

# Fields that a kind of job cannot do without, with an example of each.
REQUIRED: dict[JobKind, dict[str, str]] = {
    JobKind.COMMAND: {"job.command": "submit -- python my_train.py --lr 1e-3"},
    JobKind.TRAIN: {
        f"{group}._target_": f"choose one with {group}=..., or write {group}._target_=my.module.Class"
        for group in ("model", "data")
    },
    JobKind.PREPARE: {
        "prepare.inputs": "prepare.inputs='[/data/raw/*.jsonl]'",
        "prepare.output": "prepare.output=/data/tokens, a folder that will be created",
    },
}
# Fields of which one at most may be set.
EXCLUSIVE = (
    "cluster.mem_per_node_gb cluster.mem_per_cpu_gb cluster.mem_per_gpu_gb",
    "cluster.venv cluster.conda_env",
    "cluster.slurm_conf cluster.sandbox",
)


# Fields that need something: their names, whether it is there, and what it is.
OF_COMMANDS = "job.command job.stop_signal job.stop_grace_s job.finished_when job.checkpoints job.checkpoint_complete"
OF_GPUS = "cluster.gpu_memory_gb cluster.gpu_type cluster.mem_per_gpu_gb"
NEEDS: tuple[tuple[str, Callable[[Config], object], str], ...] = (
    (OF_COMMANDS, lambda c: c.job.kind == JobKind.COMMAND, "job=command"),
    (
        "observe.loggers checkpoint.restore_from",
        lambda c: c.job.kind != JobKind.COMMAND,
        "the built-in trainer: your own program has to call its loggers and load its checkpoint itself",
    ),
    (
        "observe.profile_ranks",
        lambda c: all(0 <= rank < c.world_size for rank in c.observe.profile_ranks),
        "ranks that the job has",
    ),
    (
        "job.finished_when",
        lambda c: c.job.finished_when not in (str(EXIT_REQUEUE), str(EXIT_CONFIG)),
        f"another exit code: {EXIT_REQUEUE} means that the program is to be started again, and {EXIT_CONFIG} that its "
        "config is wrong",
    ),
    ("job.checkpoint_complete", lambda c: c.job.checkpoints, "job.checkpoints='out/checkpoint-*'"),
    (
        "cluster.nodes",
        lambda c: c.cluster.backend != Backend.LOCAL,
        "a cluster, such as +cluster=sandbox on this machine: cluster.backend=local has one node",
    ),
    (
        "eval.mode cluster.stage.wanted cluster.spare_nodes",
        lambda c: c.cluster.backend == Backend.SLURM,
        "a SLURM cluster, such as +cluster=sandbox on this machine: the other values of cluster.backend have no jobs",
    ),
    (
        "cluster.nodes",
        lambda c: not (c.cluster.node_range.elastic and c.cluster.backend == Backend.KUBERNETES),
        "a fixed number of pods, without a range",
    ),
    (
        "cluster.container.kind cluster.modules",
        lambda c: c.cluster.backend != Backend.KUBERNETES,
        "SLURM: the container of a pod is cluster.pods.image, which brings its own programs",
    ),
    (
        "requeue.mode",
        lambda c: c.requeue.mode in (RequeueMode.REQUEUE, RequeueMode.OFF) or c.cluster.backend != Backend.KUBERNETES,
        "SLURM: Kubernetes starts the same pods again (requeue=requeue), or does not (requeue=off)",
    ),
    ("cluster.stage.wanted cluster.spare_nodes", lambda c: c.sweep.pack == 1, "sweep.pack=1"),
    ("cluster.spare_nodes", lambda c: c.requeue.starts_in_place, "requeue.in_place=true"),
    ("cluster.stage.wanted", lambda c: c.cluster.container.kind is None, "ranks without a container"),
    ("cluster.stage.code", lambda c: c.job.snapshot != SnapshotMode.NONE, "job.snapshot=auto"),
    (
        "cluster.stage.data",
        lambda c: (
            len({PurePosixPath(path).name for path in c.cluster.stage.data} - {"", ".."}) == len(c.cluster.stage.data)
        ),
        "paths whose last parts differ, after which the copies are named",
    ),
    (OF_GPUS, lambda c: c.cluster.gpus_per_node, "cluster.gpus_per_node"),
    (
        "cluster.tasks_per_node",
        lambda c: not 0 < c.cluster.gpus_per_node < c.cluster.tasks_per_node,
        "as many cluster.gpus_per_node, since a rank drives a GPU",
    ),
    (
        "cluster.time_limit_min cluster.signal_lead_s",
        lambda c: (
            c.cluster.backend != Backend.SLURM
            or c.cluster.time_limit_min * 60 > c.cluster.signal_lead_s + SLURM_EARLY_S
        ),
        f"more time between the start and the warning, which SLURM may send {SLURM_EARLY_S} s early",
    ),
    ("cluster.container.kind", lambda c: c.cluster.container.image, "cluster.container.image"),
    ("cluster.container.image", lambda c: c.cluster.container.kind, "cluster.container.kind"),
    ("checkpoint.restore_only", lambda c: c.checkpoint.restore_from, "checkpoint.restore_from=PATH"),
    (
        "checkpoint.keep_best",
        lambda c: c.eval.mode == EvalMode.INLINE,
        "eval.mode=inline: another job's result could come after the checkpoint is removed; checkpoint.keep_every=N",
    ),
    ("optim.warmup_steps", lambda c: c.optim.warmup_steps <= c.train.steps, "as many train.steps"),
    (
        "parallel.compile",
        lambda c: c.parallel.pp_schedule != PpSchedule.ZERO_BUBBLE or c.parallel.pp == 1,
        "another parallel.pp_schedule, such as interleaved_1f1b: zero_bubble splits backward passes in two",
    ),
    ("preflight.exclude_slow", lambda c: c.preflight.mode == PreflightMode.FULL, "preflight.mode=full, which measures"),
    ("preflight.exclude_slow", lambda c: c.cluster.backend != Backend.KUBERNETES, "SLURM, which can leave nodes out"),
    ("prepare.part", lambda c: c.prepare.part < c.prepare.parts, "more prepare.parts, which are counted from 0"),
)

Rule = Callable[[Config], Iterator[ConfigError]]


def validate(config: Config) -> ParallelDims:
    """Raise for all settings that cannot work together, and return the parallel dims, which every later check takes.

    Raises:
        ConfigError: the message gives the fields, their values, what was expected and a hint.
    """
    problems: list[SlurmtrainError] = []
    for rule in RULES:
        try:
            problems += rule(config)
        except ConfigError as error:
            problems.append(error)
    raise_all(problems)
    dims = parallel_dims_of(at_most(config))
    raise_all(list(_layout(config, dims)))
    if config.job.kind == JobKind.TRAIN and config.eval.mode == EvalMode.JOB:
        try:
            validate(evaluation_config(config, "checkpoint"))
        except ConfigError as error:
            raise ConfigError(
                f"the evaluation job (eval.mode=job) is invalid: {error.message}",
                hint=f"eval.cluster and eval.parallel change it; {error.hint or 'by default it is one copy of the model'}",
            ) from None
    return dims


def _at(config: Config, key: str) -> Any:
    """Return the value of a field by its key with dots; in an open group, None for a key that it lacks."""
    inside: Any = config
    for name in key.split("."):
        inside = inside.get(name) if isinstance(inside, dict) else getattr(inside, name)
    return inside


def given_fields(config: Config, keys: str) -> list[str]:
    """Return those of some fields that have another value than their default, as a person would type them."""
    values = {key: _at(config, key) for key in keys.split() if _at(config, key) not in (_at(DEFAULTS, key), None, "")}
    return [f"{key}={written(value)}".replace(".wanted=true", "") for key, value in values.items()]


def _together(config: Config) -> Iterator[ConfigError]:
    """Check the fields that need each other, or exclude each other."""
    for key, hint in REQUIRED.get(config.job.kind, {}).items():
        if not str(_at(config, key) or "").strip():
            yield ConfigError(f"{key} is not set", hint=hint)
    for keys in EXCLUSIVE:
        if len(given := given_fields(config, keys)) > 1:
            yield ConfigError(f"{' and '.join(given)} exclude each other", hint="keep one and set the others to null")
    told = set[str]()  # of a field that lacks several things, the first is said
    for keys, is_there, what in NEEDS:
        if not is_there(config) and (given := [each for each in given_fields(config, keys) if each not in told]):
            told.update(given)
            needs, key = "need" if given[1:] else "needs", given[0].partition("=")[0]
            yield ConfigError(f"{' and '.join(given)} {needs} {what}", hint=f"change that, or leave {key} out")


def _job(config: Config) -> Iterator[ConfigError]:
    """Check what runs: the trainer, or a command."""
    job = config.job
    if job.kind in (JobKind.EVALUATE, JobKind.PREFLIGHT):
        yield ConfigError(f"job.kind={job.kind} is not known", hint=f"one of: {', '.join(words_of(JobKind))}")
    if job.kind != JobKind.COMMAND or not job.command:
        return
    try:
        shlex.split(job.command)
    except ValueError as error:
        raise ConfigError(f"job.command is {job.command!r}: {error}", hint="close the quote") from None


def _sbatch(config: Config) -> Iterator[ConfigError]:
    """Check the options that are passed on to sbatch."""
    for option, value in config.cluster.sbatch.items():
        # sbatch takes the beginning of an option for the option.
        owned = option if option in SBATCH_OPTIONS else next((o for o in SBATCH_OPTIONS if o.startswith(option)), None)
        parts = value if isinstance(value, list) else [value]
        if owned is not None:
            yield ConfigError(
                f"cluster.sbatch has no option {option!r}", hint=f"it is decided by {SBATCH_OPTIONS[owned]}"
            )
        elif not all(isinstance(part, str | int | float | None) and not CONTROL.search(str(part)) for part in parts):
            yield ConfigError(
                f"cluster.sbatch.{option}={value!r} cannot be passed to sbatch",
                hint="give text in one line, a number, true for a bare flag, or a list of texts, which commas will join",
            )


def _secrets(config: Config) -> Iterator[ConfigError]:
    """Find secrets that would be written into the batch script, to disk, or would be visible in a process list."""
    for name, value in config.cluster.env.items():
        if SECRET_VARIABLE.search(name) and value and not SECRET_REFERENCE.fullmatch(value):
            yield ConfigError(
                f"cluster.env.{name} looks like a secret and is written out, so it would be stored on disk in clear text",
                hint=f"export it in your shell and write cluster.env.{name}='${{oc.env:{name}}}'",
            )
    in_script = {
        name: value for name, value in msgspec.to_builtins(config.cluster).items() if name not in ("env", "setup")
    }
    for where, text in scalars({"cluster": in_script, "hooks": msgspec.to_builtins(config.hooks)}):
        if (secret := SECRET_REFERENCE.search(text)) is not None:
            yield ConfigError(
                f"{where} holds the secret {text!r}, which would be written into the batch script or a process list",
                hint=f"put it into cluster.env, or write +secrets.{secret[1]}=env and read ${secret[1]} there",
            )


def _decoder(config: Config) -> Iterator[ConfigError]:
    """Check our own decoder: its sizes, its adapters, and the length of its samples."""
    model, data = config.model, config.data
    if config.job.kind != JobKind.TRAIN or not is_our_decoder(model):
        return
    for target in config.lora.target_modules if config.lora.r else ():
        layer = target.rpartition(".")[2]
        if layer not in LINEAR_LAYERS:
            yield ConfigError(
                f"lora.target_modules names {target!r}, and the built-in decoder has no linear layer of that name",
                hint=nearest(layer, LINEAR_LAYERS),
            )
        elif layer in OUTPUTS and model.get("tie_embeddings", True):
            yield ConfigError(
                f"lora.target_modules names {target!r}, which has the same weights as the embedding, so that an export "
                "could not merge adapters into it",
                hint=f"leave {target} out of lora.target_modules",
            )
    check_sizes(model)
    longest = model.get("max_seq_len")
    if not isinstance(longest, int) or not str(data.get("_target_")).startswith("slurmtrain.data."):
        return
    for key, length in sequence_lengths(data).items():
        if length > longest:
            yield ConfigError(
                f"{key}={length} is longer than model.max_seq_len={longest}",
                hint=f"set model.max_seq_len={length}, or a shorter {key}",
            )


def _own_classes(config: Config) -> Iterator[ConfigError]:
    """Check that a person's own hooks, evaluation sets, metrics and loggers name the class to be built."""
    own = {f"train.hooks[{index}]": values for index, values in enumerate(config.train.hooks)}
    own |= {f"eval.sets.{name}": values for name, values in config.eval.sets.items()}
    own |= {f"observe.loggers.{name}": values for name, values in config.observe.loggers.items()}
    for name, value in config.eval.metrics.items():
        if not isinstance(value, bool):
            own[f"eval.metrics.{name}"] = value
        elif name not in BUILT_IN_METRICS:
            yield ConfigError(f"eval.metrics.{name}: there is no such metric", hint=nearest(name, BUILT_IN_METRICS))
    for where, values in own.items():
        if not isinstance(values, dict) or not isinstance(values.get("_target_"), str):
            yield ConfigError(f"{where}={values!r} has no _target_", hint="{_target_: my_package.MyClass}")


RULES: tuple[Rule, ...] = (_together, _job, _sbatch, _secrets, _decoder, _own_classes)


def _layout(config: Config, dims: ParallelDims) -> Iterator[ConfigError]:
    """Check what does not work with these parallel dims."""
    lora = config.lora
    if lora.r and dims.tp * dims.pp > 1:
        yield ConfigError(
            f"lora.r={lora.r} with {dims}: LoRA adapters cannot be combined with tensor or pipeline parallelism",
            hint="parallel.tp=1 parallel.pp=1; parallel=fsdp shards the frozen weights over all ranks",
        )
