"""Errors that a person can put right: one sentence, one hint, one exit code.

They are shown without a traceback. Every other exception is a bug of ours, or of the user's own training code, and
keeps its traceback.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterable

EXIT_USAGE = 2  # a command line that cannot be understood; nothing was done
EXIT_REQUEUE = os.EX_TEMPFAIL  # 75, sysexits.h: stopped early with what is needed to continue
EXIT_CONFIG = os.EX_CONFIG  # 78, sysexits.h: the config or the environment is wrong; a retry cannot help
SHOWN = 80  # characters of a value that an error repeats
LONGEST_LINE = 400  # characters of what Hydra or omegaconf says


class SlurmtrainError(Exception):
    """The base of all errors meant for a person.

    Args:
        message: one sentence: what was wrong, where, and the value found.
        hint: what to write or do instead.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None):
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message


class UsageError(SlurmtrainError):
    """The command line cannot be understood: an unknown verb, key, option or run."""

    exit_code = EXIT_USAGE


class UnreadableRecordError(UsageError):
    """A file of a run cannot be used: it is damaged, too large, or not what it should be."""


class UnavailableRecordError(UnreadableRecordError, OSError):
    """The storage does not give a file of a run now, or this user may not read it.

    It is an OSError, too, so that what tolerates a storage that fails tolerates this.

    Args:
        message: as for all errors.
        cause: what the storage said, whose `errno`, `strerror` and `filename` this error has.
    """

    def __init__(self, message: str, cause: OSError):
        super().__init__(message)
        self.errno, self.strerror, self.filename = cause.errno, cause.strerror, cause.filename


class ConfigError(SlurmtrainError):
    """A value in the config, alone or together with others, cannot work."""

    exit_code = EXIT_CONFIG


class EnvironmentMismatchError(SlurmtrainError):
    """The job's surroundings are not what the config was written for: ranks, nodes, devices.

    Args:
        nodes: the nodes at fault, which another start leaves out; (): the config is at fault, or all nodes alike.
        told_all: all ranks raise it at the same time, and rank 0's record is enough.
    """

    exit_code = EXIT_CONFIG

    def __init__(self, message: str, *, hint: str | None = None, nodes: tuple[str, ...] = (), told_all: bool = False):
        super().__init__(message, hint=hint)
        self.nodes = nodes
        self.told_all = told_all


class ClusterError(SlurmtrainError):
    """SLURM refused, is not there, or did not answer."""


class DivergedError(SlurmtrainError):
    """Loss, gradients or parameters are not finite.

    A retry without a change would compute the same bits, so there is none.
    """

    exit_code = EXIT_CONFIG


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a rank that an error ends. A package that is missing will be missing the next time, too."""
    if isinstance(error, SlurmtrainError):
        return error.exit_code
    return EXIT_CONFIG if isinstance(error, ModuleNotFoundError) else 1


def storage_hint(error: OSError) -> str | None:
    """Return what to do about storage that takes no files; None for any other error."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "`df -h` and `quota -s` show the room that is left"
    if error.errno == errno.EROFS:
        return "its file system is mounted read-only here: use another folder, or ask whoever runs this machine"
    return None


def how_it_ended(code: int) -> str:
    """Describe the end of a process by its exit code, which is minus the signal's number for one that was killed."""
    return f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"


def signal_name(number: int) -> str:
    """Return the name of a signal, such as SIGTERM, or SIGRTMIN+3 of those that have none of their own."""
    plain = number in list(signal.Signals)
    return signal.Signals(number).name if plain else f"SIGRTMIN+{number - signal.SIGRTMIN}"


MOST_NAMES = 40  # that a hint lists


def nearest(word: str, names: Iterable[str], group: str = "") -> str:
    """Return a hint that names what `word` was probably meant to be, or all names, unless they are very many; else "".

    Args:
        group: the group of a config that has these names, with a dot at its end.
    """
    known = sorted(names)
    import difflib  # which a command without an error does without

    close = difflib.get_close_matches(word, known, n=3, cutoff=0.5)
    if close:
        return f"did you mean {' or '.join(f'{group}{name}' for name in close)}?"
    return f"known are: {', '.join(known)}" if len(known) <= MOST_NAMES else ""


def shown(value: object) -> str:
    """Return a value as an error message repeats it: on one line, and shortened."""
    text = repr(value) if not isinstance(value, str) or not value.isprintable() else value
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 4]} ..."


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, shortened, since omegaconf repeats values however long they are."""
    line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return line if len(line) <= LONGEST_LINE else f"{line[: LONGEST_LINE - 4]} ..."


def why_not_built(error: BaseException, target: str) -> str:
    """Return why Hydra cannot build what a `_target_` names: the innermost cause, without the lines about its own search."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    if isinstance(cause, ModuleNotFoundError) and cause.name == target and "." in target:
        module, _, name = target.rpartition(".")
        return f"{module} has no {name}"
    return first_line(cause)
