"""Rules that involve several fields of a config, checked before anything is submitted.

The checks are pure: they take a `Config` and raise a `ConfigError` that names the field, its value and what to write
instead.
"""

from __future__ import annotations

import math
import re
import shlex
from pathlib import PurePosixPath

from slurmtrain.choices import (
    Backend,
    EvalMode,
    GradientCompression,
    JobKind,
    Launcher,
    PpSchedule,
    PreflightMode,
    RequeueMode,
    SnapshotMode,
    StopSignal,
)
from slurmtrain.config.compose import SECRET_REFERENCE
from slurmtrain.config.elastic import at_most, usable_sizes
from slurmtrain.config.evaluation import evaluation_config
from slurmtrain.config.families import EMBEDDINGS, HUGGING_FACE, OUTPUTS, ties_embeddings
from slurmtrain.config.launched_program import check_launched, has_launcher
from slurmtrain.config.parallel_dims import ParallelDims, parallel_dims_of, sequence_lengths
from slurmtrain.config.port_range import PortRange
from slurmtrain.config.profile_steps import check_planned, first_and_last
from slurmtrain.config.schema import (
    ClusterConfig,
    Config,
    HooksConfig,
    JobConfig,
    LoraConfig,
    ObserveConfig,
    ParallelConfig,
    PreflightConfig,
    PrepareConfig,
    TrainConfig,
)
from slurmtrain.config.typed import words_of
from slurmtrain.earlier_names import NAMES, is_our_decoder
from slurmtrain.errors import EXIT_CONFIG, EXIT_REQUEUE, ConfigError, nearest
from slurmtrain.system.redaction import SECRET_VARIABLE

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
SBATCH_OPTION = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
STAGE_DIR = re.compile(r"(/|\$[A-Za-z_]\w*(?=/|$))[^$`\"\\]*")  # a path, or a variable of the job and what is below it
SLURM_EARLY_S = 60  # `man sbatch`, --signal: the signal may be sent up to 60 seconds earlier than specified
NODES_MAX = 65536  # every size of a range is tried
STRAGGLER_STEPS = 5  # fewest steps between two comparisons of the ranks
BUILT_IN_METRICS = ("perplexity", "bits_per_byte", "accuracy")
PARALLELISM = {"tp": "tensor parallelism", "pp": "pipeline parallelism"}
SET_NAME = re.compile(r"[A-Za-z0-9_]+")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}")


def validate(config: Config) -> ParallelDims:
    """Raise for the first setting that cannot work, and return the parallel dims, which every later check takes.

    Raises:
        ConfigError: the message gives the field, the value, what was expected and a hint.
    """
    _check_job(config.job)
    if has_launcher(config):
        check_launched(config)
    _check_cluster(config.cluster, singleton=config.job.singleton)
    _check_strings(config.cluster)
    _check_stage(config)
    _check_placement(config.cluster)
    _check_parallel(config.parallel)
    _check_batch(config.train)
    usable_sizes(config)
    dims = parallel_dims_of(at_most(config))
    _check_compression(config.parallel, dims)
    _check_lora(config.lora, dims)
    _check_adapted_layers(config)
    _check_ranges(config)
    _check_watchdog(config)
    _check_preflight(config.preflight)
    _check_numbers(config)
    _check_hooks(config.hooks)
    _check_observe(config.observe, config.job.kind)
    for index, values in enumerate(config.train.hooks):
        _check_target(f"train.hooks[{index}]", values, hint="train.hooks=[{_target_: my_package.MyHook}]")
    _check_evaluation(config)
    if config.job.kind == JobKind.PREPARE:
        _check_prepare(config.prepare)
    if config.job.kind == JobKind.TRAIN:
        _check_our_decoder(config)
    return dims


def _check_lora(lora: LoraConfig, dims: ParallelDims) -> None:
    _at_least("lora.r", lora.r, 0)
    if not lora.r:
        return
    if lora.alpha < 1:
        raise ConfigError(f"lora.alpha={lora.alpha} must be at least 1", hint="for example twice lora.r")
    if not 0 <= lora.dropout < 1:
        raise ConfigError(f"lora.dropout={lora.dropout} must be at least 0, and below 1")
    for axis in ("tp", "pp"):
        if getattr(dims, axis) > 1:
            raise ConfigError(
                f"lora.r={lora.r} with parallel.{axis}={getattr(dims, axis)}: LoRA adapters cannot be combined with "
                f"{PARALLELISM[axis]}",
                hint=f"set parallel.{axis}=1; parallel=fsdp shards the frozen weights over all ranks",
            )


def _check_adapted_layers(config: Config) -> None:
    """Raise if adapters are asked for beside an embedding, or beside a layer that has the embedding's weights."""
    if not config.lora.r:
        return
    for target in config.lora.target_modules:
        layer = target.rpartition(".")[2]
        known = is_our_decoder(config.model) or config.model.get("_target_") == HUGGING_FACE
        if known and layer in EMBEDDINGS:
            raise ConfigError(
                f"lora.target_modules names {target!r}, which is an embedding: adapters are added to linear layers",
                hint="leave it out; lora.target_modules=[] adds adapters to all linear layers but the last",
            )
        if layer in OUTPUTS and ties_embeddings(config.model):
            raise ConfigError(
                f"lora.target_modules names {target!r}, which has the same weights as the embedding: adapters beside it "
                "could not be merged into one of the two for an export",
                hint=f"leave {target} out of lora.target_modules",
            )


def _check_observe(observe: ObserveConfig, kind: JobKind) -> None:
    for name, values in observe.loggers.items():
        if not SET_NAME.fullmatch(name) or name in ("wandb", "mlflow"):
            raise ConfigError(
                f"observe.loggers has {name!r}, which is not a valid name of a logger",
                hint="letters, digits and _; observe.wandb.enabled=true and observe.mlflow.enabled=true are the built-in ones",
            )
        _check_target(f"observe.loggers.{name}", values)
    if observe.loggers and kind == JobKind.COMMAND:
        raise ConfigError(
            f"observe.loggers.{next(iter(observe.loggers))} works only with the built-in trainer, but job.kind is {kind!r}",
            hint="your own program has to call its loggers itself",
        )
    for name, value in (("wandb.project", observe.wandb.project), ("mlflow.experiment", observe.mlflow.experiment)):
        if value is not None and (not value.strip() or re.search(r"[\x00-\x1f\x7f]", value)):
            raise ConfigError(f"observe.{name}={value!r} is no name", hint="null takes job.name")
    if observe.wandb.project is not None and re.search(r"[/\\#?%:]", observe.wandb.project):
        raise ConfigError(
            f"observe.wandb.project={observe.wandb.project!r}: Weights & Biases allows none of / \\ # ? % : in it",
            hint="the user or team before the / is observe.wandb.entity",
        )
    if observe.textfile_dir is not None and not PurePosixPath(observe.textfile_dir).is_absolute():
        raise ConfigError(
            f"observe.textfile_dir={observe.textfile_dir} is not an absolute path",
            hint="name the folder that the node exporter of each node reads, such as /var/lib/node_exporter",
        )


def _check_evaluation(config: Config) -> None:
    wanted = config.eval
    for name, values in wanted.sets.items():
        if not SET_NAME.fullmatch(name) or name == "valid":
            raise ConfigError(
                f"eval.sets has {name!r}, which is not a valid name of a set",
                hint="letters, digits and _; `valid` is the set of the data source",
            )
        _check_target(f"eval.sets.{name}", values)
    for name, value in wanted.metrics.items():
        if not isinstance(value, bool):
            _check_target(f"eval.metrics.{name}", value)
        elif name not in BUILT_IN_METRICS:
            raise ConfigError(f"eval.metrics.{name}: there is no such metric", hint=nearest(name, BUILT_IN_METRICS))
    if wanted.mode == EvalMode.INLINE or config.job.kind != JobKind.TRAIN:
        return
    if config.cluster.backend == Backend.LOCAL:
        raise ConfigError("eval.mode=job, but cluster.backend=local has no job queue", hint="eval.mode=inline")
    if config.checkpoint.keep_best:
        raise ConfigError(
            f"checkpoint.keep_best={config.checkpoint.keep_best} with eval.mode=job: when a checkpoint is removed, its "
            "evaluation may not have come back",
            hint="checkpoint.keep_every=N, or eval.mode=inline",
        )
    try:
        validate(evaluation_config(config, "checkpoint"))
    except ConfigError as error:
        raise ConfigError(
            f"the evaluation job (eval.mode=job) is invalid: {error.message}",
            hint=f"eval.cluster and eval.parallel change it; {error.hint or 'by default it is one copy of the model'}",
        ) from None


def _check_our_decoder(config: Config) -> None:
    """Raise for what our own model would report only when the job has begun: names that it had, and too long sequences."""
    if not is_our_decoder(config.model):
        return
    for name in config.model:
        if name in NAMES:
            raise ConfigError(
                f"model.{name} is called model.{NAMES[name]}, as in Llama's own files",
                hint=f"write model.{NAMES[name]}={config.model[name]}",
            )
    longest = config.model.get("max_seq_len")
    if not isinstance(longest, int) or not str(config.data.get("_target_")).startswith("slurmtrain.data."):
        return
    for key, length in sequence_lengths(config.data).items():
        if length > longest:
            raise ConfigError(
                f"{key}={length} is longer than model.max_seq_len={longest}",
                hint=f"set model.max_seq_len={length}, or a shorter {key}",
            )


def _check_target(where: str, values: object, hint: str | None = None) -> None:
    if not isinstance(values, dict) or not isinstance(values.get("_target_"), str):
        raise ConfigError(f"{where}={values!r} has no _target_", hint=hint or f"+{where}._target_=my_package.MyClass")


def _check_job(job: JobConfig) -> None:
    if not NAME.fullmatch(job.name):
        raise ConfigError(
            f"job.name is {job.name!r}: use at most 64 letters, digits and . _ + -, starting with a letter or digit",
            hint="the name is used for a folder and in squeue",
        )
    if job.kind in (JobKind.EVALUATE, JobKind.PREFLIGHT):
        raise ConfigError(f"job.kind={job.kind} is not known", hint=f"one of: {', '.join(words_of(JobKind))}")
    if job.kind == JobKind.COMMAND:
        if not job.command or not job.command.strip():
            raise ConfigError("job.command is empty", hint="submit -- python my_train.py --lr 1e-3")
        try:
            shlex.split(job.command)
        except ValueError as error:
            raise ConfigError(f"job.command is {job.command!r}: {error}", hint="close the quote") from None
        if job.finished_when is not None:
            _check_finished_when(job.finished_when)
    elif job.command:
        raise ConfigError(
            f"job.command is {job.command!r}, but job.kind is {job.kind!r}, which does not run a command",
            hint="write job=command",
        )
    unused = {
        **dict.fromkeys(("finished_when", "progress_file", "stop_grace_s", "checkpoints", "checkpoint_complete")),
        "launcher": Launcher.NONE,
        "stop_signal": StopSignal.SIGTERM,
    }
    for name, value in unused.items():
        if job.kind != JobKind.COMMAND and getattr(job, name) != value:
            raise ConfigError(
                f"job.{name} works only with a job.command, but job.kind is {job.kind!r}", hint=f"leave job.{name} out"
            )
    for name in ("checkpoints", "checkpoint_complete"):
        if getattr(job, name) is not None and not getattr(job, name).strip(", "):
            raise ConfigError(f"job.{name} is empty", hint="job.checkpoints='out/checkpoint-*', or null")
    if job.checkpoint_complete is not None and job.checkpoints is None:
        raise ConfigError(
            f"job.checkpoint_complete={job.checkpoint_complete} does not say where the checkpoints are",
            hint="job.checkpoints='out/checkpoint-*'",
        )
    if job.stop_grace_s is not None:
        _at_least("job.stop_grace_s", job.stop_grace_s, 1, why="null is as long as SLURM allows")


def _check_finished_when(text: str) -> None:
    if not text.strip():
        raise ConfigError("job.finished_when is empty", hint="a file, an exit code, or null")
    if text.isdigit() and (int(text) > 255 or int(text) in (EXIT_REQUEUE, EXIT_CONFIG)):
        raise ConfigError(
            f"job.finished_when={text}: an exit code from 0 to 255 was expected, other than {EXIT_REQUEUE} (start me again) "
            f"and {EXIT_CONFIG} (the config is wrong)",
            hint="job.finished_when=0, or a file that the program creates at its end",
        )


def _check_cluster(cluster: ClusterConfig, *, singleton: bool) -> None:
    if cluster.choices:
        raise ConfigError(
            f"cluster.choices={','.join(cluster.choices)} is for `submit` of one run, which goes to each of them",
            hint=f"here name one: cluster={cluster.choices[0]}",
        )
    _at_least("cluster.nodes", cluster.node_range.least, 1)
    if cluster.node_range.most > NODES_MAX:
        raise ConfigError(
            f"cluster.nodes={cluster.nodes}: no job has more than {NODES_MAX} nodes", hint="cluster.nodes=2-4"
        )
    for name in (
        "tasks_per_node",
        "cpus_per_task",
        "time_limit_min",
        "rendezvous_timeout_s",
        "collective_timeout_s",
    ):
        _at_least(f"cluster.{name}", getattr(cluster, name), 1)
    for name in ("gpus_per_node", "signal_lead_s", "spare_nodes", "srun_wait_s"):
        _at_least(f"cluster.{name}", getattr(cluster, name), 0)

    if cluster.port_range is not None:
        PortRange.parse(cluster.port_range)
    memory = {name: getattr(cluster, name) for name in ("mem_per_node_gb", "mem_per_cpu_gb", "mem_per_gpu_gb")}
    given = [f"cluster.{name}={value}" for name, value in memory.items() if value is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} exclude each other", hint="keep one and set the others to null")
    for name, value in memory.items():
        if value is not None:
            _at_least(f"cluster.{name}", value, 0 if name == "mem_per_node_gb" else 1)
    if cluster.mem_per_gpu_gb is not None and not cluster.gpus_per_node:
        raise ConfigError(
            f"cluster.mem_per_gpu_gb={cluster.mem_per_gpu_gb}, but cluster.gpus_per_node is 0",
            hint="use mem_per_node_gb",
        )
    if cluster.gpu_memory_gb is not None:
        _at_least("cluster.gpu_memory_gb", cluster.gpu_memory_gb, 1, why="null does not look whether it fits")
    for name in (
        "gpu_link_gb_per_s",
        "network_gb_per_s",
        "storage_gb_per_s",
        "failures_per_1000_node_days",
    ):
        value = getattr(cluster, name)
        if value is not None and not (0 < value < math.inf):
            raise ConfigError(f"cluster.{name}={value:g} is not a valid rate", hint="a number above 0")
    for name, value in (("gpu_type", cluster.gpu_type), ("gpu_memory_gb", cluster.gpu_memory_gb)):
        if value and not cluster.gpus_per_node:
            raise ConfigError(
                f"cluster.{name}={value!r}, but cluster.gpus_per_node is 0",
                hint=f"set gpus_per_node, or cluster.{name}=null",
            )
    if cluster.gpus_per_node and cluster.tasks_per_node > cluster.gpus_per_node:
        raise ConfigError(
            f"cluster.tasks_per_node={cluster.tasks_per_node} ranks would share cluster.gpus_per_node="
            f"{cluster.gpus_per_node} GPUs",
            hint=f"one rank drives one GPU: set cluster.tasks_per_node={cluster.gpus_per_node}",
        )
    if cluster.spare_nodes and cluster.backend == Backend.LOCAL:
        raise ConfigError(
            f"cluster.spare_nodes={cluster.spare_nodes}, but cluster.backend=local has only this machine",
            hint="cluster.spare_nodes=0",
        )
    if cluster.backend == Backend.LOCAL and cluster.nodes != 1:
        raise ConfigError(
            f"cluster.nodes={cluster.nodes}, but cluster.backend=local has only this machine",
            hint="use cluster.tasks_per_node for more ranks, or a SLURM cluster: +cluster=sandbox tries it here",
        )
    if cluster.venv and cluster.conda_env:
        raise ConfigError(
            f"cluster.venv={cluster.venv!r} and cluster.conda_env={cluster.conda_env!r} exclude each other",
            hint="set one of them to null",
        )
    if bool(cluster.container.kind) != bool(cluster.container.image):
        raise ConfigError(
            f"cluster.container.kind={cluster.container.kind} with cluster.container.image={cluster.container.image}",
            hint="set both or neither",
        )
    if cluster.slurm_conf and cluster.sandbox:
        raise ConfigError(
            f"cluster.slurm_conf={cluster.slurm_conf!r} and cluster.sandbox={cluster.sandbox!r} exclude each other",
            hint="a sandbox has its own slurm.conf",
        )
    latest = cluster.time_limit_min * 60 - SLURM_EARLY_S
    if cluster.backend == Backend.SLURM and cluster.signal_lead_s >= latest:
        raise ConfigError(
            f"cluster.signal_lead_s={cluster.signal_lead_s} with cluster.time_limit_min={cluster.time_limit_min}: SLURM may "
            f"warn {SLURM_EARLY_S} s early, so the warning could come before the first step",
            hint=f"set cluster.time_limit_min={(cluster.signal_lead_s + SLURM_EARLY_S) // 60 + 1} or more"
            + (f", or cluster.signal_lead_s below {latest}" if latest > 0 else ""),
        )
    for option, value in cluster.sbatch.items():
        _check_sbatch_option(option, value)
    dependency = str(cluster.sbatch.get("dependency") or "")
    if singleton and "?" in dependency:
        raise ConfigError(
            f"job.singleton=true with cluster.sbatch.dependency={dependency!r}: SLURM cannot combine `?` with other conditions",
            hint="join the conditions with commas, or set job.singleton=false",
        )


def _check_placement(cluster: ClusterConfig) -> None:
    for name in ("switches", "switches_wait_min", "segment"):
        value = getattr(cluster, name)
        if value is not None:
            _at_least(f"cluster.{name}", value, 1)
        if value is not None and name in cluster.sbatch:
            raise ConfigError(
                f"cluster.{name}={value} and cluster.sbatch.{name}={cluster.sbatch[name]} set the same option of sbatch",
                hint="leave one of them out",
            )
    if cluster.switches_wait_min is not None and cluster.switches is None:
        raise ConfigError(
            f"cluster.switches_wait_min={cluster.switches_wait_min} has nothing to wait for",
            hint="set cluster.switches, too",
        )
    nodes = cluster.node_range
    for count in (nodes.least + cluster.spare_nodes, nodes.most + cluster.spare_nodes):
        if cluster.segment is not None and count % cluster.segment:
            spare = f" and cluster.spare_nodes={cluster.spare_nodes}" if cluster.spare_nodes else ""
            raise ConfigError(
                f"cluster.segment={cluster.segment} does not divide the {count} nodes of cluster.nodes={cluster.nodes}{spare}",
                hint="SLURM allocates whole segments only",
            )


def _check_stage(config: Config) -> None:
    """Raise if what is to be copied to the nodes cannot be, or would not be used there."""
    stage, cluster = config.cluster.stage, config.cluster
    if stage.dir is not None and not STAGE_DIR.fullmatch(stage.dir):
        raise ConfigError(
            f"cluster.stage.dir={stage.dir!r} is not a folder on a node",
            hint="an absolute path such as /local/scratch, or a variable of the job such as $SLURM_TMPDIR",
        )
    names = [PurePosixPath(path).name for path in stage.data]
    for name in names:
        if not name or name == ".." or names.count(name) > 1:
            why = "is a second of that name" if names.count(name) > 1 else "is no file or folder with a name"
            raise ConfigError(
                f"cluster.stage.data={','.join(stage.data)}: {name or 'an empty path'} {why}",
                hint="copies are named after the last part of their path, so these parts must differ",
            )
    _at_least("cluster.stage.limit_min", stage.limit_min, 1)
    if not stage.wanted:
        return
    if cluster.backend == Backend.LOCAL:
        raise ConfigError(
            "cluster.stage copies to the nodes of a SLURM job, and cluster.backend=local has only this machine",
            hint="leave cluster.stage out",
        )
    if cluster.container.kind:
        raise ConfigError(
            f"cluster.stage with cluster.container.kind={cluster.container.kind}: the ranks would not see the copies",
            hint="an image is a single file that its runtime reads by itself; leave cluster.stage out",
        )
    if config.sweep.pack > 1:
        raise ConfigError(
            f"cluster.stage with sweep.pack={config.sweep.pack}: each run of a pack would make its own copies",
            hint="sweep.pack=1, or leave cluster.stage out",
        )
    if stage.code and config.job.snapshot == SnapshotMode.NONE:
        raise ConfigError(
            "cluster.stage.code=true with job.snapshot=none: there is no snapshot to copy",
            hint="job.snapshot=auto, or cluster.stage.code=false",
        )


def _check_sbatch_option(option: str, value: object) -> None:
    if not SBATCH_OPTION.fullmatch(option):
        raise ConfigError(
            f"cluster.sbatch has {option!r}, which is not a long option of sbatch",
            hint="use the name from `man sbatch`, without the leading dashes: +cluster.sbatch.mail-type=END",
        )
    # sbatch takes the beginning of an option for the option.
    owned = next(
        (name for name in (option, *SBATCH_OPTIONS) if name in SBATCH_OPTIONS and name.startswith(option)), None
    )
    if owned is not None:
        raise ConfigError(f"cluster.sbatch has no option {option!r}", hint=f"it is decided by {SBATCH_OPTIONS[owned]}")
    parts = value if isinstance(value, list) else [value]
    allowed = (str, int) if isinstance(value, list) else (str, int, float, bool, type(None))
    for part in parts:
        if not isinstance(part, allowed) or (isinstance(value, list) and isinstance(part, bool)):
            raise ConfigError(
                f"cluster.sbatch.{option}={value!r} cannot be passed to sbatch",
                hint="give text, a number, true for a bare flag, or a list of texts, which are joined with commas",
            )


def _check_strings(cluster: ClusterConfig) -> None:
    """Raise for control characters: a newline in a value would start a line of its own in the batch script."""
    values: list[tuple[str, object]] = [
        (f"cluster.{name}", value) for name, value in vars(cluster).items() if name != "setup"
    ]
    for group in ("container", "stage"):
        values += [(f"cluster.{group}.{name}", value) for name, value in vars(getattr(cluster, group)).items()]
    for name, value in values:
        parts = (
            value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else [("", value)]
        )
        for key, part in parts:
            for text in (key, part):
                if isinstance(text, str) and re.search(r"[\x00-\x1f\x7f]", text):
                    raise ConfigError(
                        f"{name} holds {text!r}: control characters are not allowed", hint="use cluster.setup for code"
                    )
                if isinstance(text, str) and name != "cluster.env" and SECRET_REFERENCE.search(text):
                    raise ConfigError(
                        f"{name} holds the secret {text!r}, which would have to be written into the batch script",
                        hint="put it into cluster.env",
                    )
    for name, value in cluster.env.items():
        if SECRET_VARIABLE.search(name) and value and not SECRET_REFERENCE.fullmatch(value):
            raise ConfigError(
                f"cluster.env.{name} looks like a secret and is written out, so it would be stored on disk in clear text",
                hint=f"export it in your shell and write cluster.env.{name}='${{oc.env:{name}}}'",
            )
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ConfigError(
                f"cluster.env has {name!r}, which is not a valid name of an environment variable",
                hint="e.g. NCCL_DEBUG",
            )


def _check_parallel(parallel: ParallelConfig) -> None:
    if parallel.compile and parallel.pp_schedule == PpSchedule.ZERO_BUBBLE and parallel.pp != 1:
        raise ConfigError(
            "parallel.compile=true with parallel.pp_schedule=zero_bubble: a compiled backward pass cannot be split in two",
            hint="parallel.pp_schedule=interleaved_1f1b, or parallel.compile=false",
        )


def _check_compression(parallel: ParallelConfig, dims: ParallelDims) -> None:
    how = f"parallel.gradient_compression={parallel.gradient_compression}"
    if parallel.gradient_compression != GradientCompression.NONE and dims.uses_fsdp(parallel):
        what = (
            str(dims) if not dims.replicas_only else "parallel.param_dtype or parallel.reduce_dtype, which need FSDP2"
        )
        raise ConfigError(
            f"{how} works only with whole replicas in float32 (DDP), not with {what}",
            hint="parallel.reduce_dtype=bfloat16 halves the communication there",
        )
    _at_least("parallel.powersgd_rank", parallel.powersgd_rank, 1)
    _at_least(
        "parallel.powersgd_start_step", parallel.powersgd_start_step, 2, why="DDP builds its final buckets before"
    )


def _check_batch(train: TrainConfig) -> None:
    _at_least("train.global_batch_size", train.global_batch_size, 1)
    if train.micro_batch_size is not None:
        _at_least("train.micro_batch_size", train.micro_batch_size, 1)


def _check_ranges(config: Config) -> None:
    train, optim = config.train, config.optim
    for name in ("steps", "log_every", "length_sorted_steps"):
        _at_least(f"train.{name}", getattr(train, name), 1)
    for name in ("eval_every", "data_workers", "data_ahead", "seed", "max_skipped", "max_rollbacks"):
        _at_least(f"train.{name}", getattr(train, name), 0)
    _at_least("train.spike_window", train.spike_window, 10, why="a median of fewer losses says little")
    _at_least("train.spike_threshold", train.spike_threshold, 1, why="train.on_spike=ignore looks for no spikes")
    if not 0 < optim.lr < math.inf:  # written so that nan is refused, too; as below
        raise ConfigError(f"optim.lr={optim.lr} must be above 0", hint="for example optim.lr=3e-4")
    if not 0 <= optim.min_lr_ratio <= 1:
        raise ConfigError(f"optim.min_lr_ratio={optim.min_lr_ratio} must lie between 0 and 1")
    if len(optim.betas) != 2 or not all(0 <= beta < 1 for beta in optim.betas):
        raise ConfigError(f"optim.betas={list(optim.betas)} must be two numbers from 0 up to but not 1")
    for name in ("warmup_steps", "weight_decay", "grad_clip", "eps"):
        _at_least(f"optim.{name}", getattr(optim, name), 0)
    if optim.warmup_steps > train.steps:
        raise ConfigError(
            f"optim.warmup_steps={optim.warmup_steps} is more than train.steps={train.steps}",
            hint="the warm-up would never end",
        )
    _at_least("checkpoint.every_steps", config.checkpoint.every_steps, 0)
    _at_least(
        "checkpoint.keep_last",
        config.checkpoint.keep_last,
        2,
        why="one good checkpoint must be left while the next is checked",
    )
    for name in ("every_minutes", "keep_every", "keep_best", "max_failures", "local_every_steps", "export_every_steps"):
        _at_least(f"checkpoint.{name}", getattr(config.checkpoint, name), 0)
    model = config.model.get("_target_")
    known = is_our_decoder(config.model) or model == HUGGING_FACE
    if config.checkpoint.export_every_steps and config.job.kind == JobKind.TRAIN and not known:
        raise ConfigError(
            f"checkpoint.export_every_steps={config.checkpoint.export_every_steps}: Hugging Face has no family for {model}",
            hint="`checkpoints RUN export FILE.safetensors` writes the weights of any model",
        )
    if config.checkpoint.local is not None and not PurePosixPath(config.checkpoint.local).is_absolute():
        raise ConfigError(
            f"checkpoint.local={config.checkpoint.local} is not an absolute path",
            hint="choose a node-local folder, as in checkpoint.local=/dev/shm",
        )
    if config.checkpoint.local_every_steps and config.checkpoint.local is None:
        raise ConfigError(
            f"checkpoint.local_every_steps={config.checkpoint.local_every_steps} needs a folder on the nodes to copy to",
            hint="checkpoint.local=/dev/shm, or a local disk's folder",
        )
    if config.checkpoint.restore_only is not None and config.checkpoint.restore_from is None:
        raise ConfigError(
            "checkpoint.restore_only=model, but there is no checkpoint to take the model from",
            hint="checkpoint.restore_from=PATH names one",
        )
    if not math.isfinite(config.checkpoint.every_minutes):
        raise ConfigError(
            f"checkpoint.every_minutes={config.checkpoint.every_minutes} is not a valid time", hint="0: not by time"
        )
    if config.checkpoint.mtbf_hours is not None and not config.checkpoint.mtbf_hours > 0:
        raise ConfigError(
            f"checkpoint.mtbf_hours={config.checkpoint.mtbf_hours} is not a valid time between failures",
            hint="give hours above 0, or null to go by the number of nodes",
        )
    if config.cluster.spare_nodes and not config.requeue.starts_in_place:
        raise ConfigError(
            f"cluster.spare_nodes={config.cluster.spare_nodes}, but ranks start again in the same job only with "
            "requeue.in_place=true",
            hint="requeue.in_place=true, or cluster.spare_nodes=0",
        )
    if config.cluster.spare_nodes and config.sweep.pack > 1:
        raise ConfigError(
            f"cluster.spare_nodes={config.cluster.spare_nodes} with sweep.pack={config.sweep.pack}: runs that share a job "
            "would disagree on its nodes",
            hint="sweep.pack=1, or cluster.spare_nodes=0",
        )
    if config.requeue.standby_ranks and (why := _no_standby_ranks(config)) is not None:
        raise ConfigError(
            f"requeue.standby_ranks=true, but {why}",
            hint="requeue.standby_ranks=false: ranks then load PyTorch when they start",
        )
    if config.requeue.mode == RequeueMode.CHAIN:
        _at_least("requeue.chain_length", config.requeue.chain_length, 2, why="requeue=off submits a single job")
    _at_least("requeue.max_attempts_without_progress", config.requeue.max_attempts_without_progress, 1)
    _at_least("requeue.max_unseen_attempts", config.requeue.max_unseen_attempts, 1)
    _at_least("requeue.long_attempt_min", config.requeue.long_attempt_min, 1)
    _at_least("requeue.restart_delay_s", config.requeue.restart_delay_s, 0)
    _at_least("requeue.blame_threshold", config.requeue.blame_threshold, 0)
    if not 0 < config.requeue.blame_expiry_h < math.inf:
        raise ConfigError(
            f"requeue.blame_expiry_h={config.requeue.blame_expiry_h} is not a valid expiry time",
            hint="give hours above 0, for example 24; requeue.blame_threshold=0 keeps no ledger of nodes",
        )
    _at_least("sweep.pack", config.sweep.pack, 1)
    for name, least in (("prune_after_steps", 0), ("startup_trials", 1), ("reduction_factor", 2)):
        _at_least(f"search.{name}", getattr(config.search, name), least)
    _at_least("search.max_failures_in_a_row", config.search.max_failures_in_a_row, 1)
    if config.job.kind == JobKind.TRAIN:
        for group in ("model", "data"):
            if not getattr(config, group).get("_target_"):
                raise ConfigError(
                    f"{group}._target_ is missing",
                    hint=f"choose one with {group}=..., or write {group}._target_=my.module.Class",
                )


def _check_prepare(prepare: PrepareConfig) -> None:
    if not prepare.inputs:
        raise ConfigError("prepare.inputs is empty", hint="prepare.inputs='[/data/raw/*.jsonl]'")
    if not prepare.output:
        raise ConfigError(
            "prepare.output is not set", hint="prepare.output=/data/tokens, a folder that will be created"
        )
    if not 0 < prepare.unit_mb < math.inf:
        raise ConfigError(f"prepare.unit_mb={prepare.unit_mb} must be above 0", hint="in MB, for example 128")
    if not 0 <= prepare.valid_fraction < 1:
        raise ConfigError(f"prepare.valid_fraction={prepare.valid_fraction} must be at least 0, and below 1")
    if not 0 <= prepare.max_bad_share <= 1:
        raise ConfigError(f"prepare.max_bad_share={prepare.max_bad_share} must lie between 0 and 1")
    _at_least("prepare.workers", prepare.workers, 0)
    _at_least("prepare.parts", prepare.parts, 1)
    if not 0 <= prepare.part < prepare.parts:
        raise ConfigError(
            f"prepare.part={prepare.part} with prepare.parts={prepare.parts}: parts are counted from 0",
            hint=f"-m 'prepare.part=range(0,{prepare.parts})'",
        )


def _check_watchdog(config: Config) -> None:
    limits = config.watchdog
    for name in ("first_step_s", "factor", "min_s", "evaluation_s", "save_s"):
        _at_least(f"watchdog.{name}", getattr(limits, name), 1, why="watchdog.enabled=false watches nothing")
    if limits.heartbeat_file is not None and config.job.kind != JobKind.COMMAND:
        raise ConfigError(
            f"watchdog.heartbeat_file={limits.heartbeat_file!r} is for job=command; the trainer's steps are visible without it",
            hint="watchdog.heartbeat_file=null",
        )


def _check_preflight(preflight: PreflightConfig) -> None:
    if not preflight.clock_offset_s > 0:
        raise ConfigError(
            f"preflight.clock_offset_s={preflight.clock_offset_s} must be above 0",
            hint="in seconds, such as 5; preflight.ignore=[clock] ignores clocks",
        )
    _at_least("preflight.min_free_gb", preflight.min_free_gb, 0)
    if not 0 < preflight.slow_share < 1:
        raise ConfigError(
            f"preflight.slow_share={preflight.slow_share} must be above 0, and below 1",
            hint="a share of the median, such as 0.7",
        )
    if preflight.exclude_slow and preflight.mode != PreflightMode.FULL:
        raise ConfigError(
            f"preflight.exclude_slow=true, but preflight.mode={preflight.mode} does not measure speed",
            hint="preflight=full, or preflight.exclude_slow=false",
        )


def _check_numbers(config: Config) -> None:
    observe, peak = config.observe, config.cluster.peak_tflops
    for name in ("per_layer_every", "straggler_every"):
        _at_least(f"observe.{name}", getattr(observe, name), 0)
    if 0 < observe.straggler_every < STRAGGLER_STEPS:
        raise ConfigError(
            f"observe.straggler_every={observe.straggler_every}: the median of so few steps is mostly noise",
            hint=f"{STRAGGLER_STEPS} or more steps; 0 turns the search for slow ranks off",
        )
    if observe.blame_stragglers and not (observe.phases and observe.straggler_every):
        missing = "observe.straggler_every=0" if observe.phases else "observe.phases=false"
        raise ConfigError(
            f"observe.blame_stragglers=true, but {missing} cannot find slow ranks",
            hint="keep the defaults of observe.phases and observe.straggler_every",
        )
    check_planned(observe.profile_ranks, config.world_size)
    if observe.profile_steps is not None:
        first, _ = first_and_last(observe.profile_steps)
        if config.job.kind != JobKind.TRAIN:
            raise ConfigError(
                f"observe.profile_steps={observe.profile_steps!r} needs the trainer, but job.kind is {config.job.kind!r}",
                hint="for a program that calls slurmtrain.should_stop() once per step: touch RUN/profile",
            )
        if first > config.train.steps:
            raise ConfigError(
                f"observe.profile_steps={observe.profile_steps!r}, but train.steps={config.train.steps}: there is no such step"
            )
    if peak is not None and not 0 < peak < math.inf:
        raise ConfigError(
            f"cluster.peak_tflops={peak} must be above 0",
            hint="dense teraflops per second of one GPU, such as 989.4; null: the value in the GPU's data sheet",
        )


def _check_hooks(hooks: HooksConfig) -> None:
    _at_least("hooks.timeout_s", hooks.timeout_s, 1)
    for name in ("on_finish", "on_failure", "on_preemption"):
        command = getattr(hooks, name)
        if command is None:
            continue
        if not command.strip() or "\0" in command:
            raise ConfigError(f"hooks.{name} is {command!r}, which is not a command", hint="null runs none")
        secret = SECRET_REFERENCE.search(command)
        if secret is not None:
            raise ConfigError(
                f"hooks.{name} holds the secret {secret.group()!r}, which would be visible in every process list",
                hint=f"write +secrets.{secret.group(1)}=env; the hook can read it from its environment, as ${secret.group(1)}",
            )


def _at_least(name: str, value: float, least: float, *, why: str | None = None) -> None:
    if not value >= least:
        raise ConfigError(f"{name}={value} must be at least {least}", hint=why)


def _no_standby_ranks(config: Config) -> str | None:
    """Say why no ranks can wait for the next start in the same job; return None if they can."""
    cluster = config.cluster
    if config.job.kind != JobKind.TRAIN:
        return f"job.kind={config.job.kind} has no ranks that load PyTorch for you"
    if cluster.backend == Backend.LOCAL:
        return "cluster.backend=local has no job in which ranks could wait"
    if not config.requeue.starts_in_place:
        return "ranks start again in the same job only with requeue.in_place=true"
    if cluster.spare_nodes or cluster.node_range.elastic:
        return "after a failure the ranks may start on other nodes (cluster.spare_nodes, or a range of cluster.nodes)"
    if cluster.container.kind is not None:
        return f"cluster.container.kind={cluster.container.kind} would have to start a second container on each node"
    if config.sweep.pack > 1:
        return f"sweep.pack={config.sweep.pack} runs share the job's memory"
    return None
