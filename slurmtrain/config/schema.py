"""The schema: every field that a config may have, with its type, unit and meaning.

This is the only list of fields. `fields.typed` builds it from plain values and checks each field by its type and range,
`rules` checks what involves several fields, and the job reads its frozen config back into it. Defaults that differ
between clusters or models do not belong here but in the yaml files under `conf/`.
"""

# No `from __future__ import annotations`: the types of the fields are read whenever a config is built, and as text each
# of them would have to be compiled first.
from typing import Annotated, Any, get_args

from msgspec import Struct, field

from slurmtrain import choices
from slurmtrain.config.fields import LINES, NodeRange, Pattern, Range, Share, ports_of
from slurmtrain.system.paths import runs_root

VARIABLE = Pattern("[A-Za-z_][A-Za-z0-9_]*", "a valid name of an environment variable", "e.g. NCCL_DEBUG")
JOB_NAME = Pattern(
    "[A-Za-z0-9][A-Za-z0-9._+-]{0,63}",
    "a name of at most 64 letters, digits and . _ + - that starts with a letter or digit",
    "the name is used for a folder and in squeue",
)
SBATCH_OPTION = Pattern(
    "[a-z0-9]+(-[a-z0-9]+)*",
    "a long option of sbatch",
    "use the name from `man sbatch`, without the leading dashes: +cluster.sbatch.mail-type=END",
)
EVALUATION_SET = Pattern(
    "(?!valid$)[A-Za-z0-9_]+",
    "a valid name of a set",
    "letters, digits and _; `valid` is the set of the data source",
)
LOGGER = Pattern(
    "(?!(wandb|mlflow|textfile)$)[A-Za-z0-9_]+",
    "a valid name of a logger",
    "letters, digits and _; observe.wandb.enabled=true and observe.mlflow.enabled=true are the built-in ones",
)
NODE_FOLDER = Pattern("/.*", "an absolute path", "name a folder that is there on each node, such as /dev/shm")
STAGE_DIR = Pattern(
    r'(/|\$[A-Za-z_]\w*(?=/|$))[^$`"\\]*',
    "a folder on a node",
    "an absolute path such as /local/scratch, or a variable of the job such as $SLURM_TMPDIR",
)
PROJECT = Pattern(
    r"(?=.*\S)[^/\\#?%:]+",
    r"a name of a project: Weights & Biases allows none of / \ # ? % : in it",
    "the user or team before the / is observe.wandb.entity; null takes job.name",
)
KUBERNETES_NAME = Pattern(
    r"(?=.{1,253}$)[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*",
    "a name as Kubernetes has them (RFC 1123)",
    "small letters, digits, dashes and dots, with a letter or digit before and after each dot and at both ends",
)
KUBERNETES_LABEL = Pattern(
    "([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?",
    "a value of a label as Kubernetes has them",
    "at most 63 letters, digits, dashes, dots and underscores, with a letter or digit at both ends",
)
QUANTITY = Pattern(
    r"(?=.*[1-9])(\d+\.?\d*|\.\d+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?\d+)?",
    "a quantity as Kubernetes has them",
    "a number above 0, with a unit if it needs one: 8, 500m, 0.5, 2Gi",
)
SECRET_KEY = Pattern(
    "[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[A-Za-z0-9._-]+",
    "a key of a Secret",
    "write it as SECRET/KEY, such as wandb/api-key",
)
NOT_BLANK = Pattern(r"(?s).*\S.*", "filled in", "null leaves it out")
Natural = Annotated[int, Range(0)]
Positive = Annotated[int, Range(1)]
PositiveFloat = Annotated[float, Range(above=0)]
Lines = Annotated[str, LINES]
Text = Annotated[str, NOT_BLANK]
Program = Annotated[str, LINES, NOT_BLANK]
Beta = Annotated[float, Range(0, below=1)]
Seconds = Annotated[int, Range(1, hint="watchdog.enabled=false watches nothing")]
# What no person has set, and follows train.steps: `Config` puts the number in its place.
OPEN: Any = None


class ContainerConfig(Struct):
    """The container that the ranks run in, if any."""

    # null: none; "pyxis" (options of srun); "apptainer" (wraps the command of each rank)
    kind: choices.ContainerKind | None = None
    image: str | None = None  # any image that the runtime accepts: a .sqsh or .sif file, or a registry reference
    mounts: list[str] = []  # each as host:container[:ro]; the run directory is always mounted
    # additional options of the runtime, one word each, passed on unchanged
    args: list[str] = []


class StageConfig(Struct):
    """Files that each node copies to local storage before the ranks start, so that the ranks import and read them there.

    Each node copies once, however many ranks it has. The copies are removed when the job ends.
    """

    code: bool = False  # the run's snapshot of the code
    # the virtual or conda environment of the ranks; packed into one archive at its first use, and again after changes
    environment: bool = False
    data: list[str] = []  # files and folders; data sources that name them read the copies
    # Local folder on each node; may begin with a variable of the job, as in $SLURM_TMPDIR. null: $TMPDIR, or else /tmp
    dir: Annotated[str, STAGE_DIR] | None = None
    # Time limit of copying; the ranks of nodes that have not finished by then use the shared folders
    limit_min: Positive = 30

    @property
    def wanted(self) -> bool:
        """Whether there is anything to copy."""
        return self.code or self.environment or bool(self.data)


class PodsConfig(Struct):
    """The pods of a run on Kubernetes (cluster.backend=kubernetes, or a manifest of `render --target`), one on each node."""

    # The kind of object that `submit` creates: "jobset", "trainjob" or "rayjob"
    target: choices.Target = choices.Target.JOBSET
    image: Text | None = None  # image with Python and slurmtrain in it
    pull_policy: choices.PullPolicy = choices.PullPolicy.ABSENT
    namespace: Annotated[str, KUBERNETES_NAME] | None = None  # null: that of kubectl's current context
    # Folders of the pods: path -> the name of a PersistentVolumeClaim, or any source as in the spec of a pod, such as
    # {hostPath: {path: /lustre}}; with subPath or readOnly: {claim: NAME, subPath: data, readOnly: true}. One of them, which
    # all pods and this machine share, has to contain job.runs_dir under the path that it has here.
    volumes: dict[Annotated[str, NODE_FOLDER], Any] = {}
    # Kueue's LocalQueue, which starts all pods together, or none; null: pods start one by one, as nodes get free
    queue: Annotated[str, KUBERNETES_NAME] | None = None
    gpu_resource: Text = "nvidia.com/gpu"  # the resource that cluster.gpus_per_node counts
    # More resources of each pod, as request and limit: {rdma/hca: 1, ephemeral-storage: 200Gi}. `cpu` and `memory` take the
    # place of what follows from cpus_per_task and mem_*_gb.
    resources: dict[str, Annotated[str, QUANTITY]] = {}
    shm_gb: Natural = 16  # size of /dev/shm, which counts as memory of the pod: data workers and NCCL use it; 0: 64 MB
    host_network: bool = False  # use the network of the node, which some set-ups of RDMA need
    node_selector: dict[str, Annotated[str, KUBERNETES_LABEL]] = {}
    tolerations: list[dict[str, Any]] = []
    # more labels of all objects and pods
    labels: dict[str, Annotated[str, KUBERNETES_LABEL]] = {}
    annotations: dict[str, str] = {}  # annotations of all objects and pods
    # Environment variables from Secrets: NAME -> SECRET/KEY
    secrets: dict[Annotated[str, VARIABLE], Annotated[str, SECRET_KEY]] = {}
    # Group that owns the volumes, where their driver needs one; null: their files stay as they are
    fs_group: Natural | None = None
    # Seconds from SIGTERM to SIGKILL; null: cluster.signal_lead_s, in which a step and a save have to fit, and 30 s more
    grace_s: Positive | None = None
    # Restarts that Kubernetes counts: pods that were lost, or could not start Python. What ends a run that crashes again and
    # again is requeue.max_attempts_without_progress, as everywhere.
    max_restarts: Natural = 20
    ttl_s: Natural | None = None  # delete the object and its pods this long after the end; null: they stay
    # Anything else in the spec of a pod, merged over what is there: {priorityClassName: high, serviceAccountName: train}
    spec: dict[str, Any] = {}
    # The same for its container: {envFrom: [...], securityContext: {...}}; `env` adds to what is there
    container: dict[str, Any] = {}
    # The same for the object that `submit` creates, or SkyPilot's task: {spec: {activeDeadlineSeconds: 86400}}
    object: dict[str, Any] = {}


class ClusterConfig(Struct):
    """The cluster that the job runs on and the resources that it requests; one yaml file per cluster in conf/cluster/."""

    # "slurm"; "local": run the same job as processes on this machine, in the foreground; or "kubernetes"
    backend: choices.Backend = choices.Backend.SLURM
    # A number, or a range such as 2-4: as many nodes of it as SLURM can give. The global batch size does not change, so
    # a number of nodes that cannot divide it is not used: the ranks run on the next smaller one that can.
    nodes: Annotated[int | str, NodeRange.parse] = 1
    # Additional nodes of the job, on which no rank runs until another node fails: see requeue.in_place.
    spare_nodes: Natural = 0
    tasks_per_node: Positive = 1  # ranks per node; one rank drives one GPU
    cpus_per_task: Positive = 1
    gpus_per_node: Natural = 0
    gpu_type: str | None = None  # GPU type as in --gpus-per-node=TYPE:N, if the cluster has several types
    # memory of one GPU; if set, a model that cannot fit is refused
    gpu_memory_gb: Annotated[float, Range(1, hint="null does not look whether it fits")] | None = None
    # Peak dense TFLOP/s of a GPU (or of a rank on CPUs) in the data type of the computation, as the reference for mfu.
    # null: from the data sheet of the GPU, if it is known
    peak_tflops: Annotated[float, Range(above=0, hint="dense TFLOP/s of one GPU, such as 989.4")] | None = None
    # For `plan`: bandwidth from a GPU to the others of its node, one way; null: by gpu_type
    gpu_link_gb_per_s: PositiveFloat | None = None
    # For `plan`: network bandwidth of a node, all adapters together, one way (8 x 400 Gbit/s: 400); null: by gpu_type
    network_gb_per_s: PositiveFloat | None = None
    # For `plan`: write bandwidth of all nodes together to the file system of the checkpoints; null: 1 per node
    storage_gb_per_s: PositiveFloat | None = None
    # For `plan` and checkpoint.auto, unless checkpoint.mtbf_hours is set. 6.5 was published for a large cluster
    # (arXiv:2410.21680).
    failures_per_1000_node_days: PositiveFloat = 6.5
    mem_per_node_gb: Natural | None = None  # set at most one of the three mem_* fields; 0: all memory of the node
    mem_per_cpu_gb: Positive | None = None
    mem_per_gpu_gb: Positive | None = None
    time_limit_min: Positive = 60
    # send the early warning (SIGUSR2) this long before the time limit; SLURM may send it up to 60 s earlier
    signal_lead_s: Natural = 120
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    exclude: str | None = None  # nodes that the job must not get, as a SLURM node list
    exclusive: bool = False  # let no other job run on the job's nodes
    # additional sbatch options by their long name; only sbatch validates them. true: an option without a value
    sbatch: dict[Annotated[str, SBATCH_OPTION], Any] = {}
    srun_args: list[str] = []  # additional arguments of srun, appended to ours
    srun_wait_s: Natural = 60  # srun kills ranks that are still alive this long after the first rank exited
    modules: list[str] = []  # modules to load with `module load`, before anything else
    # bash lines that run after the modules are loaded, and may use $SLURMTRAIN_RUN_DIR; if one fails, no rank starts (code 78)
    setup: list[Lines] = []
    venv: str | None = None  # virtual environment to activate
    conda_env: str | None = None  # conda environment to activate instead, by name or path
    # Python interpreter of the ranks; null: the one that runs submit, or `python` in the container
    python: str | None = None
    container: ContainerConfig = field(default_factory=ContainerConfig)
    stage: StageConfig = field(default_factory=StageConfig)
    pods: PodsConfig = field(default_factory=PodsConfig)
    env: dict[Annotated[str, VARIABLE], str] = {}  # environment variables of every rank
    network_interface: str = "auto"  # for NCCL and gloo: a name, "auto" (the one that reaches rank 0) or "none"
    # Range of TCP ports, such as 29000-29100, for the rendezvous at rank 0 and for MASTER_PORT; null: any free port.
    # NCCL and gloo choose their own ports in addition.
    port_range: Annotated[str, ports_of] | None = None
    rendezvous_timeout_s: Positive = 300  # how long ranks wait for each other at the start
    collective_timeout_s: Positive = 1800  # how long a collective may take before the job counts as hung
    # folders that exist only on compute nodes; `submit` does not check paths of the config that are inside them
    node_paths: list[str] = []
    slurm_conf: str | None = None  # a slurm.conf to use instead of the machine's own
    sandbox: str | None = None  # name of a running sandbox whose slurm.conf to use

    @property
    def node_range(self) -> NodeRange:
        """The range of the number of nodes."""
        return NodeRange.parse(self.nodes)

    @property
    def ports(self) -> range | None:
        """The ports for the rendezvous; None: any."""
        return ports_of(self.port_range) if self.port_range is not None else None


class JobConfig(Struct):
    """The program to run, its name, and the snapshot of the code that it uses."""

    name: Annotated[str, JOB_NAME] = "train"  # name of the run's folder in runs_dir, and of the job in squeue
    # "train": the built-in trainer; "command": job.command on every rank; "prepare": turn text into tokens
    kind: choices.JobKind = choices.JobKind.TRAIN
    # The program, as in 'python my_train.py --lr 1e-3'; set by the words after `submit --`. It is split into words as a
    # shell would, but not run in a shell: each rank replaces $NAME and ${NAME} only for the variables that it is given
    # (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ..., SLURM_*). The script of an explicit shell (bash -c '...') is left
    # to that shell. In the words after `submit --`, ${optim.lr} is that field of the config, and ${lr} what +lr=1e-3 sets.
    command: Lines | None = None
    # What ${NAME} stands for in the words after `submit --`; set by +NAME=VALUE, also with choices in a sweep.
    args: dict[str, str] = {}
    # With job.command: the signal that tells its processes to stop, whatever the reason. With "SIGTERM", processes that
    # handle SIGUSR2 get that as the early warning before the time limit. With another signal, they ignore the SIGTERM
    # of SLURM.
    stop_signal: choices.StopSignal = choices.StopSignal.SIGTERM
    # With job.command: kill the command this long after it was told to stop, so that it can be started again. null:
    # shortly before SLURM would kill it.
    stop_grace_s: Annotated[int, Range(1, hint="null is as long as SLURM allows")] | None = None
    # With job.command: how to tell that the command has finished: a file (an absolute path, or one in the run directory
    # or the working directory) that exists when the command ends, or an exit code. null: it exits with 0 without being
    # told to stop.
    finished_when: Text | None = None
    # With job.command: a pattern (located like finished_when) that matches its own checkpoints, such as
    # 'out/checkpoint-*'. The newest complete one shows the progress; the last number in its name is the step.
    checkpoints: Text | None = None
    # With job.checkpoints: names or patterns of the files that a complete checkpoint contains, separated by commas or
    # spaces, such as 'trainer_state.json'. Incomplete checkpoints are moved aside before a restart.
    checkpoint_complete: Text | None = None
    # Folder of the runs, which login node and compute nodes must share; relative to the folder where you run submit.
    # Default: the environment variable SLURMTRAIN_RUNS, or else "runs".
    runs_dir: str = field(default_factory=lambda: str(runs_root()))
    # what to copy as the snapshot of the code: "auto": the git work tree, if any; "cwd": the current folder; "none"
    snapshot: choices.SnapshotMode = choices.SnapshotMode.AUTO
    snapshot_max_mb: Positive = 64  # a larger work tree is refused, since data does not belong in the snapshot
    singleton: bool = False  # wait until you have no other job with this name (--dependency=singleton)


class ParallelConfig(Struct):
    """How the model is distributed over the ranks.

    The product of the axes is the world size. One axis may be -1: it gets the ranks that the others leave.
    """

    dp_replicate: int = -1  # number of replicas of the model; each processes different samples
    dp_shard: int = 1  # ranks over which each replica's parameters, gradients and optimiser state are sharded (FSDP2)
    tp: int = 1  # ranks over which every matrix is split, on one node (tensor parallel)
    pp: int = 1  # number of pipeline stages, which the micro batches of a step pass through in turn
    cp: int = 1  # ranks over which every sequence is split (context parallel)
    sequence_parallel: bool = True  # with tp: also split the activations between the matrices along the sequence
    # "all_gather": gather keys and values; "ulysses": all-to-all between parts of sequences and heads
    cp_method: choices.CpMethod = choices.CpMethod.ALL_GATHER
    # "1f1b" or "gpipe"; with two stages per rank: "interleaved_1f1b", "zero_bubble"
    pp_schedule: choices.PpSchedule = choices.PpSchedule.ONE_F_ONE_B
    # class names of the modules that FSDP2 wraps as units; []: chosen by the model, or what its lists hold
    units: list[str] = []
    # Free gathered parameters between forward and backward; null: yes, except with pp. A number: keep them sharded over
    # groups of this many ranks.
    reshard_after_forward: bool | int | None = None
    # "bfloat16": compute in bfloat16 (FSDP2 only); parameters and optimiser state stay float32
    param_dtype: choices.ParamDtype | None = None
    # data type of the gradient reduction; "bfloat16" halves the communication
    reduce_dtype: choices.ReduceDtype = choices.ReduceDtype.FLOAT32
    # "full": recompute whole blocks in backward; "selective": recompute all but their matmuls
    activation_checkpointing: choices.ActivationCheckpointing = choices.ActivationCheckpointing.NONE
    compile: bool = False  # compile the model with torch.compile, block by block


class OptimConfig(Struct):
    """AdamW with linear warm-up and cosine decay."""

    lr: Annotated[float, Range(above=0, hint="for example optim.lr=3e-4")] = 3e-3
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: Annotated[float, Range(0)] = 1e-8
    weight_decay: Annotated[float, Range(0)] = 0.1  # applied to matrices only, not to norms and biases
    warmup_steps: Annotated[Natural, Share(0.06, most=2000)] = OPEN
    min_lr_ratio: Annotated[float, Range(0, 1)] = 0.1  # the cosine ends at lr * min_lr_ratio
    grad_clip: Annotated[float, Range(0)] = 1.0  # maximum global gradient norm; 0: no clipping


class LoraConfig(Struct):
    """Low-rank adapters (LoRA, arXiv:2106.09685): with r > 0 only they are trained and saved; the model is frozen."""

    r: Natural = 0  # rank of the adapters; 0: no adapters, all parameters are trained
    # the output of the adapters is scaled by alpha / r
    alpha: Annotated[int, Range(1, hint="for example twice lora.r")] = 16
    dropout: Annotated[float, Range(0, below=1)] = 0.0  # dropout probability on the input of the adapters
    # names of the linear layers that get adapters, or their last components; []: all except the output projection
    target_modules: list[str] = []


class TrainConfig(Struct):
    """The length of training, its batches, and what it logs."""

    steps: Positive = 200  # optimiser steps
    global_batch_size: Positive = 16  # sequences per step over all ranks, independent of the number of nodes
    # sequences per forward pass of one rank; null: the rank's whole share of the step
    micro_batch_size: Positive | None = None
    seed: Natural = 1234
    shuffle: bool = True  # use a different order of samples in each epoch; false: the order of the data
    repeat: bool = True  # start another epoch when all samples have been seen; false: refuse a run that would need to
    data_workers: Natural = 0  # data loader processes per rank that read ahead
    log_every: Annotated[Positive, Share(0.02, most=10)] = OPEN  # steps between log lines
    # steps between evaluations; 0: only at the end; see `eval`
    eval_every: Annotated[Natural, Share(0.25, most=500)] = OPEN
    # A step whose loss or gradient norm is not finite never updates the model. After such a step: "skip": continue with
    # the next batch; "rollback": go back to the last valid checkpoint and skip the samples since; "stop": end the run
    # (exit code 78)
    on_nonfinite: choices.OnNonfinite = choices.OnNonfinite.SKIP
    max_skipped: Natural = 5  # after this many skipped steps in a row, go back to the last valid checkpoint; 0: never
    # end the run after this many rollbacks in a row without further progress; 0: never go back
    max_rollbacks: Natural = 2
    # "auto": a GPU if cluster.gpus_per_node is set or one is visible; "cpu"; "cuda"
    device: choices.Device = choices.Device.AUTO
    # Use only kernels that give the same bits each time, so that a resumed run on GPUs equals an uninterrupted one to the
    # last bit; somewhat slower on GPUs. false: some GPU kernels add in the order in which their threads finish
    deterministic: bool = False
    tensorboard: bool = True  # also write TensorBoard events; needs the extra `tensorboard`
    # Your own hooks in the training loop, called in this order on every rank; each is a config with a _target_.
    hooks: list[dict[str, Any]] = []


class CheckpointConfig(Struct):
    """When to save, what to keep, and what to verify.

    A save is due at whichever of the three intervals ends first. A stop and the end of training also save.
    """

    # save after every step that is a multiple of this; 0: not by steps
    every_steps: Annotated[Natural, Share(0.2, most=100)] = OPEN
    # save when this much time has passed since the last save; 0: not by time
    every_minutes: Annotated[float, Range(0)] = 0.0
    # save at the interval that loses the least time (Daly 2006), given the measured stall and failures
    auto: bool = False
    # for auto: mean time between failures of this job; null: from the number of nodes and the observed failures
    mtbf_hours: Annotated[float, Range(above=0, hint="null goes by the number of nodes")] | None = None
    # number of newest complete checkpoints to keep; at least 2
    keep_last: Annotated[int, Range(2, hint="one good checkpoint must be left while the next is checked")] = 2
    keep_every: Natural = 0  # also keep checkpoints whose step is a multiple of this; 0: off
    keep_best: Natural = 0  # also keep this many checkpoints that are best by best_metric; 0: off
    best_metric: str = "valid_loss"  # a metric of the evaluations; known for saved steps that are also evaluated
    # whether a lower ("min") or higher ("max") best_metric is better
    best_mode: choices.BestMode = choices.BestMode.MIN
    max_failures: Natural = 3  # end the attempt after this many failed saves in a row; 0: continue without checkpoints
    # URL of a folder in an object store; checkpoints are copied to <mirror>/<job.name>/<run id>
    mirror: str | None = None
    # Node-local folder, in /dev/shm or on a local disk: the newest checkpoint is also copied there, so that a restart on
    # the same nodes reads it in seconds. Copies in /dev/shm count as memory of the job. null: no such copies.
    local: Annotated[str, NODE_FOLDER] | None = None
    # path of a checkpoint to start from, as long as this run has no checkpoint of its own
    restore_from: str | None = None
    # null: continue at the checkpoint's step, with its optimiser, schedule and data. "model": use only its weights, at
    # step 0.
    restore_only: choices.RestoreOnly | None = None
    # What may differ from the checkpoint: keys, dtypes, config, data.
    allow: list[choices.Allow] = []


class EvalConfig(Struct):
    """Metrics on held-out samples, computed every train.eval_every steps and at the end."""

    # "inline": training waits for the evaluation; "job": a separate SLURM job evaluates each due checkpoint
    mode: choices.EvalMode = choices.EvalMode.INLINE
    # Additional evaluation sets by name, each a data config with a _target_: a data set, or a source, of which `valid`
    # is used, or else `train`. The set of the data source itself is "valid".
    sets: dict[Annotated[str, EVALUATION_SET], Any] = {}
    # Metrics in addition to the loss: true or false for those in slurmtrain.training.evaluation, or a config with a
    # _target_ for your own.
    metrics: dict[str, Any] = field(
        default_factory=lambda: {"perplexity": True, "bits_per_byte": True, "accuracy": False}
    )
    # Fields of `cluster` that differ for evaluations in a job of their own. {}: one node, if the model fits on it.
    cluster: dict[str, Any] = {}
    # Fields of `parallel` that differ for evaluations in a job of their own. {}: one copy of the model.
    parallel: dict[str, Any] = {}


class RequeueConfig(Struct):
    """What happens to a job that has stopped early.

    The modes are:

    "requeue": SLURM requeues the job under the same job ID. Only this mode lets SLURM restart a job whose node died.
    "resubmit": the same script is submitted again as a new job, for clusters that forbid requeueing.
    "chain": chain_length jobs are submitted at once; each waits for the ones before it and continues where they stopped.
    "off": a stopped job stays stopped; `resume RUN` continues it.
    """

    mode: choices.RequeueMode = choices.RequeueMode.REQUEUE  # "requeue", "resubmit", "chain" or "off"
    # After a crash, a hang or the loss of a node, restart the ranks within the same job, which keeps its nodes. A
    # failed node is replaced if there are spare nodes (cluster.spare_nodes). null: yes, except with mode=off.
    in_place: bool | None = None
    # with mode=chain: number of jobs; the run ends with the last of them, finished or not
    chain_length: Annotated[int, Range(2, hint="requeue=off submits a single job")] = 4
    # end the run after this many crashes or time limits in a row without progress
    max_attempts_without_progress: Positive = 3
    # If no progress is visible (a job.command that reports none): an attempt that lasted this long, or half the time
    # limit if that is shorter, may have made progress, so it resets the count for max_attempts_without_progress.
    long_attempt_min: Positive = 60
    # end the run after this many such attempts that crash or reach the time limit without visible progress
    max_unseen_attempts: Positive = 10
    restart_delay_s: Natural = 8  # delay before a requeued job may start; SLURM's own is about 121 s
    # Exclude a node from the next start after this many attempts that failed because of it (a crash within seconds, a
    # hang, ...). Broken hardware counts twice. 0: neither write nor read the ledger of nodes.
    blame_threshold: Natural = 2
    # forget the incidents of a node after this many hours
    blame_expiry_h: Annotated[float, Range(above=0, hint="requeue.blame_threshold=0 keeps no ledger of nodes")] = 24.0

    @property
    def starts_in_place(self) -> bool:
        """Whether the ranks may start again in the same job."""
        return self.mode != choices.RequeueMode.OFF if self.in_place is None else self.in_place


class WatchdogConfig(Struct):
    """When a rank that makes no progress counts as hung. The attempt then ends, and the rank at fault is named.

    What counts is the time without progress: without a step, or without a batch of an evaluation. Time in which the
    process was stopped does not count. Set enabled=false to debug it.
    """

    enabled: bool = True
    first_step_s: Seconds = 1800  # time-out of the first step (including model, data, restore), and of each compilation
    # a step may take this many times as long as the longest of the last 100 steps, ...
    factor: Annotated[float, Range(1, hint="watchdog.enabled=false watches nothing")] = 10.0
    min_s: Seconds = 120  # ... but in any case this long
    evaluation_s: Seconds = 1800  # time-out of a batch of an evaluation, and of a hook of train.hooks
    save_s: Seconds = 1800  # time-out of a save or restore that training waits for
    # after the first step, a rank that others wait for counts as hung if no heartbeat has come from it for this long,
    # whatever it was doing; a call that holds Python's interpreter lock for longer needs more
    silent_s: Seconds = 60
    # time-out of your own loop, whose evaluations cannot be told apart: with slurmtrain.init(watchdog=True)
    program_s: Seconds = 600


class PreflightConfig(Struct):
    """Checks in the allocation before training: whether the ranks and nodes are consistent, and whether each is healthy."""

    # "off"; "quick": collect facts and compare them, in well under a second; "full": also measure GPUs and network,
    # which takes about a minute
    mode: choices.PreflightMode = choices.PreflightMode.QUICK
    # kinds of findings that are ignored, as in [clock,packages]
    ignore: list[choices.FindingKind] = []
    # largest allowed offset of a node's clock from the others
    clock_offset_s: Annotated[float, Range(above=0, hint="preflight.ignore=[clock] ignores clocks")] = 5.0
    min_free_gb: Annotated[float, Range(0)] = 0.2  # smallest allowed free space where the run writes
    # with "full": a node or link below this share of the median counts as slow
    slow_share: Annotated[float, Range(above=0, below=1, hint="a share of the median, such as 0.7")] = 0.7
    exclude_slow: bool = False  # with "full": start again without slow nodes, rather than only reporting them


class WandbConfig(Struct):
    """Weights & Biases (the extra `wandb`): one W&B run with the same ID over all attempts."""

    enabled: bool = False
    project: Annotated[str, PROJECT] | None = None  # null: job.name
    entity: str | None = None  # user or team that owns the project; null: the default of the API key
    group: str | None = None  # group in which W&B shows the run; null: the sweep, if the run is a point of one
    tags: list[str] = []
    # "online"; "offline": files in <run>/wandb, for `wandb sync`; "auto": online if an API key is known and the server
    # answers
    mode: choices.WandbMode = choices.WandbMode.AUTO


class MlflowConfig(Struct):
    """MLflow (the extra `mlflow`): one MLflow run over all attempts."""

    enabled: bool = False
    # tracking server, such as https://mlflow.example.org; null: MLFLOW_TRACKING_URI of the ranks, or else
    # <run>/mlflow.db
    tracking_uri: str | None = None
    experiment: Text | None = None  # null: job.name
    tags: dict[str, str] = {}


class ObserveConfig(Struct):
    """What a training measures about itself, and where its numbers go in addition to metrics.jsonl and TensorBoard."""

    wandb: WandbConfig = field(default_factory=WandbConfig)
    mlflow: MlflowConfig = field(default_factory=MlflowConfig)
    # your own loggers by name, each a config with a _target_
    loggers: dict[Annotated[str, LOGGER], Any] = {}
    # Folder on rank 0's node from which Prometheus's node exporter reads *.prom files
    # (--collector.textfile.directory), with the extra `prometheus`. null: none
    textfile_dir: Annotated[str, NODE_FOLDER] | None = None
    # Measure how long each phase of a step takes (time_*_s in metrics.jsonl); false: only whole steps
    phases: bool = True
    # Steps between comparisons of how long each phase takes on each rank, to find slow ranks; 0: never
    straggler_every: Natural = 20
    profile_ranks: list[int] = field(default_factory=lambda: [0])  # ranks that write a profile; []: all


class HooksConfig(Struct):
    """Bash commands: at most one of them runs after each attempt, on its first node, when all ranks have exited."""

    on_finish: Program | None = None  # after the run has finished
    # after a crash, a dead node, a wrong config or no progress, even if the run starts again
    on_failure: Program | None = None
    # after an early stop by SLURM or on request, but not by `cancel`, scancel or Ctrl-C
    on_preemption: Program | None = None
    timeout_s: Positive = 20  # kill a hook after this long; SLURM kills a requeued job after KillWait, often 30 s


class SweepConfig(Struct):
    """How the points of a sweep (`-m`) share jobs."""

    # number of runs that share one array task at the same time, with the CPUs, memory and GPUs of one run
    pack: Positive = 1


class SearchConfig(Struct):
    """How a search (`-m hydra/sweeper=optuna`) prunes trials, and how many failures it tolerates."""

    # "none"; "median": prune a trial whose best value so far is worse than the median of the finished trials at the
    # same step; "asha": the best of every `reduction_factor` trials that reach a rung continues to the next rung
    pruner: choices.Pruner = choices.Pruner.NONE
    prune_after_steps: Natural = 0  # prune no trial before this step; asha: the first rung (0: 1 % of a finished trial)
    startup_trials: Positive = 5  # median: number of trials that must finish before any is pruned
    # asha: ratio of the steps of a rung to those of the previous rung, at least 2
    reduction_factor: Annotated[int, Range(2)] = 4
    max_failures_in_a_row: Positive = 5  # end the search after this many failed trials in a row


class PrepareConfig(Struct):
    """Settings of `prepare` and job=prepare, which turn raw text into tokenised shards for data=prepared."""

    # files, glob patterns (including **), and folders, of which all files are used
    inputs: list[str] = []
    output: str | None = None  # folder of the prepared data set
    # "auto": by suffix, with or without .gz/.zst; or "jsonl", "parquet" or "text" for all inputs
    format: choices.RawFormat = choices.RawFormat.AUTO
    text_field: str = "text"  # field of a JSON line, or column, that holds the document
    # what a record is: "text": a document; "chat": a conversation, or a question and its answer (text_field is ignored)
    records: choices.RecordKind = choices.RecordKind.TEXT
    # For chat: path of a Jinja file, or "chatml"; "none" concatenates question and answer. null: the template next to
    # the tokenizer.json.
    chat_template: str | None = None
    # For chat: what the loss is computed on: all "answers" of the assistant, its "last_answer", or "all" messages
    loss_on: choices.LossOn = choices.LossOn.ANSWERS
    tokenizer: str = "bytes"  # "bytes", or the path of a tokenizer.json
    bos: Lines | None = None  # ID or text of the token before each document; null: none
    # ID or text of the token after each document, or "none"; null: the one defined by the tokenizer file (for bytes: 0)
    eos: Lines | None = None
    # input size per shard, which is also the most work that a kill can cost a process; compressed files are not split
    unit_mb: PositiveFloat = 128.0
    # share of the documents that go into the split "valid", chosen by a digest of their text
    valid_fraction: Annotated[float, Range(0, below=1)] = 0.0
    # share of the records that may be bad; they are skipped and listed in bad.jsonl
    max_bad_share: Annotated[float, Range(0, 1)] = 0.0
    workers: Natural = 0  # processes per task; 0: one per CPU of the task
    # index of this part among `parts`: -m 'prepare.part=range(0,16)' prepare.parts=16 makes an array of 16 tasks
    part: Natural = 0
    parts: Positive = 1  # number of parts into which the work is divided


class Config(Struct):
    """One experiment. `model` and `data` are open: they have whatever fields their `_target_` accepts."""

    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    model: dict[str, Any] = {}
    data: dict[str, Any] = {}
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
    # Environment variables of the ranks that are never written to disk: NAME -> "env" (taken from the submitting shell)
    # or "file:PATH".
    secrets: dict[Annotated[str, VARIABLE], str] = {}
    job: JobConfig = field(default_factory=JobConfig)

    def __post_init__(self) -> None:
        for group, name, share in SHARES:  # what nobody has set follows the length of the run
            part = getattr(self, group)
            if getattr(part, name) is None:
                setattr(part, name, max(1, min(share.most, int(self.train.steps * share.fraction))))

    @property
    def world_size(self) -> int:
        """The number of ranks of the job: nodes x tasks per node; for a range of nodes, the largest number."""
        return self.cluster.node_range.most * self.cluster.tasks_per_node


SHARES: tuple[tuple[str, str, Share], ...] = tuple(
    (group, name, share)
    for group, part in (("optim", OptimConfig), ("train", TrainConfig), ("checkpoint", CheckpointConfig))
    for name, kind in part.__annotations__.items()
    for share in get_args(kind)
    if isinstance(share, Share)
)


def defaults() -> Config:
    """Return the defaults of all fields, as the environment is now; those that follow the number of steps are still open."""
    found = Config()
    for group, name, _ in SHARES:
        setattr(getattr(found, group), name, None)
    return found
