"""The words that fields of the config take where only a few are known. Imports nothing, so that every room can use them.

A member is the word itself, in small letters: it is compared, written, shown and read as text.
`config/fields.py` makes members of what was typed, and refuses all other words.
"""

from __future__ import annotations

from enum import StrEnum

DECODERS = ("slurmtrain.models.Decoder", "slurmtrain.models.decoder.Decoder")  # names of our own decoder in `_target_`


# The signal by which a program of the user's own is told to stop
StopSignal = StrEnum(
    "StopSignal",
    {"SIGTERM": "SIGTERM", "SIGINT": "SIGINT", "SIGHUP": "SIGHUP", "SIGUSR1": "SIGUSR1", "SIGUSR2": "SIGUSR2"},
)
# The order of forward and backward passes in a pipeline
PpSchedule = StrEnum(
    "PpSchedule",
    {
        "GPIPE": "gpipe",
        "ONE_F_ONE_B": "1f1b",
        "INTERLEAVED_1F1B": "interleaved_1f1b",
        "ZERO_BUBBLE": "zero_bubble",
    },
)
# The scheduler that runs a job
Backend = StrEnum("Backend", "SLURM LOCAL KUBERNETES")
# What else can start a run, by the manifest of `render --target`
Target = StrEnum("Target", "JOBSET TRAINJOB RAYJOB SKYPILOT")
# When a node fetches the image of a pod
PullPolicy = StrEnum("PullPolicy", {"ALWAYS": "Always", "ABSENT": "IfNotPresent", "NEVER": "Never"})
# The runtime that a container is started by
ContainerKind = StrEnum("ContainerKind", "PYXIS APPTAINER")
# What the ranks run. EVALUATE is that of the jobs which `evaluate` and eval.mode=job submit, and PREFLIGHT of those
# of the verb `preflight`; no person types them.
JobKind = StrEnum("JobKind", "TRAIN COMMAND PREPARE EVALUATE PREFLIGHT")
# The program that starts the processes of a program of the user's own on each node
# The code that a snapshot takes
SnapshotMode = StrEnum("SnapshotMode", "AUTO CWD NONE")
# What context parallelism exchanges
CpMethod = StrEnum("CpMethod", "ALL_GATHER ULYSSES")
# A type to compute in other than float32
ParamDtype = StrEnum("ParamDtype", "BFLOAT16")
# The type in which gradients are added up
ReduceDtype = StrEnum("ReduceDtype", "FLOAT32 BFLOAT16")
# From what keeps most activations to what keeps least
ActivationCheckpointing = StrEnum("ActivationCheckpointing", "NONE SELECTIVE FULL")
# The kind of device that a rank trains on
Device = StrEnum("Device", "AUTO CPU CUDA")
# Which values of a metric are good
BestMode = StrEnum("BestMode", "MIN MAX")
# A part of a checkpoint to start from
RestoreOnly = StrEnum("RestoreOnly", "MODEL")
# What may differ between a checkpoint and the run that starts from it
Allow = StrEnum("Allow", "KEYS DTYPES CONFIG DATA")
# What training does about a step whose loss or gradient norm is not finite. Its update never happens.
OnNonfinite = StrEnum("OnNonfinite", "STOP SKIP ROLLBACK")
# The rule by which a search ends trials early
Pruner = StrEnum("Pruner", "NONE MEDIAN ASHA")
# Where evaluations run
EvalMode = StrEnum("EvalMode", "INLINE JOB")
# How a job that has stopped early goes on; see `RequeueConfig`
RequeueMode = StrEnum("RequeueMode", "REQUEUE RESUBMIT CHAIN OFF")
# What the records of raw data hold
RecordKind = StrEnum("RecordKind", "TEXT CHAT")
# The parts of a conversation that the model learns to write
LossOn = StrEnum("LossOn", "ANSWERS LAST_ANSWER ALL")
# The format of raw text
RawFormat = StrEnum("RawFormat", "AUTO JSONL PARQUET TEXT")
# Where the numbers of a run go that Weights & Biases is to have
WandbMode = StrEnum("WandbMode", "AUTO ONLINE OFFLINE")
# How much is checked in the allocation before training
PreflightMode = StrEnum("PreflightMode", "OFF QUICK FULL")
# What the checks before training may find; each has a paragraph on the manual's page `preflight`
FindingKind = StrEnum(
    "FindingKind",
    "GPU_MISSING GPU_DRIVER GPU_BROKEN GPU_SLOWED GPU_BUSY VERSIONS CODE DATA SHARED_FOLDER DISK_FULL CPUS CLOCK "
    "SLOW_NODE SLOW_LINK SLOW_NETWORK",
)

for _kind in list(globals().values()):
    if isinstance(_kind, type) and issubclass(_kind, StrEnum) and _kind is not StrEnum:
        _kind.__repr__ = str.__repr__  # type: ignore[method-assign]
# What a row of `usage` is about
Grouping = StrEnum("Grouping", "RUN USER")
