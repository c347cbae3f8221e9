"""Check what a run is: its name, its kind, the program that it starts, and the commands at its end."""

from __future__ import annotations

import re
import shlex

from slurmtrain.choices import JobKind, Launcher, StopSignal
from slurmtrain.config.checks.values import at_least
from slurmtrain.config.frozen import SECRET_REFERENCE
from slurmtrain.config.schema import HooksConfig, JobConfig
from slurmtrain.config.typed import words_of
from slurmtrain.errors import EXIT_CONFIG, EXIT_REQUEUE, ConfigError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}")


def check_job(job: JobConfig) -> None:
    """Raise for a name that no folder can have, and for settings of a command where none is run."""
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
        at_least("job.stop_grace_s", job.stop_grace_s, 1, why="null is as long as SLURM allows")


def _check_finished_when(text: str) -> None:
    if not text.strip():
        raise ConfigError("job.finished_when is empty", hint="a file, an exit code, or null")
    if text.isdigit() and (int(text) > 255 or int(text) in (EXIT_REQUEUE, EXIT_CONFIG)):
        raise ConfigError(
            f"job.finished_when={text}: an exit code from 0 to 255 was expected, other than {EXIT_REQUEUE} (start me again) "
            f"and {EXIT_CONFIG} (the config is wrong)",
            hint="job.finished_when=0, or a file that the program creates at its end",
        )


def check_hooks(hooks: HooksConfig) -> None:
    """Raise for a hook that is not a command, or that shows a secret."""
    at_least("hooks.timeout_s", hooks.timeout_s, 1)
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
