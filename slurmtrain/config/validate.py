"""The rules that involve several fields of a config, checked before anything is submitted.

A rule is pure: it takes a `Config` and yields a `ConfigError` for each problem, which names the fields, their values and
what to write instead. What a field alone can be is said by its type in the schema.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import PurePosixPath

from slurmtrain.choices import (
    Backend,
    EvalMode,
    GradientCompression,
    JobKind,
    PpSchedule,
    PreflightMode,
    SnapshotMode,
)
from slurmtrain.config.elastic import at_most, usable_sizes
from slurmtrain.config.evaluation import evaluation_config
from slurmtrain.config.fields import CONTROL, raise_all, words_of
from slurmtrain.config.frozen import SECRET_REFERENCE
from slurmtrain.config.known_models import (
    EMBEDDINGS,
    HUGGING_FACE,
    LINEAR_LAYERS,
    OUTPUTS,
    check_sizes,
    is_our_decoder,
    ties_embeddings,
)
from slurmtrain.config.launched_program import check_launched, has_launcher
from slurmtrain.config.parallel_dims import ParallelDims, parallel_dims_of, sequence_lengths
from slurmtrain.config.ranges import profiled_steps
from slurmtrain.config.schema import Config, JobConfig
from slurmtrain.config.secrets import scalars
from slurmtrain.errors import EXIT_CONFIG, EXIT_REQUEUE, ConfigError, nearest
from slurmtrain.system.redaction import SECRET_VARIABLE

SLURM_EARLY_S = 60  # `man sbatch`, --signal: the signal may be sent up to 60 seconds earlier than specified
BUILT_IN_METRICS = ("perplexity", "bits_per_byte", "accuracy")
OWN_NAME = re.compile(r"[A-Za-z0-9_]+")  # of an evaluation set or a logger
# Fields of `cluster` of which one at most may be set.
EXCLUSIVE = (("mem_per_node_gb", "mem_per_cpu_gb", "mem_per_gpu_gb"), ("venv", "conda_env"), ("slurm_conf", "sandbox"))
OF_GPUS = ("gpu_memory_gb", "gpu_type", "mem_per_gpu_gb")  # fields of `cluster` that mean nothing without GPUs
# Fields of `job` that only a job.command uses.
OF_COMMANDS = (
    *(
        "launcher",
        "stop_signal",
        "stop_grace_s",
        "finished_when",
        "progress_file",
        "checkpoints",
        "checkpoint_complete",
    ),
)
SBATCH_OPTION = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
# Options of sbatch that the script sets, or that would break what slurmtrain does with a job -> what decides them. All
# others are cluster.sbatch's, and sbatch itself judges them: each version of SLURM has more.
SBATCH_OPTIONS = {
    **{
        option: f"cluster.{option.replace('-', '_')}"
        for option in ("account", "constraint", "cpus-per-task", "exclude", "exclusive", "gpus-per-node", "nodes")
    },
    **{option: f"cluster.{option}" for option in ("partition", "qos", "reservation", "segment", "switches")},
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

Rule = Callable[[Config], Iterator[ConfigError]]


def validate(config: Config) -> ParallelDims:
    """Raise for all settings that cannot work together, and return the parallel dims, which every later check takes.

    Raises:
        ConfigError: the message gives the fields, their values, what was expected and a hint.
    """
    raise_all([problem for rule in RULES for problem in _broken(rule, config)])
    usable_sizes(config)
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


def _broken(rule: Rule, config: Config) -> Iterator[ConfigError]:
    try:
        yield from rule(config)
    except ConfigError as error:
        yield error


def _job(config: Config) -> Iterator[ConfigError]:
    """Check what runs: the trainer, or a command."""
    job = config.job
    if job.kind in (JobKind.EVALUATE, JobKind.PREFLIGHT):
        yield ConfigError(f"job.kind={job.kind} is not known", hint=f"one of: {', '.join(words_of(JobKind))}")
    if job.kind != JobKind.COMMAND:
        if job.command:
            yield ConfigError(
                f"job.command is {job.command!r}, but job.kind is {job.kind!r}, which does not run a command",
                hint="write job=command",
            )
        given = {f"job.{name}": getattr(job, name) != getattr(JobConfig, name) for name in OF_COMMANDS}
        given["watchdog.heartbeat_file"] = config.watchdog.heartbeat_file is not None
        for name in (name for name, is_given in given.items() if is_given):
            yield ConfigError(
                f"{name} works only with a job.command, but job.kind is {job.kind!r}", hint=f"leave {name} out"
            )
        return
    if not job.command or not job.command.strip():
        raise ConfigError("job.command is empty", hint="submit -- python my_train.py --lr 1e-3")
    try:
        shlex.split(job.command)
    except ValueError as error:
        raise ConfigError(f"job.command is {job.command!r}: {error}", hint="close the quote") from None
    if job.finished_when in (str(EXIT_REQUEUE), str(EXIT_CONFIG)):
        yield ConfigError(
            f"job.finished_when={job.finished_when} has a meaning already: {EXIT_REQUEUE} (start me again) and "
            f"{EXIT_CONFIG} (the config is wrong)",
            hint="job.finished_when=0, or a file that the program creates at its end",
        )
    if job.checkpoint_complete is not None and job.checkpoints is None:
        yield ConfigError(
            f"job.checkpoint_complete={job.checkpoint_complete} does not say where the checkpoints are",
            hint="job.checkpoints='out/checkpoint-*'",
        )
    if has_launcher(config):
        check_launched(config)


def _cluster(config: Config) -> Iterator[ConfigError]:
    """Check where it runs: nodes, memory, GPUs and time."""
    cluster, stage = config.cluster, config.cluster.stage
    for names in EXCLUSIVE:
        given = [f"cluster.{name}={value!r}" for name in names if (value := getattr(cluster, name)) not in (None, "")]
        if len(given) > 1:
            yield ConfigError(f"{' and '.join(given)} exclude each other", hint="keep one and set the others to null")
    of_gpus = [f"cluster.{name}={value!r}" for name in OF_GPUS if (value := getattr(cluster, name))]
    if of_gpus and not cluster.gpus_per_node:
        yield ConfigError(
            f"{' and '.join(of_gpus)}, but cluster.gpus_per_node is 0",
            hint="set cluster.gpus_per_node, or these to null",
        )
    if 0 < cluster.gpus_per_node < cluster.tasks_per_node:
        yield ConfigError(
            f"cluster.tasks_per_node={cluster.tasks_per_node} ranks would share cluster.gpus_per_node="
            f"{cluster.gpus_per_node} GPUs",
            hint=f"one rank drives one GPU: set cluster.tasks_per_node={cluster.gpus_per_node}",
        )
    if bool(cluster.container.kind) != bool(cluster.container.image):
        yield ConfigError(
            f"cluster.container.kind={cluster.container.kind} with cluster.container.image={cluster.container.image}",
            hint="set both or neither",
        )
    latest = cluster.time_limit_min * 60 - SLURM_EARLY_S
    if cluster.backend == Backend.SLURM and cluster.signal_lead_s >= latest:
        yield ConfigError(
            f"cluster.signal_lead_s={cluster.signal_lead_s} with cluster.time_limit_min={cluster.time_limit_min}: SLURM may "
            f"warn {SLURM_EARLY_S} s early, so the warning could come before the first step",
            hint=f"set cluster.time_limit_min={(cluster.signal_lead_s + SLURM_EARLY_S) // 60 + 1} or more"
            + (f", or cluster.signal_lead_s below {latest}" if latest > 0 else ""),
        )
    for_several_nodes = {
        f"cluster.nodes={cluster.nodes}": cluster.nodes != 1,
        f"cluster.spare_nodes={cluster.spare_nodes}": cluster.spare_nodes,
        "cluster.stage": stage.wanted,
        "requeue.standby_ranks=true": config.requeue.standby_ranks,
        "eval.mode=job": config.job.kind == JobKind.TRAIN and config.eval.mode == EvalMode.JOB,
    }
    for name in (name for name, given in for_several_nodes.items() if given and cluster.backend == Backend.LOCAL):
        yield ConfigError(
            f"{name}, but cluster.backend=local has only this machine and no queue",
            hint="cluster.tasks_per_node gives more ranks; for the rest a SLURM cluster: +cluster=sandbox tries it here",
        )
    copies = [PurePosixPath(path).name for path in stage.data]
    if len(set(copies)) < len(copies) or not {"", ".."}.isdisjoint(copies):
        yield ConfigError(
            f"cluster.stage.data={','.join(stage.data)}: copies are named after the last part of their path, and two are "
            "the same or one is missing",
            hint="name files and folders whose last parts differ",
        )
    if stage.wanted and cluster.container.kind:
        yield ConfigError(
            f"cluster.stage with cluster.container.kind={cluster.container.kind}: the ranks would not see the copies",
            hint="an image is a single file that its runtime reads by itself; leave cluster.stage out",
        )
    if stage.code and config.job.snapshot == SnapshotMode.NONE:
        yield ConfigError(
            "cluster.stage.code=true with job.snapshot=none: there is no snapshot to copy",
            hint="job.snapshot=auto, or cluster.stage.code=false",
        )


def _sbatch(config: Config) -> Iterator[ConfigError]:
    """Check the options that are passed on to sbatch."""
    for option, value in config.cluster.sbatch.items():
        if not SBATCH_OPTION.fullmatch(option):
            yield ConfigError(
                f"cluster.sbatch has {option!r}, which is not a long option of sbatch",
                hint="use the name from `man sbatch`, without the leading dashes: +cluster.sbatch.mail-type=END",
            )
            continue
        # sbatch takes the beginning of an option for the option.
        owned = option if option in SBATCH_OPTIONS else next((o for o in SBATCH_OPTIONS if o.startswith(option)), None)
        parts = value if isinstance(value, list) else [value]
        if owned is not None:
            yield ConfigError(
                f"cluster.sbatch has no option {option!r}", hint=f"it is decided by {SBATCH_OPTIONS[owned]}"
            )
        elif not all(isinstance(part, str | int | float | None) for part in parts):
            yield ConfigError(
                f"cluster.sbatch.{option}={value!r} cannot be passed to sbatch",
                hint="give text, a number, true for a bare flag, or a list of texts, which are joined with commas",
            )
        for part in (part for part in parts if isinstance(part, str) and CONTROL.search(part)):
            yield ConfigError(
                f"cluster.sbatch.{option} holds {part!r}: control characters are not allowed",
                hint="write it in one line",
            )


def _secrets(config: Config) -> Iterator[ConfigError]:
    """Find secrets that would be written into the batch script, to disk, or would be visible in a process list."""
    for name, value in config.cluster.env.items():
        if SECRET_VARIABLE.search(name) and value and not SECRET_REFERENCE.fullmatch(value):
            yield ConfigError(
                f"cluster.env.{name} looks like a secret and is written out, so it would be stored on disk in clear text",
                hint=f"export it in your shell and write cluster.env.{name}='${{oc.env:{name}}}'",
            )
    in_script = {name: value for name, value in asdict(config.cluster).items() if name not in ("env", "setup")}
    for where, text in scalars({"cluster": in_script, "hooks": asdict(config.hooks)}):
        if (secret := SECRET_REFERENCE.search(text)) is not None:
            yield ConfigError(
                f"{where} holds the secret {text!r}, which would be written into the batch script or a process list",
                hint=f"put it into cluster.env, or write +secrets.{secret[1]}=env and read ${secret[1]} there",
            )


def _restarts(config: Config) -> Iterator[ConfigError]:
    """Check how a job that has stopped continues."""
    cluster, requeue, pack = config.cluster, config.requeue, config.sweep.pack
    shared = {
        "cluster.stage": cluster.stage.wanted,
        f"cluster.spare_nodes={cluster.spare_nodes}": cluster.spare_nodes,
        "requeue.standby_ranks=true": requeue.standby_ranks,
    }
    for name in (name for name, given in shared.items() if given and pack > 1):
        yield ConfigError(
            f"{name} works only for a run with a job of its own, but sweep.pack={pack}", hint="sweep.pack=1"
        )
    in_place = {
        f"cluster.spare_nodes={cluster.spare_nodes}": cluster.spare_nodes,
        "requeue.standby_ranks=true": requeue.standby_ranks,
    }
    for name in (name for name, given in in_place.items() if given and not requeue.starts_in_place):
        yield ConfigError(
            f"{name}, but ranks start again in the same job only with requeue.in_place=true",
            hint="requeue.in_place=true",
        )
    reason = None
    if config.job.kind != JobKind.TRAIN:
        reason = f"job.kind={config.job.kind} has no ranks that load PyTorch for you"
    elif cluster.spare_nodes or cluster.node_range.elastic:
        reason = "after a failure the ranks may start on other nodes (cluster.spare_nodes, or a range of cluster.nodes)"
    elif cluster.container.kind is not None:
        reason = f"cluster.container.kind={cluster.container.kind} would have to start a second container on each node"
    if requeue.standby_ranks and reason is not None:
        yield ConfigError(f"requeue.standby_ranks=true, but {reason}", hint="requeue.standby_ranks=false")
    if config.preflight.exclude_slow and config.preflight.mode != PreflightMode.FULL:
        yield ConfigError(
            f"preflight.exclude_slow=true, but preflight.mode={config.preflight.mode} does not measure speed",
            hint="preflight=full, or preflight.exclude_slow=false",
        )


def _training(config: Config) -> Iterator[ConfigError]:
    """Check what is trained: model, data, schedule and checkpoints."""
    model, data, parallel, checkpoint = config.model, config.data, config.parallel, config.checkpoint
    if config.job.kind != JobKind.TRAIN:
        return
    for group in ("model", "data"):
        if not getattr(config, group).get("_target_"):
            yield ConfigError(
                f"{group}._target_ is missing",
                hint=f"choose one with {group}=..., or write {group}._target_=my.module.Class",
            )
    for index, values in enumerate(config.train.hooks):
        yield from _target(f"train.hooks[{index}]", values, hint="train.hooks=[{_target_: my_package.MyHook}]")
    if config.optim.warmup_steps > config.train.steps:
        yield ConfigError(
            f"optim.warmup_steps={config.optim.warmup_steps} is more than train.steps={config.train.steps}",
            hint="the warm-up would never end; null: a share of train.steps",
        )
    if parallel.compile and parallel.pp_schedule == PpSchedule.ZERO_BUBBLE and parallel.pp != 1:
        yield ConfigError(
            "parallel.compile=true with parallel.pp_schedule=zero_bubble: a compiled backward pass cannot be split in two",
            hint="parallel.pp_schedule=interleaved_1f1b, or parallel.compile=false",
        )
    if checkpoint.export_every_steps and not (is_our_decoder(model) or model.get("_target_") == HUGGING_FACE):
        yield ConfigError(
            f"checkpoint.export_every_steps={checkpoint.export_every_steps}: Hugging Face has no family for "
            f"{model.get('_target_')}",
            hint="`checkpoints RUN export FILE.safetensors` writes the weights of any model",
        )
    if checkpoint.local_every_steps and checkpoint.local is None:
        yield ConfigError(
            f"checkpoint.local_every_steps={checkpoint.local_every_steps} needs a folder on the nodes to copy to",
            hint="checkpoint.local=/dev/shm, or a local disk's folder",
        )
    if checkpoint.restore_only is not None and checkpoint.restore_from is None:
        yield ConfigError(
            "checkpoint.restore_only=model, but there is no checkpoint to take the model from",
            hint="checkpoint.restore_from=PATH names one",
        )
    if not is_our_decoder(model):
        return
    check_sizes(model)
    longest = model.get("max_seq_len")
    if isinstance(longest, int) and str(data.get("_target_")).startswith("slurmtrain.data."):
        for key, length in sequence_lengths(data).items():
            if length > longest:
                yield ConfigError(
                    f"{key}={length} is longer than model.max_seq_len={longest}",
                    hint=f"set model.max_seq_len={length}, or a shorter {key}",
                )


def _adapters(config: Config) -> Iterator[ConfigError]:
    """Find adapters beside an embedding, a layer that has its weights, or a layer that the decoder lacks."""
    ours = is_our_decoder(config.model)
    for target in config.lora.target_modules if config.lora.r else ():
        layer = target.rpartition(".")[2]
        if (ours or config.model.get("_target_") == HUGGING_FACE) and layer in EMBEDDINGS:
            problem = "which is an embedding: adapters are added to linear layers"
            hint = "leave it out; lora.target_modules=[] adds adapters to all linear layers but the last"
        elif ours and layer not in LINEAR_LAYERS:
            theirs = {name: own for own, name in LINEAR_LAYERS.items()}
            problem = "and the built-in decoder has no linear layer of that name"
            hint = f"it calls this layer {theirs[layer]!r}" if layer in theirs else nearest(layer, LINEAR_LAYERS)
        elif layer in OUTPUTS and ties_embeddings(config.model):
            problem = "which has the same weights as the embedding, so that an export could not merge adapters into it"
            hint = f"leave {target} out of lora.target_modules"
        else:
            continue
        yield ConfigError(f"lora.target_modules names {target!r}, {problem}", hint=hint)


def _evaluation(config: Config) -> Iterator[ConfigError]:
    """Check evaluation sets and metrics."""
    for name, values in config.eval.sets.items():
        if not OWN_NAME.fullmatch(name) or name == "valid":
            yield ConfigError(
                f"eval.sets has {name!r}, which is not a valid name of a set",
                hint="letters, digits and _; `valid` is the set of the data source",
            )
        yield from _target(f"eval.sets.{name}", values)
    for name, value in config.eval.metrics.items():
        if not isinstance(value, bool):
            yield from _target(f"eval.metrics.{name}", value)
        elif name not in BUILT_IN_METRICS:
            yield ConfigError(f"eval.metrics.{name}: there is no such metric", hint=nearest(name, BUILT_IN_METRICS))
    if config.eval.mode == EvalMode.JOB and config.checkpoint.keep_best and config.job.kind == JobKind.TRAIN:
        yield ConfigError(
            f"checkpoint.keep_best={config.checkpoint.keep_best} with eval.mode=job: when a checkpoint is removed, its "
            "evaluation may not have come back",
            hint="checkpoint.keep_every=N, or eval.mode=inline",
        )


def _observe(config: Config) -> Iterator[ConfigError]:
    """Check loggers and measurements."""
    observe, size = config.observe, config.world_size
    for name, values in observe.loggers.items():
        if not OWN_NAME.fullmatch(name) or name in ("wandb", "mlflow"):
            yield ConfigError(
                f"observe.loggers has {name!r}, which is not a valid name of a logger",
                hint="letters, digits and _; observe.wandb.enabled=true and observe.mlflow.enabled=true are the built-in ones",
            )
        yield from _target(f"observe.loggers.{name}", values)
    start = config.checkpoint.restore_from
    for field, given, own in (
        (f"observe.loggers.{next(iter(observe.loggers), '')}", observe.loggers, "call its loggers"),
        (f"checkpoint.restore_from={start}", start, "load the checkpoint from which it starts"),
    ):
        if given and config.job.kind == JobKind.COMMAND:
            yield ConfigError(
                f"{field} works only with the built-in trainer, but job.kind is {config.job.kind!r}",
                hint=f"your own program has to {own} itself",
            )
    if observe.blame_stragglers and not (observe.phases and observe.straggler_every):
        missing = "observe.straggler_every=0" if observe.phases else "observe.phases=false"
        yield ConfigError(
            f"observe.blame_stragglers=true, but {missing} cannot find slow ranks",
            hint="keep the defaults of observe.phases and observe.straggler_every",
        )
    for rank in (rank for rank in observe.profile_ranks if not 0 <= rank < size):
        yield ConfigError(
            f"observe.profile_ranks={observe.profile_ranks}: {rank} is not one of the ranks 0 to {size - 1}",
            hint="observe.profile_ranks=[0]; [] profiles all ranks",
        )
    if observe.profile_steps is not None and config.job.kind != JobKind.TRAIN:
        yield ConfigError(
            f"observe.profile_steps={observe.profile_steps!r} needs the trainer, but job.kind is {config.job.kind!r}",
            hint="for a program that calls slurmtrain.should_stop() once per step: touch RUN/profile",
        )
    elif observe.profile_steps is not None and profiled_steps(observe.profile_steps)[0] > config.train.steps:
        yield ConfigError(
            f"observe.profile_steps={observe.profile_steps!r}, but train.steps={config.train.steps}: there is no such step"
        )


def _target(where: str, values: object, hint: str | None = None) -> Iterator[ConfigError]:
    """Yield a problem if `values` does not name the class to be built."""
    if not isinstance(values, dict) or not isinstance(values.get("_target_"), str):
        yield ConfigError(f"{where}={values!r} has no _target_", hint=hint or f"+{where}._target_=my_package.MyClass")


def _prepare(config: Config) -> Iterator[ConfigError]:
    prepare = config.prepare
    if config.job.kind != JobKind.PREPARE:
        return
    if not prepare.inputs:
        yield ConfigError("prepare.inputs is empty", hint="prepare.inputs='[/data/raw/*.jsonl]'")
    if not prepare.output:
        yield ConfigError(
            "prepare.output is not set", hint="prepare.output=/data/tokens, a folder that will be created"
        )
    if prepare.part >= prepare.parts:
        yield ConfigError(
            f"prepare.part={prepare.part} with prepare.parts={prepare.parts}: parts are counted from 0",
            hint=f"-m 'prepare.part=range(0,{prepare.parts})'",
        )


RULES: tuple[Rule, ...] = (
    *(_job, _cluster, _sbatch, _secrets, _restarts, _training, _adapters, _evaluation, _observe, _prepare),
)


def _layout(config: Config, dims: ParallelDims) -> Iterator[ConfigError]:
    """Check what does not work with these parallel dims."""
    parallel, lora = config.parallel, config.lora
    if parallel.gradient_compression != GradientCompression.NONE and dims.uses_fsdp(parallel):
        what = (
            str(dims) if not dims.replicas_only else "parallel.param_dtype or parallel.reduce_dtype, which need FSDP2"
        )
        yield ConfigError(
            f"parallel.gradient_compression={parallel.gradient_compression} works only with whole replicas in float32 (DDP), "
            f"not with {what}",
            hint="parallel.reduce_dtype=bfloat16 halves the communication there",
        )
    for axis, what in (("tp", "tensor parallelism"), ("pp", "pipeline parallelism")):
        if lora.r and getattr(dims, axis) > 1:
            yield ConfigError(
                f"lora.r={lora.r} with parallel.{axis}={getattr(dims, axis)}: LoRA adapters cannot be combined with {what}",
                hint=f"set parallel.{axis}=1; parallel=fsdp shards the frozen weights over all ranks",
            )
