"""Check what goes into the batch script as it is: options of sbatch, and text."""

from __future__ import annotations

import re

from slurmtrain.config.frozen import SECRET_REFERENCE
from slurmtrain.config.schema import ClusterConfig
from slurmtrain.errors import ConfigError
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


def check_sbatch(cluster: ClusterConfig, *, singleton: bool) -> None:
    """Raise for options that sbatch does not have, or that slurmtrain sets."""
    for option, value in cluster.sbatch.items():
        _check_sbatch_option(option, value)
    dependency = str(cluster.sbatch.get("dependency") or "")
    if singleton and "?" in dependency:
        raise ConfigError(
            f"job.singleton=true with cluster.sbatch.dependency={dependency!r}: SLURM cannot combine `?` with other conditions",
            hint="join the conditions with commas, or set job.singleton=false",
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


def check_strings(cluster: ClusterConfig) -> None:
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
