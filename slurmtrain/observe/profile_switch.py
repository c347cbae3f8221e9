"""The file RUN/profile, by which a person asks a running job for a profile: `touch RUN/profile`."""

from __future__ import annotations

import logging
import re
import shutil
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

from slurmtrain.config.fields import PROFILED_MAX
from slurmtrain.errors import ConfigError, SlurmtrainError
from slurmtrain.runs.events import Event
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system import records
from slurmtrain.system.records import printable

log = logging.getLogger(__name__)

LONGEST_BYTES = 4096
LOOK_EVERY_S = 2.0  # seconds between looks of a loop that has no other thread for it
HINT = "options of a profile: steps=3 ranks=0,4-7 (or ranks=all) stacks=true"


@dataclass(frozen=True)
class ProfileRequest:
    """What is to be profiled.

    Attributes:
        steps: number of steps, after one that warms the profiler up.
        ranks: ranks that write a trace; None: all.
        stacks: record the Python stack of each operation, which makes steps slower and traces larger.
    """

    steps: int = 3
    ranks: tuple[int, ...] | None = (0,)
    stacks: bool = False


def parse_request(text: str, default: ProfileRequest) -> ProfileRequest:
    """Return what the content of RUN/profile asks for: words name=value; what they leave out is as in `default`.

    Raises:
        ConfigError: a word cannot be read.
    """
    steps, ranks, stacks = default.steps, default.ranks, default.stacks
    for word in text.split():
        name, equals, value = word.partition("=")
        digits = value.isascii() and value.isdigit() and len(value) < 10
        if name == "steps" and digits and 1 <= int(value) <= PROFILED_MAX:
            steps = int(value)
        elif name == "ranks" and (value == "all" or _ranks(value)):
            ranks = None if value == "all" else _ranks(value)
        elif name == "stacks" and value in ("true", "false"):
            stacks = value == "true"
        else:
            known = name in ("steps", "ranks", "stacks")
            what = f"cannot take {word[:60]!r}" if known or not equals else f"does not know {name[:40]!r}"
            raise ConfigError(f"the file profile {what}", hint=f"{HINT}; at most {PROFILED_MAX} steps")
    return ProfileRequest(steps, ranks, stacks)


def _ranks(text: str) -> tuple[int, ...]:
    """Return the ranks that "0,4-7" names; none if it cannot be read."""
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", part)
        first, last = (int(match.group(1)), int(match.group(2) or match.group(1))) if match else (1, 0)
        if last < first:
            return ()
        found.update(range(first, last + 1))
    return tuple(sorted(found))


class ProfileSwitch:
    """Looks for the file, reads it, and removes it when the profile begins, so that it happens once. On rank 0.

    `look` may be called by another thread than the others.

    Args:
        default: what an empty file asks for.
    """

    def __init__(self, run_dir: RunDir, default: ProfileRequest):
        self._run_dir, self._default = run_dir, default
        self._request: ProfileRequest | None = None
        self._stuck = False  # the file cannot be removed, so nobody looks for it any more
        self._look_at = 0.0  # when to look next, by the monotonic clock
        self._lock = threading.Lock()

    def look(self) -> None:
        """Look for the file, and read it. What cannot be read is refused."""
        with self._lock:
            if self._stuck:
                return
            try:
                text = records.read_text(self._run_dir.profile_switch, at_most=LONGEST_BYTES)
                self._request = parse_request(text, self._default)
            except FileNotFoundError:
                self._request = None
            except SlurmtrainError as error:
                self._refuse(error)

    def look_now_and_then(self) -> None:
        """Look if the last look was some seconds ago, for a loop that has no other thread for it."""
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + LOOK_EVERY_S
            self.look()

    def asked(self) -> ProfileRequest | None:
        """Return what is asked for, as long as nobody has taken it."""
        return self._request

    def take(self) -> None:
        """Remove the file: what it asks for is done, or refused."""
        with self._lock:
            self._take()

    def refuse(self, error: SlurmtrainError) -> None:
        """Say why there will be no profile, and remove the file."""
        with self._lock:
            self._refuse(error)

    def _refuse(self, error: SlurmtrainError) -> None:
        self._take()
        log.warning("no profile: %s", printable(str(error)))
        with suppress(OSError):
            self._run_dir.event(Event.PROFILE_REFUSED, sentence=error.message, hint=error.hint)

    def _take(self) -> None:
        self._request, switch = None, self._run_dir.profile_switch
        try:
            shutil.rmtree(switch) if switch.is_dir() and not switch.is_symlink() else switch.unlink(missing_ok=True)
        except OSError as error:
            self._stuck = True
            log.warning("%s cannot be removed, so nobody looks for it any more: %s", switch, error)
