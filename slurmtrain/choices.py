"""The words that fields of the config take where only a few are known. Imports nothing, so that every room can use them.

A member is the word itself: it is compared, written and read as text. `config/typed.py` makes members of what was typed,
and refuses all other words.
"""

from __future__ import annotations

from enum import StrEnum


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
    """What the ranks run. EVALUATE is that of the jobs which `evaluate` and eval.mode=job submit; no person types it."""

    TRAIN = "train"
    COMMAND = "command"
    PREPARE = "prepare"
    EVALUATE = "evaluate"


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


class RawFormat(Choice):
    """The format of raw text."""

    AUTO = "auto"
    JSONL = "jsonl"
    PARQUET = "parquet"
    TEXT = "text"
    HF = "hf"
