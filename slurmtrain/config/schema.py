"""The schema: every field a config may have, its type, its unit and what it is for.

This is the only list of fields there is. Hydra composes into it (an unknown key or a wrong type is refused there),
`validate` checks what one field alone cannot show, and the job reads its frozen copy back into it.
It is not the place for defaults that differ between clusters or models: those are the yaml files under `conf/`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from slurmtrain.rundir import runs_root


@dataclass
class ContainerConfig:
    kind: str | None = None  # null, "pyxis" (flags on the srun line) or "apptainer" (wraps the task's command)
    image: str | None = None  # what the runtime accepts: a .sqsh or .sif file, or a registry reference
    mounts: list[str] = field(default_factory=list)  # host:container[:ro]; the run directory is always mounted
    args: list[str] = field(default_factory=list)  # further flags, one word each, passed on as they are


@dataclass
class ClusterConfig:
    """Where the job runs and what it asks for. One yaml a cluster lies under conf/cluster/."""

    backend: str = "slurm"  # "slurm", or "local": the same job as processes of this machine, in the foreground
    nodes: int = 1
    tasks_per_node: int = 1  # ranks per node; one rank drives one GPU
    cpus_per_task: int = 1
    gpus_per_node: int = 0
    gpu_type: str | None = None  # as in --gpus-per-node=TYPE:N, when the cluster has several
    gpu_memory_gb: float | None = None  # of one GPU; where it is set, a model that cannot fit is refused
    mem_per_node_gb: int | None = None  # at most one of the three mem_* fields; 0 means all of the node's memory
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
    exclusive: bool = False  # whole nodes
    sbatch: dict[str, Any] = field(
        default_factory=dict
    )  # further sbatch options by their long name; true is a bare flag
    srun_args: list[str] = field(default_factory=list)  # further srun words, after ours
    srun_wait_s: int = 60  # after the first rank left, srun kills the others when they stay longer than this
    modules: list[str] = field(default_factory=list)  # `module load` each, first of all
    setup: list[str] = field(default_factory=list)  # bash lines after the modules; one that fails stops the job (78)
    venv: str | None = None  # a virtual environment to activate
    conda_env: str | None = None  # or a conda environment, by name or path
    python: str | None = None  # the interpreter of the ranks; null: the one that submits, or `python` of the container
    container: ContainerConfig = field(default_factory=ContainerConfig)
    env: dict[str, str] = field(default_factory=dict)  # exported to every rank
    network_interface: str = "auto"  # for NCCL and gloo: a name, "auto" (the one that reaches rank 0) or "none"
    rendezvous_timeout_s: int = 300  # how long ranks wait for each other at the start
    collective_timeout_s: int = 1800  # how long a collective may take before the job is taken for hung
    slurm_conf: str | None = None  # a slurm.conf other than the machine's own
    sandbox: str | None = None  # the name of a running sandbox whose slurm.conf is used


@dataclass
class JobConfig:
    """What is run, under which name, and from which copy of the code."""

    name: str = "train"  # also the folder under runs_dir and the name in squeue
    kind: str = (
        "train"  # "train": the trainer of this package; "command": job.command on every rank; "prepare": text -> tokens
    )
    # e.g. 'python my_train.py --lr 1e-3', or typed after `submit --`; split into words as a shell would. No shell runs: each
    # rank replaces $NAME and ${NAME} of what it is given (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ..., SLURM_*), and
    # nothing else; a shell's own words (bash -c '...') are left to that shell.
    command: str | None = None
    # With job.command: when it counts as finished. A file (absolute, or in the run directory or the folder in which it runs)
    # that is there when it ends, or an exit code of its own. null: it exits with 0 and was not told to stop before.
    finished_when: str | None = None
    # With job.command: a file or pattern (as finished_when) that it changes when it has got on, such as its newest checkpoint.
    progress_file: str | None = None
    # Shared between login node and compute nodes; relative to where submit is typed. SLURMTRAIN_RUNS, else "runs".
    runs_dir: str = field(default_factory=lambda: str(runs_root()))
    snapshot: str = "auto"  # "auto": the git work tree if there is one, else run in place; "cwd": this folder; "none"
    snapshot_max_mb: int = 64  # a larger work tree is refused: data does not belong into the snapshot
    singleton: bool = False  # wait until no other job of this name and user is left (--dependency=singleton)


@dataclass
class ParallelConfig:
    """How the model is laid over the ranks. The product of the axes is the world size; one axis may be -1: what is left."""

    dp_replicate: int = -1  # full copies of the model; each sees other samples
    dp_shard: int = 1  # ranks that share a copy's parameters, gradients and optimiser state (FSDP2)
    tp: int = 1  # ranks that share every matrix, on one node (tensor parallel)
    pp: int = 1  # pipeline stages; micro batches of a step go through them one after another
    cp: int = 1  # ranks that share every sequence (context parallel)
    ep: int = 1  # ranks that share the experts of a mixture; no model here has any
    sequence_parallel: bool = True  # with tp: also share the activations between the matrices, along the sequence
    cp_method: str = "all_gather"  # "all_gather": of keys and values; "ulysses": sequences for heads and back
    pp_schedule: str = "1f1b"  # or "gpipe"; with two stages a rank: "interleaved_1f1b", "zero_bubble"
    units: list[str] = field(
        default_factory=list
    )  # class names that FSDP2 gathers at a time; []: the model's, or by size
    # Free gathered parameters until backward; null: yes, but with pp no. A number: groups of so many shards keep them.
    reshard_after_forward: bool | int | None = None
    param_dtype: str | None = None  # "bfloat16": compute in it, with FSDP2; parameters and optimiser stay float32
    reduce_dtype: str = "float32"  # in which gradients are added up; "bfloat16" halves what is sent
    gradient_compression: str = "none"  # what replicas send each other (DDP): "bf16", "fp16", "powersgd"
    powersgd_rank: int = 4  # of the matrices that stand for a gradient: fewer bytes, or more of what it says
    powersgd_start_step: int = 100  # gradients of the steps before go whole
    activation_checkpointing: str = (
        "none"  # "full": compute blocks again in backward; "selective": but for their matmuls
    )
    compile: bool = False  # torch.compile, block by block


@dataclass
class OptimConfig:
    """AdamW with linear warm-up and cosine decay."""

    lr: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1  # on matrices only; norms and biases are left alone
    warmup_steps: int = 20
    min_lr_ratio: float = 0.1  # the cosine ends at lr * min_lr_ratio
    grad_clip: float = 1.0  # maximum global gradient norm; 0: no clipping


@dataclass
class TrainConfig:
    steps: int = 200  # optimiser steps
    global_batch_size: int = 16  # sequences per step over all ranks; stays when the number of nodes changes
    micro_batch_size: int | None = None  # sequences per forward pass of one rank; null: as many as there are
    seed: int = 1234
    shuffle: bool = True  # another order each epoch; false: the data's own
    repeat: bool = True  # begin again when all samples were seen; false: a run that would is refused
    length_sorted_steps: int = 32  # for samples of different length: so many steps share theirs, sorted by length
    data_workers: int = 0  # processes per rank that read ahead
    data_ahead: int = 2  # steps that they read ahead, and of which the file system hears early
    log_every: int = 10  # steps
    eval_every: int = 100  # steps between evaluations; 0: at the end only; see `eval`
    max_nonfinite: int = 5  # so many steps in a row whose loss or gradient norm is not finite end the run; 0: none do
    device: str = "auto"  # "auto": a GPU with cluster.gpus_per_node, or where one is visible; "cpu"; "cuda"
    tensorboard: bool = True  # needs the extra `tensorboard`; said once when it is missing


@dataclass
class CheckpointConfig:
    """When to save (whichever of the three comes first; a stop and the end save by themselves), what to keep, what to trust."""

    every_steps: int = 50  # 0: not by steps
    every_minutes: float = 0.0  # 0: not by time
    auto: bool = False  # as often as loses the least time, by the measured stall and the failure rate (Daly 2006)
    mtbf_hours: float | None = (
        None  # for auto: mean time between failures of this job; null: by nodes, and what was seen
    )
    keep_last: int = 2  # complete checkpoints kept; at least 2
    keep_every: int = 0  # and those whose step is a multiple of this; 0: none for that reason
    keep_best: int = 0  # and so many of the best by best_metric; 0: none for that reason
    best_metric: str = "valid_loss"  # or another of an evaluation; of the steps that are evaluated when they are saved
    best_mode: str = "min"  # "min" or "max"
    asynchronous: bool = (
        True  # write while training goes on; false: wait for each commit, the first failure ends the attempt
    )
    max_failures: int = 3  # so many saves that fail in a row end the attempt; 0: train on without
    # When ranks that should hold the same do not: "refuse" fails the save and names them; "warn" says so once and saves the
    # lowest rank's, which then writes for the others, too (GPUs of several models differ in the last bits).
    on_replica_drift: str = "refuse"
    verify: str = "full"  # compare restored files with their digests: "full", "sampled" (a 16th) or "off" (sizes only)
    mirror: str | None = None  # URL of an object store's folder; copies go to <mirror>/<job.name>/<run id>
    restore_from: str | None = None  # a checkpoint to begin from when this run has none of its own
    # null: go on at its step, with its optimiser, schedule and place in the data. "model": its weights alone, at step 0.
    restore_only: str | None = None
    allow: list[str] = field(default_factory=list)  # what may differ from it: keys, shapes, dtypes, config, data


@dataclass
class EvalConfig:
    """What is measured on held-out samples, and where. When: train.eval_every, and at the end."""

    mode: str = "inline"  # "inline": training waits for it; "job": each due checkpoint gets a SLURM job of its own
    # Further sets by name, each a data config with its _target_: a data set, or a source, of which `valid` is taken, else
    # `train`. The data source's own are "valid" and those in its `evals`.
    sets: dict[str, Any] = field(default_factory=dict)
    # Besides the loss: true or false for those of slurmtrain.training.measures, or a config of your own with its _target_.
    metrics: dict[str, Any] = field(
        default_factory=lambda: {"perplexity": True, "bits_per_byte": True, "accuracy": False}
    )
    # Of evaluations that are not made by the training itself: what differs from the training's cluster and parallel.
    cluster: dict[str, Any] = field(default_factory=dict)  # without: one node, if the model's ranks fit on it
    parallel: dict[str, Any] = field(default_factory=dict)  # without: one copy of the model


@dataclass
class RequeueConfig:
    """What happens after a job has stopped early. Modes:

    "requeue": SLURM's requeue, same job id. Only here SLURM itself starts a job again whose node has died.
    "resubmit": where requeueing is forbidden: the same script is submitted again as a new job.
    "chain": chain_length jobs are submitted at once, each waits for those before it and goes on where they stopped.
    "off": a stopped job stays stopped; `resume RUN` continues it.
    """

    mode: str = "requeue"
    chain_length: int = 4  # jobs of mode=chain; the run ends with the last of them, finished or not
    max_attempts_without_progress: int = 3  # crashes or time limits in a row, nothing new between: then it ends
    # Where no progress is visible (a job.command that reports none): an attempt that lasted so long, or half the time limit if
    # that is less, may have got on: it starts the count of max_attempts_without_progress afresh.
    long_attempt_min: int = 60
    max_unseen_attempts: int = (
        10  # so many such attempts that crash or reach the time limit, and no progress: then it ends
    )
    restart_delay_s: int = 8  # SLURM holds a requeued job for about 121 s; it is asked for this delay instead


@dataclass
class HooksConfig:
    """Commands for bash, at most one after each attempt, on its first node, when its ranks have left and it is judged."""

    on_finish: str | None = None  # the run has finished
    on_failure: str | None = None  # a crash, a dead node, a wrong config, no progress; tried again or not
    on_preemption: str | None = None  # stopped early by SLURM or on request; not by `cancel`, scancel or Ctrl-C
    timeout_s: int = 20  # then all its processes are killed; SLURM kills a requeued job after KillWait, often 30 s


@dataclass
class SweepConfig:
    """How the points of a sweep (`-m`) share jobs."""

    pack: int = 1  # so many runs at the same time in one array task, on the CPUs, memory and GPUs of one run


@dataclass
class PrepareConfig:
    """`prepare` and job=prepare: raw text -> tokenised shards, for data=prepared."""

    inputs: list[str] = field(default_factory=list)  # files, glob patterns (** too), folders with all that is in them
    output: str | None = None  # the folder of the prepared data set
    format: str = "auto"  # by suffix, with or without .gz/.zst; or "jsonl", "parquet", "text", "hf" for all inputs
    text_field: str = "text"  # of a JSON line, or the column, that holds a document
    tokenizer: str = "bytes"  # or the path of a tokenizer.json, or of tiktoken's ranks in a file NAME.tiktoken
    tiktoken_pattern: str | None = None  # an encoding's name or a regular expression; null: by the file's name
    bos: str | None = None  # before each document: a token's id or text; null: none
    eos: str | None = None  # after each document; "none"; null: the one that the tokenizer's file has (of bytes: 0)
    unit_mb: float = 128.0  # of input, one shard of each split; what a kill may cost a process. Packed files stay whole
    valid_fraction: float = 0.0  # of the documents, by a digest of their text, that become the split "valid"
    max_bad_share: float = 0.0  # of the records that may be bad (left out, and listed in bad.jsonl)
    workers: int = 0  # processes of each task; 0: one a CPU that the task has
    part: int = 0  # which of `parts` this is: -m 'prepare.part=range(0,16)' prepare.parts=16 makes an array of 16
    parts: int = 1


@dataclass
class Config:
    """One experiment. `model` and `data` are open: whatever `_target_` takes."""

    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    requeue: RequeueConfig = field(default_factory=RequeueConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    prepare: PrepareConfig = field(default_factory=PrepareConfig)
    hooks: HooksConfig = field(default_factory=HooksConfig)
    # Environment variables that the ranks get and nobody writes down: NAME -> "env" (of the shell that submits) or "file:PATH".
    secrets: dict[str, str] = field(default_factory=dict)
    job: JobConfig = field(default_factory=JobConfig)

    @property
    def world_size(self) -> int:
        """Ranks of the job: nodes x tasks per node."""
        return self.cluster.nodes * self.cluster.tasks_per_node
