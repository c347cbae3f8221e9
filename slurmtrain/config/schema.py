"""The schema: every field a config may have, its type, its unit and what it is for.

This is the only list of fields there is. Hydra composes into it (an unknown key or a wrong type is refused there),
`validate` checks rules that involve several fields, and the job reads its frozen copy back into it. It is not the place
for defaults that differ between clusters or models: those are the yaml files under `conf/`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from slurmtrain.choices import (
    ActivationCheckpointing,
    Allow,
    Backend,
    BestMode,
    ContainerKind,
    CpMethod,
    Device,
    EvalMode,
    ExportDtype,
    FindingKind,
    GradientCompression,
    JobKind,
    Launcher,
    LossOn,
    OnNonfinite,
    OnSpike,
    ParamDtype,
    PpSchedule,
    PreflightMode,
    Pruner,
    RawFormat,
    RecordKind,
    ReduceDtype,
    ReplicaDrift,
    RequeueMode,
    RestoreOnly,
    SnapshotMode,
    StopSignal,
    Verify,
    WandbMode,
)
from slurmtrain.config.node_range import NodeRange
from slurmtrain.config.port_range import PortRange
from slurmtrain.runs.lookup import runs_root


@dataclass
class ContainerConfig:
    """The container that the ranks run in, if any."""

    # null: none; "pyxis" (flags on the srun line); "apptainer" (wraps the task's command)
    kind: ContainerKind | None = None
    image: str | None = None  # an image that the runtime accepts: a .sqsh or .sif file, or a registry reference
    mounts: list[str] = field(default_factory=list)  # each host:container[:ro]; the run directory is always mounted
    args: list[str] = field(default_factory=list)  # further flags of the runtime, one word each, passed on unchanged


@dataclass
class StageConfig:
    """What each node gets a copy of before the ranks start, from which they then import and read.

    A node copies once, however many ranks it has; the copies are removed when the job ends.
    """

    code: bool = False  # the run's snapshot of the code
    # the virtual or conda environment of the ranks: packed into one archive when a job first uses it, and again after changes
    environment: bool = False
    data: list[str] = field(default_factory=list)  # files and folders; a data source that names them reads the copies
    # The folder of each node: a path, which may begin with a variable of the job, as in $SLURM_TMPDIR. null: $TMPDIR, else /tmp
    dir: str | None = None
    # End the attempt (exit 78) if a node has no sound copy; false: the ranks of that node use the shared folders
    required: bool = False
    # Minutes that preparing, and then copying, may take at most; nodes that are not done by then have no sound copy
    limit_min: int = 30

    @property
    def wanted(self) -> bool:
        """Whether anything is to be copied."""
        return self.code or self.environment or bool(self.data)


@dataclass
class ClusterConfig:
    """The machines that the job runs on and the resources that it asks for; one yaml file per cluster in conf/cluster/."""

    # "slurm", or "local": the same job as processes of this machine, in the foreground
    backend: Backend = Backend.SLURM
    # With cluster=first: names of cluster files. The run is submitted to each, and the first job that starts takes it.
    choices: list[str] = field(default_factory=list)
    # A number, or a range such as 2-4: as many of them as SLURM can give. The global batch stays as it is, so sizes that cannot
    # divide it are left out, and the ranks run on the next smaller one.
    nodes: int | str = 1
    # Nodes that the job has besides, on which no rank runs until one of the others fails: see requeue.in_place.
    spare_nodes: int = 0
    tasks_per_node: int = 1  # ranks per node; one rank drives one GPU
    cpus_per_task: int = 1
    gpus_per_node: int = 0
    gpu_type: str | None = None  # type of the GPUs, as in --gpus-per-node=TYPE:N, if the cluster has several
    gpu_memory_gb: float | None = None  # memory of one GPU; if set, a model that cannot fit is refused
    # Teraflops per second, dense, that a GPU (or a rank on CPUs) can do at most in the type that is computed in: what mfu is a
    # share of. null: that of the GPU's data sheet, where it is known
    peak_tflops: float | None = None
    # For `plan`: from a GPU to the others of its node, one way; null: by gpu_type
    gpu_link_gb_per_s: float | None = None
    # For `plan`: network of a node, all its adapters together, one way (8 of 400 Gbit/s: 400); null: by gpu_type
    network_gb_per_s: float | None = None
    # For `plan`: what all nodes together write to the file system of the checkpoints; null: 1 for each node
    storage_gb_per_s: float | None = None
    # For `plan` and checkpoint.auto, without checkpoint.mtbf_hours. 6.5 is published of a large cluster (arXiv:2410.21680).
    failures_per_1000_node_days: float = 6.5
    mem_per_node_gb: int | None = None  # set at most one of the three mem_* fields; 0: all of the node's memory
    mem_per_cpu_gb: int | None = None
    mem_per_gpu_gb: int | None = None
    time_limit_min: int = 60
    signal_lead_s: int = 120  # the early warning (USR2) comes this long before the time limit; SLURM may add 60 s
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    exclude: str | None = None  # node list that the job must not get
    exclusive: bool = False  # no other job runs on the job's nodes
    switches: int | None = (
        None  # the most leaf switches that the nodes may be behind, where SLURM knows a tree of switches
    )
    # with switches: how long to wait for such nodes; then any will do. The site's max_switch_wait (SchedulerParameters,
    # 300 s by default) is the most that SLURM waits, whatever is asked for; null: that long
    switches_wait_min: int | None = None
    # nodes come in groups of this many, each within one block, where SLURM knows blocks (topology/block, from 24.05 on)
    segment: int | None = None
    # further sbatch options by their long name, which sbatch judges; true is a bare flag
    sbatch: dict[str, Any] = field(default_factory=dict)
    srun_args: list[str] = field(default_factory=list)  # further arguments of srun, after ours
    srun_wait_s: int = 60  # after the first rank exited, srun kills ranks that are alive for longer than this
    modules: list[str] = field(default_factory=list)  # names for `module load`, which is done first
    # bash lines after the modules; one that fails ends the job (exit 78)
    setup: list[str] = field(default_factory=list)
    venv: str | None = None  # a virtual environment to activate
    conda_env: str | None = None  # a conda environment to activate instead, by name or path
    python: str | None = None  # interpreter of the ranks; null: the one that submits, or the container's `python`
    container: ContainerConfig = field(default_factory=ContainerConfig)
    stage: StageConfig = field(default_factory=StageConfig)
    # With parallel.compile: a folder that all nodes see, in which jobs keep compiled code for later ones; null: none is kept
    compile_cache: str | None = None
    env: dict[str, str] = field(default_factory=dict)  # environment variables of every rank
    network_interface: str = "auto"  # of NCCL and gloo: its name, "auto" (the one that reaches rank 0) or "none"
    # TCP ports, such as 29000-29100, on one of which rank 0 waits for the others (MASTER_PORT, too); null: any free one. NCCL
    # and gloo choose further ports by themselves.
    port_range: str | None = None
    rendezvous_timeout_s: int = 300  # how long ranks wait for each other at the start
    collective_timeout_s: int = 1800  # how long a collective may take before the job counts as hung
    # folders that only the nodes see: what a config names in them is not looked for when it is submitted
    node_paths: list[str] = field(default_factory=list)
    slurm_conf: str | None = None  # a slurm.conf other than the machine's own
    sandbox: str | None = None  # the name of a running sandbox whose slurm.conf is used

    def __post_init__(self) -> None:
        self.nodes = NodeRange.parse(self.nodes).value  # a number that comes as text, from a variable, is a number

    @property
    def node_range(self) -> NodeRange:
        """The nodes that the job may have."""
        return NodeRange.parse(self.nodes)

    @property
    def ports(self) -> PortRange | None:
        """The ports on which ranks may meet; None: any."""
        return PortRange.parse(self.port_range) if self.port_range is not None else None


@dataclass
class JobConfig:
    """The program to run, its name, and the copy of the code that it uses."""

    name: str = "train"  # name of the run's folder under runs_dir, and of the job in squeue
    # "train": the trainer of this package; "command": job.command on every rank; "prepare": text -> tokens
    kind: JobKind = JobKind.TRAIN
    # e.g. 'python my_train.py --lr 1e-3', or typed after `submit --`; split into words as a shell would. No shell runs it: each
    # rank replaces $NAME and ${NAME} for the variables that it is given (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ...,
    # SLURM_*), and nothing else; the script of an explicit shell (bash -c '...') is left to that shell.
    command: str | None = None
    # With job.command: what starts its processes. "none": srun, one process for each of cluster.tasks_per_node. "torchrun",
    # "accelerate", "deepspeed": one such launcher on each node, which starts as many, or with cluster.tasks_per_node=1 one for
    # each GPU; nodes, processes, addresses and ports are given to it.
    launcher: Launcher = Launcher.NONE
    # With job.command: the signal that tells its processes to stop, whatever the reason. "SIGTERM": those that handle SIGUSR2
    # hear that as the early warning before the time limit, as SLURM sends it. Another: SIGTERM of SLURM is ignored.
    stop_signal: StopSignal = StopSignal.SIGTERM
    # With job.command: end the command this long after it was told to stop, so that it is started again. null: shortly before
    # SLURM would kill it.
    stop_grace_s: int | None = None
    # With job.command: how to see that the command has finished: by a file (absolute, or in the run directory or the working
    # directory) that exists when the command ends, or by an exit code. null: it exits with 0 without having been told to stop.
    finished_when: str | None = None
    # With job.command: a file or pattern (as for finished_when) that the command changes when it makes progress, for instance
    # its newest checkpoint.
    progress_file: str | None = None
    # With job.command: its own checkpoints, as a pattern (found as for finished_when) such as 'out/checkpoint-*'. The newest
    # complete one is the progress; the last number in its name is the step.
    checkpoints: str | None = None
    # With job.checkpoints: names or patterns of the files that a complete one has in its folder, separated by commas or blanks,
    # such as 'trainer_state.json'. Before a restart, what is incomplete is moved aside.
    checkpoint_complete: str | None = None
    # A folder that login node and compute nodes share; relative to the folder in which submit is typed. Default: the
    # environment variable SLURMTRAIN_RUNS, else "runs".
    runs_dir: str = field(default_factory=lambda: str(runs_root()))
    # copy of the code: "auto": the git work tree, if there is one; "cwd": this folder; "none"
    snapshot: SnapshotMode = SnapshotMode.AUTO
    snapshot_max_mb: int = 64  # a larger work tree is refused: data does not belong in the snapshot
    singleton: bool = False  # wait until no other job of this name and user exists (--dependency=singleton)


@dataclass
class ParallelConfig:
    """The distribution of the model over the ranks.

    The product of the axes is the world size; one axis may be -1, which takes what the others leave.
    """

    dp_replicate: int = -1  # full copies of the model; each sees other samples
    dp_shard: int = 1  # ranks that share a copy's parameters, gradients and optimiser state (FSDP2)
    tp: int = 1  # ranks that share every matrix, on one node (tensor parallel)
    pp: int = 1  # pipeline stages; micro batches of a step go through them one after another
    cp: int = 1  # ranks that share every sequence (context parallel)
    sequence_parallel: bool = True  # with tp: also share the activations between the matrices, along the sequence
    # "all_gather": gather keys and values; "ulysses": trade parts of sequences for heads
    cp_method: CpMethod = CpMethod.ALL_GATHER
    # "1f1b" or "gpipe"; with two stages per rank: "interleaved_1f1b", "zero_bubble"
    pp_schedule: PpSchedule = PpSchedule.ONE_F_ONE_B
    # class names of the modules that FSDP2 gathers one at a time; []: the model's own choice, or by size
    units: list[str] = field(default_factory=list)
    # Free gathered parameters between forward and backward; null: yes, except with pp. A number: groups of this many shards
    # keep them.
    reshard_after_forward: bool | int | None = None
    # "bfloat16": compute in bfloat16, with FSDP2; parameters and optimiser stay float32
    param_dtype: ParamDtype | None = None
    # type in which gradients are added up; "bfloat16" halves what is sent
    reduce_dtype: ReduceDtype = ReduceDtype.FLOAT32
    # how replicas (DDP) compress gradients to exchange them: "bf16", "fp16", "powersgd"
    gradient_compression: GradientCompression = GradientCompression.NONE
    powersgd_rank: int = 4  # rank of the matrices that approximate a gradient: higher is more exact, and sends more
    powersgd_start_step: int = 100  # gradients of earlier steps are sent uncompressed
    # "full": recompute blocks in backward; "selective": all but their matmuls
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing.NONE
    compile: bool = False  # compile the model by torch.compile, block by block


@dataclass
class OptimConfig:
    """AdamW with linear warm-up and cosine decay."""

    lr: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1  # applied to matrices only, not to norms and biases
    warmup_steps: int = 20
    min_lr_ratio: float = 0.1  # the cosine ends at lr * min_lr_ratio
    grad_clip: float = 1.0  # maximum global gradient norm; 0: no clipping


@dataclass
class LoraConfig:
    """Low-rank adapters (LoRA, arXiv:2106.09685): with r > 0 only they are trained and saved, beside frozen weights."""

    r: int = 0  # rank of the adapters; 0: none, and all parameters are trained
    alpha: int = 16  # adapters are scaled by alpha / r
    dropout: float = 0.0  # probability of dropping an input of an adapter
    # names of the linear layers that get adapters, or their last parts; []: all but the one that predicts tokens
    target_modules: list[str] = field(default_factory=list)


@dataclass
class TrainConfig:
    """The length of training, its batches, and what it logs."""

    steps: int = 200  # optimiser steps
    global_batch_size: int = 16  # sequences per step over all ranks; does not change with the number of nodes
    micro_batch_size: int | None = None  # sequences per forward pass of one rank; null: its whole share of the step
    seed: int = 1234
    shuffle: bool = True  # visit the samples in another order each epoch; false: in the data's own order
    repeat: bool = True  # start another epoch when all samples were seen; false: refuse a run that would
    length_sorted_steps: int = 32  # for samples of different lengths: steps whose samples are sorted together
    data_workers: int = 0  # processes per rank that read ahead
    data_ahead: int = 2  # steps that data_workers read ahead, and that are announced to the file system
    log_every: int = 10  # steps between log lines
    eval_every: int = 100  # steps between evaluations; 0: at the end only; see `eval`
    # The update of a step whose loss or gradient norm is not finite never happens. After that: "skip": train on with the next
    # batch; "rollback": go back to the last sound checkpoint, and leave out the samples since; "stop": end the run (exit 78)
    on_nonfinite: OnNonfinite = OnNonfinite.SKIP
    max_skipped: int = 5  # after this many skipped steps in a row, go back to the last sound checkpoint; 0: never
    max_rollbacks: int = (
        2  # end the run when this many rollbacks in a row have not got it any further; 0: never go back
    )
    # a loss that is `spike_threshold` robust standard deviations above the median of the last `spike_window` steps is a
    # spike: "tell", "rollback" (as for on_nonfinite) or "ignore"
    on_spike: OnSpike = OnSpike.TELL
    spike_window: int = 100  # steps
    spike_threshold: float = 10.0  # in standard deviations, estimated by the median absolute deviation
    # "auto": a GPU if cluster.gpus_per_node is set or one is visible; "cpu"; "cuda"
    device: Device = Device.AUTO
    tensorboard: bool = True  # also write TensorBoard events; needs the extra `tensorboard`
    # Hooks of your own in the training loop, called in this order on every rank: each is a config with a _target_.
    hooks: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class CheckpointConfig:
    """The rules for when to save, what to keep, and what to verify.

    A save is due at whichever of the three comes first; a stop and the end of training also save.
    """

    every_steps: int = 50  # save after every step that is a multiple of this; 0: not by steps
    every_minutes: float = 0.0  # save when this much time has passed since the last save; 0: not by time
    auto: bool = False  # save at the interval that loses the least time (Daly 2006), by measured stall and failures
    # for auto: mean time between failures of this job; null: by nodes and observed failures
    mtbf_hours: float | None = None
    keep_last: int = 2  # number of the newest complete checkpoints to keep; at least 2
    keep_every: int = 0  # also keep those whose step is a multiple of this; 0: none for that reason
    keep_best: int = 0  # also keep this many of the best by best_metric; 0: none for that reason
    best_metric: str = "valid_loss"  # a metric of the evaluations; known for saved steps that are also evaluated
    best_mode: BestMode = BestMode.MIN  # which values of best_metric are good: "min" or "max"
    # write while training goes on; false: wait for each commit, the first failure ends the attempt
    asynchronous: bool = True
    max_failures: int = 3  # this many failed saves in a row end the attempt; 0: train on without
    # what a save does when ranks differ that should hold the same (as on GPUs of several models): "refuse": it fails and names
    # them; "warn": it reports this once and saves what the lowest rank holds, which then writes all of it
    on_replica_drift: ReplicaDrift = ReplicaDrift.REFUSE
    # compare restored files with their digests: "full", "sampled" (a 16th) or "off" (sizes only)
    verify: Verify = Verify.FULL
    mirror: str | None = None  # URL of an object store's folder; copies go to <mirror>/<job.name>/<run id>
    # A folder that each node has for itself, /dev/shm or a local disk's: every save is copied there, too, and to the next node,
    # so that a restart on the same nodes restores in seconds. In /dev/shm it takes the job's memory. null: no such copies.
    local: str | None = None
    local_every_steps: int = (
        0  # with local: also copy after every step that is a multiple of this; 0: only with each save
    )
    # Every so many steps, and at the end, also export the weights as a folder of Hugging Face, <run>/exports/step_<N>, while
    # training goes on; 0: never
    export_every_steps: int = 0
    export_dtype: ExportDtype = ExportDtype.BFLOAT16  # element type of these weights
    restore_from: str | None = None  # path of a checkpoint to start from while this run has none of its own
    # null: continue at the checkpoint's step, with its optimiser, schedule and data. "model": only its weights, at step 0.
    restore_only: RestoreOnly | None = None
    # What may differ from the checkpoint restore_from: keys, shapes, dtypes, config, data.
    allow: list[Allow] = field(default_factory=list)


@dataclass
class EvalConfig:
    """The metrics on held-out samples, computed every train.eval_every steps and at the end."""

    # "inline": training waits for it; "job": a SLURM job of its own for each due checkpoint
    mode: EvalMode = EvalMode.INLINE
    # Further sets by name, each a data config with its _target_: a data set, or a source, whose `valid` is used, else its
    # `train`. The data source's own sets are "valid" and those in its `evals`.
    sets: dict[str, Any] = field(default_factory=dict)
    # Metrics besides the loss: true or false for those of slurmtrain.training.eval_metrics, or a config of your own with a
    # _target_.
    metrics: dict[str, Any] = field(
        default_factory=lambda: {"perplexity": True, "bits_per_byte": True, "accuracy": False}
    )
    # Fields of `cluster` that differ for evaluations outside the training's own job. {}: one node, if the model fits on it.
    cluster: dict[str, Any] = field(default_factory=dict)
    # Fields of `parallel` that differ for evaluations outside the training's own job. {}: one copy of the model.
    parallel: dict[str, Any] = field(default_factory=dict)


@dataclass
class RequeueConfig:
    """The handling of a job that has stopped early.

    The modes are:

    "requeue": SLURM's requeue, same job id. Only in this mode does SLURM itself restart a job whose node has died.
    "resubmit": for clusters that forbid requeueing: the same script is submitted again as a new job.
    "chain": chain_length jobs are submitted at once; each waits for those before it and continues where they stopped.
    "off": a stopped job stays stopped; `resume RUN` continues it.
    """

    mode: RequeueMode = RequeueMode.REQUEUE  # "requeue", "resubmit", "chain" or "off"
    # After a crash, a hang or the loss of a node, start the ranks again in the same job, which keeps its nodes. A node that has
    # failed is left out if there are spare nodes (cluster.spare_nodes). null: yes, except with mode=off.
    in_place: bool | None = None
    # Keep a second process for each rank, which has loaded PyTorch and waits, so that a start in the same job takes a second or
    # two. Each takes about 0.2 GB of the node's memory, and no GPU.
    standby_ranks: bool = False
    chain_length: int = 4  # number of jobs of mode=chain; the run ends with the last of them, finished or not
    # the run ends after this many crashes or time limits in a row without progress
    max_attempts_without_progress: int = 3
    # If no progress is visible (a job.command that reports none): an attempt that lasted this long, or half the time limit if
    # that is less, may have made progress, and restarts the count of max_attempts_without_progress.
    long_attempt_min: int = 60
    # the run ends after this many such attempts that crash or reach the time limit, without visible progress
    max_unseen_attempts: int = 10
    restart_delay_s: int = 8  # SLURM holds a requeued job for about 121 s; we ask for this delay instead
    # So many attempts that a node has ended (by a crash within seconds, a hang, ...), and it is left out of the next start.
    # Broken hardware counts twice. 0: keep and read no ledger of nodes.
    blame_threshold: int = 2
    blame_expiry_h: float = 24.0  # what a node has done is forgotten after so many hours

    @property
    def starts_in_place(self) -> bool:
        """Whether the ranks may start again in the same job."""
        return self.mode != RequeueMode.OFF if self.in_place is None else self.in_place


@dataclass
class WatchdogConfig:
    """When a rank that does not get on counts as hung: the attempt is ended, and the rank that is at fault is named.

    The time without progress counts: without a step, or a batch of an evaluation. Time in which the process was
    stopped does not count, nor that in a debugger.
    """

    enabled: bool = True
    first_step_s: int = 1800  # until the first step is done (model, data, restore), and for each compilation
    factor: float = 10.0  # a step may take this many times the longest of the last 100 steps ...
    min_s: int = 600  # ... but always this long
    evaluation_s: int = 1800  # for a batch of an evaluation, and for a hook of train.hooks
    save_s: int = 1800  # for a save or restore, as long as training waits for it
    # With job.command: a file or pattern (as for job.progress_file) that the command changes as long as it gets on; $RANK in it
    # is each rank's own. The command hangs when it has not changed for min_s, and before the first change for first_step_s.
    heartbeat_file: str | None = None


@dataclass
class PreflightConfig:
    """The checks in the allocation before training: what ranks and nodes must have in common, and what each must have."""

    # "off"; "quick": facts are gathered and compared, in well under a second; "full": GPUs and network are measured, too, which
    # takes about a minute
    mode: PreflightMode = PreflightMode.QUICK
    # kinds of findings that are neither told nor end an attempt, as in [clock,packages]
    ignore: list[FindingKind] = field(default_factory=list)
    clock_offset_s: float = 5.0  # a node's clock may be so far away from those of the others
    min_free_gb: float = 0.2  # least free space where the run writes
    slow_share: float = 0.7  # with "full": what is below this share of the median is slow, a node or a link
    exclude_slow: bool = False  # with "full": start again without a node that is slow, and not only tell of it


@dataclass
class WandbConfig:
    """Weights & Biases (the extra `wandb`): one run, of the same id, over all attempts."""

    enabled: bool = False
    project: str | None = None  # null: job.name
    entity: str | None = None  # user or team that the project belongs to; null: the default of the API key
    group: str | None = None  # runs that are shown together; null: those of the sweep, if this is a point of one
    tags: list[str] = field(default_factory=list)
    # "online"; "offline": files in <run>/wandb, for `wandb sync`; "auto": online where an API key is known and the server
    # answers
    mode: WandbMode = WandbMode.AUTO


@dataclass
class MlflowConfig:
    """MLflow (the extra `mlflow`): one run over all attempts."""

    enabled: bool = False
    # where the runs are kept, such as https://mlflow.example.org; null: MLFLOW_TRACKING_URI of the ranks, else <run>/mlflow.db
    tracking_uri: str | None = None
    experiment: str | None = None  # null: job.name
    tags: dict[str, str] = field(default_factory=dict)


@dataclass
class ObserveConfig:
    """What a training measures and writes about itself, and where its numbers go besides metrics.jsonl and TensorBoard."""

    wandb: WandbConfig = field(default_factory=WandbConfig)
    mlflow: MlflowConfig = field(default_factory=MlflowConfig)
    loggers: dict[str, Any] = field(default_factory=dict)  # loggers of your own by name, each a config with a _target_
    # Folder of each node whose *.prom files the node exporter of Prometheus reads (--collector.textfile.directory). null: none
    textfile_dir: str | None = None
    # Measure how long each part of a step takes (time_*_s of metrics.jsonl); false: only whole steps
    phases: bool = True
    per_layer_every: int = 0  # steps between records of each layer's gradient and parameter norm; 0: none
    # Steps after which the ranks compare how long each part has taken them, to find one that is slow; 0: they never do
    straggler_every: int = 20
    # Steps that are profiled once, such as "100-102": traces and a snapshot of the GPU's memory in RUN/profiles. null: none
    # but those that somebody asks for by `touch RUN/profile`
    profile_steps: str | None = None
    profile_ranks: list[int] = field(default_factory=lambda: [0])  # ranks that write a profile; []: all
    # Also record a node with a slow rank in the ledger of nodes, which counts as half a reason to leave it out; see
    # requeue.blame_threshold
    blame_stragglers: bool = False


@dataclass
class HooksConfig:
    """Commands for bash: at most one after each attempt, on its first node, when all ranks have exited."""

    on_finish: str | None = None  # after the run has finished
    on_failure: str | None = None  # after a crash, a dead node, a wrong config, no progress; also if tried again
    on_preemption: str | None = None  # after an early stop by SLURM or on request; not by `cancel`, scancel or Ctrl-C
    timeout_s: int = 20  # a hook is killed after this long; SLURM kills a requeued job after KillWait, often 30 s


@dataclass
class SweepConfig:
    """The way in which the points of a sweep (`-m`) share jobs."""

    pack: int = 1  # number of runs at the same time in one array task, on the CPUs, memory and GPUs of one run


@dataclass
class SearchConfig:
    """The way in which a search (`-m hydra/sweeper=optuna`) ends trials early, and how many failures it bears."""

    # "none"; "median": a trial whose best value so far is worse than the median of the finished ones at the same step is
    # pruned; "asha": of `reduction_factor` trials that come to a rung, the best one goes on to the next rung
    pruner: Pruner = Pruner.NONE
    prune_after_steps: int = 0  # no trial is pruned before this step; asha: its first rung (0: 1 % of a finished trial)
    startup_trials: int = 5  # median: number of trials that have to finish before any is pruned
    reduction_factor: int = 4  # asha: the steps of a rung over those of the rung before, at least 2
    max_failures_in_a_row: int = 5  # trials that fail one after the other before the search ends


@dataclass
class PrepareConfig:
    """Settings of `prepare` and job=prepare: raw text -> tokenised shards, for data=prepared."""

    inputs: list[str] = field(default_factory=list)  # files, glob patterns (also **), folders with all files in them
    output: str | None = None  # the folder of the prepared data set
    # "auto": by suffix, with or without .gz/.zst; or "jsonl", "parquet", "text", "hf" for all
    format: RawFormat = RawFormat.AUTO
    text_field: str = "text"  # the field of a JSON line, or the column, that holds a document
    # "text": a record is a document; "chat": a conversation, or a question and its answer (text_field is then of no use)
    records: RecordKind = RecordKind.TEXT
    # For chat: path of a Jinja file, or "chatml"; "none" puts question and answer end to end. null: the template that lies
    # beside the tokenizer.json.
    chat_template: str | None = None
    # For chat: which targets count: all of the assistant's "answers", its "last_answer", or "all" that is said
    loss_on: LossOn = LossOn.ANSWERS
    tokenizer: str = "bytes"  # "bytes", or the path of a tokenizer.json, or of tiktoken's ranks in a file NAME.tiktoken
    tiktoken_pattern: str | None = None  # name of an encoding, or a regular expression; null: by the file's name
    bos: str | None = None  # token before each document: its id or text; null: none
    # token after each document, or "none"; null: the one that the tokenizer's file has (for bytes: 0)
    eos: str | None = None
    # size of input per shard; a kill costs a process at most that much. Compressed files stay whole
    unit_mb: float = 128.0
    # share of the documents that become the split "valid", chosen by a digest of their text
    valid_fraction: float = 0.0
    max_bad_share: float = 0.0  # share of the records that may be bad (left out, and listed in bad.jsonl)
    workers: int = 0  # processes of each task; 0: one for each CPU of the task
    # index of this part among `parts`: -m 'prepare.part=range(0,16)' prepare.parts=16 makes an array of 16
    part: int = 0
    parts: int = 1  # number of parts that share the work


@dataclass
class Config:
    """One experiment. `model` and `data` are open: they have whatever fields their `_target_` takes."""

    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    requeue: RequeueConfig = field(default_factory=RequeueConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    search: SearchConfig = field(default_factory=SearchConfig)
    prepare: PrepareConfig = field(default_factory=PrepareConfig)
    preflight: PreflightConfig = field(default_factory=PreflightConfig)
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    hooks: HooksConfig = field(default_factory=HooksConfig)
    # Environment variables that the ranks get and that are never written to disk: NAME -> "env" (of the shell that submits) or
    # "file:PATH".
    secrets: dict[str, str] = field(default_factory=dict)
    job: JobConfig = field(default_factory=JobConfig)

    @property
    def world_size(self) -> int:
        """The number of ranks of the job: nodes x tasks per node; of a range of nodes, the most."""
        return self.cluster.node_range.most * self.cluster.tasks_per_node
