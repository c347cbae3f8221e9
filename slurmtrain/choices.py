"""The words that fields of the config take where only a few are known. Imports nothing, so that every room can use them.

A member is the word itself: it is compared, written and read as text. `config/fields.py` makes members of what was typed,
and refuses all other words.
"""

from __future__ import annotations

from enum import StrEnum

DECODERS = ("slurmtrain.models.Decoder", "slurmtrain.models.decoder.Decoder")  # names of our own decoder in `_target_`


class Choice(StrEnum):
    """One of a few words, shown like any text."""

    __repr__ = str.__repr__


class Backend(Choice):
    """The scheduler that runs a job."""

    SLURM = "slurm"
    LOCAL = "local"


class ContainerKind(Choice):
    """The runtime that a container is started by."""

    PYXIS = "pyxis"
    APPTAINER = "apptainer"


class JobKind(Choice):
    """What the ranks run.

    EVALUATE is that of the jobs which `evaluate` and eval.mode=job submit, and PREFLIGHT of those of the verb `preflight`; no
    person types them.
    """

    TRAIN = "train"
    COMMAND = "command"
    PREPARE = "prepare"
    EVALUATE = "evaluate"
    PREFLIGHT = "preflight"


class Launcher(Choice):
    """The program that starts the processes of a program of the user's own on each node."""

    NONE = "none"
    TORCHRUN = "torchrun"


class StopSignal(Choice):
    """The signal by which a program of the user's own is told to stop."""

    SIGTERM = "SIGTERM"
    SIGINT = "SIGINT"
    SIGHUP = "SIGHUP"
    SIGUSR1 = "SIGUSR1"
    SIGUSR2 = "SIGUSR2"


class SnapshotMode(Choice):
    """The code that a snapshot takes."""

    AUTO = "auto"
    CWD = "cwd"
    NONE = "none"


class CpMethod(Choice):
    """What context parallelism exchanges."""

    ALL_GATHER = "all_gather"
    ULYSSES = "ulysses"


class PpSchedule(Choice):
    """The order of forward and backward passes in a pipeline."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED_1F1B = "interleaved_1f1b"
    ZERO_BUBBLE = "zero_bubble"


class ParamDtype(Choice):
    """A type to compute in other than float32."""

    BFLOAT16 = "bfloat16"


class ReduceDtype(Choice):
    """The type in which gradients are added up."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class GradientCompression(Choice):
    """What replicas send in place of float32 gradients."""

    NONE = "none"
    BF16 = "bf16"
    FP16 = "fp16"
    POWERSGD = "powersgd"


class ActivationCheckpointing(Choice):
    """From what keeps most activations to what keeps least."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


class Device(Choice):
    """The kind of device that a rank trains on."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class BestMode(Choice):
    """Which values of a metric are good."""

    MIN = "min"
    MAX = "max"


class ReplicaDrift(Choice):
    """What a save does when ranks differ that should hold the same."""

    REFUSE = "refuse"
    WARN = "warn"


class Verify(Choice):
    """How much of a checkpoint's files is compared with their digests."""

    FULL = "full"
    SAMPLED = "sampled"
    OFF = "off"


class RestoreOnly(Choice):
    """A part of a checkpoint to start from."""

    MODEL = "model"


class ExportDtype(Choice):
    """The element type of the weights in an export."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


class Allow(Choice):
    """What may differ between a checkpoint and the run that starts from it."""

    KEYS = "keys"
    SHAPES = "shapes"
    DTYPES = "dtypes"
    CONFIG = "config"
    DATA = "data"


class OnNonfinite(Choice):
    """What training does about a step whose loss or gradient norm is not finite. Its update never happens."""

    STOP = "stop"
    SKIP = "skip"
    ROLLBACK = "rollback"


class Pruner(Choice):
    """The rule by which a search ends trials early."""

    NONE = "none"
    MEDIAN = "median"
    ASHA = "asha"


class OnSpike(Choice):
    """What training does about a loss far above those of the steps before."""

    IGNORE = "ignore"
    TELL = "tell"
    ROLLBACK = "rollback"


class EvalMode(Choice):
    """Where evaluations run."""

    INLINE = "inline"
    JOB = "job"


class RequeueMode(Choice):
    """How a job that has stopped early goes on; see `RequeueConfig`."""

    REQUEUE = "requeue"
    RESUBMIT = "resubmit"
    CHAIN = "chain"
    OFF = "off"


class RecordKind(Choice):
    """What the records of raw data hold."""

    TEXT = "text"
    CHAT = "chat"


class LossOn(Choice):
    """The parts of a conversation that the model learns to write."""

    ANSWERS = "answers"
    LAST_ANSWER = "last_answer"
    ALL = "all"


class RawFormat(Choice):
    """The format of raw text."""

    AUTO = "auto"
    JSONL = "jsonl"
    PARQUET = "parquet"
    TEXT = "text"
    HF = "hf"


class WandbMode(Choice):
    """Where the numbers of a run go that Weights & Biases is to have."""

    AUTO = "auto"
    ONLINE = "online"
    OFFLINE = "offline"


class PreflightMode(Choice):
    """How much is checked in the allocation before training."""

    OFF = "off"
    QUICK = "quick"
    FULL = "full"


class FindingKind(Choice):
    """What the checks before training may find; each has a paragraph on the manual's page `preflight`."""

    RANKS = "ranks"
    GPU_MISSING = "gpu_missing"
    GPU_DRIVER = "gpu_driver"
    GPU_BROKEN = "gpu_broken"
    GPU_SLOWED = "gpu_slowed"
    GPU_BUSY = "gpu_busy"
    VERSIONS = "versions"
    PACKAGES = "packages"
    CODE = "code"
    CONFIG = "config"
    DATA_MISSING = "data_missing"
    DATA_DIFFERS = "data_differs"
    SHARED_FOLDER = "shared_folder"
    DISK_FULL = "disk_full"
    CPUS = "cpus"
    CLOCK = "clock"
    VARIABLES = "variables"
    SLOW_NODE = "slow_node"
    SLOW_LINK = "slow_link"
    BELOW_STATED = "below_stated"
