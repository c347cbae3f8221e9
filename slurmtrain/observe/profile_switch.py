"""The file RUN/profile, by which a person asks a running job for a profile: `touch RUN/profile`."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from pathlib import Path

from slurmtrain.errors import ConfigError, SlurmtrainError, UnreadableRecordError
from slurmtrain.observe.profile_request import ProfileRequest, parse_request
from slurmtrain.runs.events import Event
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system import records
from slurmtrain.system.files import give_name, replace_file
from slurmtrain.system.modes import folder_mode
from slurmtrain.system.records import printable

log = logging.getLogger(__name__)

LONGEST_BYTES = 4096
LOOK_EVERY_S = 2.0  # seconds between looks of a loop that has no other thread for it


class ProfileSwitch:
    """Looks for the file, reads it, and takes it away when the profile begins, so that it happens once. On rank 0.

    While a profile is under way, what asks for it is called profile.taken. An attempt that finds such a file follows one
    that was killed, or failed, before its profile was there. Nobody knows whether the profile was the reason, as when it
    takes the memory of a node: so it is not begun again by itself, and the attempt says that it is lost.

    `look` may be called by another thread than the others.

    Args:
        default: what an empty file asks for.
    """

    def __init__(self, run_dir: RunDir, default: ProfileRequest):
        self._run_dir, self._default = run_dir, default
        self._seen: tuple[int, int, int] | None = None  # when it was looked at last
        self._left: tuple[int, int, int] | None = None  # a file that cannot be taken away: it is not looked at again
        self._request: ProfileRequest | None = None
        self._knows_lost = False  # whether it has looked for what an earlier attempt has left
        self._look_at = 0.0  # when to look next, by the monotonic clock
        self._lock = threading.Lock()

    def look(self) -> None:
        """Look for the file. It counts when it has not changed since the last look, so that it is not read half written."""
        with self._lock:
            self._look_for_lost()
            try:
                found = os.stat(self._run_dir.profile_switch, follow_symlinks=False)
            except OSError:
                self._seen = self._request = None
                return
            now = found.st_ino, found.st_mtime_ns, found.st_size
            if now == self._left:
                return
            settled, self._seen = now == self._seen, now
            if not settled:
                self._request = None
            elif self._request is None:
                self._read()

    def look_now_and_then(self) -> None:
        """Look if the last look was some seconds ago, for a loop that has no other thread for it."""
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + LOOK_EVERY_S
            self.look()

    def _read(self) -> None:
        try:
            text = records.read_text(self._run_dir.profile_switch, at_most=LONGEST_BYTES)
            self._request = parse_request(text, self._default)
        except FileNotFoundError:
            self._seen = None
        except SlurmtrainError as error:
            self._set_aside(error)

    def asked(self) -> ProfileRequest | None:
        """Return what is asked for, as long as nobody has taken it."""
        return self._request

    def _look_for_lost(self) -> None:
        if self._knows_lost:
            return
        self._knows_lost, taken = True, self._run_dir.profile_taken
        try:
            text = records.read_text(taken, at_most=LONGEST_BYTES).strip()
        except FileNotFoundError:
            return
        except UnreadableRecordError:
            text = ""
        what = f"the profile that was asked for with {text!r}" if text else "the profile that was asked for"
        refused = self._run_dir.profile_refused
        self._say_refused(
            taken,
            ConfigError(
                f"{what} is lost: the attempt that began it ended before it was there",
                hint=f"to ask for it again: mv {refused} {self._run_dir.profile_switch}",
            ),
        )

    def refuse(self, error: SlurmtrainError) -> None:
        """Say why there will be no profile, and set the file aside as profile.refused."""
        with self._lock:
            self._set_aside(error)

    def _set_aside(self, error: SlurmtrainError) -> None:
        self._request = None
        if not self._say_refused(self._run_dir.profile_switch, error):
            self._left = self._seen

    def _say_refused(self, path: Path, error: SlurmtrainError) -> bool:
        """Rename what asks for a profile to profile.refused, and say why; return whether it could be renamed."""
        try:
            path.replace(self._run_dir.profile_refused)
            renamed = True
        except OSError:
            renamed = False
        log.warning("no profile: %s", printable(str(error)))
        with contextlib.suppress(OSError):
            self._run_dir.event(Event.PROFILE_REFUSED, sentence=error.message, hint=error.hint)
        return renamed

    def take(self) -> None:
        """Take the file away: a profile begins that it has asked for.

        Raises:
            OSError: it cannot be taken away; it is not looked at again.
        """
        with self._lock:
            self._request, switch = None, self._run_dir.profile_switch
            try:
                switch.replace(self._run_dir.profile_taken)
            except FileNotFoundError:  # somebody has removed it just now; the ranks have agreed all the same
                return
            except OSError as error:
                self._left = self._seen
                raise OSError(f"{switch} cannot be taken away: {error}") from None

    def begun(self, request: ProfileRequest) -> None:
        """Note that a profile begins that no file has asked for."""
        with self._lock, contextlib.suppress(OSError):  # a full disk: nobody will say so if it gets lost
            self._look_for_lost()
            replace_file(self._run_dir.profile_taken, request.text().encode(), durable=False)

    def done(self) -> None:
        """Note that the profile is there."""
        with contextlib.suppress(OSError):
            self._run_dir.profile_taken.unlink(missing_ok=True)

    def give_back(self) -> None:
        """Put the file back, for the next attempt: this one ends before its profile is done."""
        with contextlib.suppress(OSError):  # FileExistsError: somebody has asked again; or it was removed before
            give_name(self._run_dir.profile_taken, self._run_dir.profile_switch)


def new_folder(run_dir: RunDir, first: int) -> Path:
    """Make the folder of a profile that begins with step `first`: profiles/step_0000100; of a second one with .2 behind.

    Raises:
        OSError: it cannot be made.
    """
    run_dir.profiles.mkdir(mode=folder_mode(run_dir.path), exist_ok=True)
    number = 1
    while True:
        folder = run_dir.profile(first, number)
        try:
            folder.mkdir(mode=folder_mode(run_dir.profiles))
            return folder
        except FileExistsError:
            number += 1


def those_there(request: ProfileRequest, size: int) -> tuple[list[int], str | None]:
    """Return the ranks that a request names and that there are, and a sentence about the others; None: there are no others.

    Args:
        size: number of ranks of this attempt.
    """
    if request.ranks is None:
        return list(range(size)), None
    there = [rank for rank in request.ranks if rank < size]
    others = [rank for rank in request.ranks if rank >= size]
    if not others:
        return there, None
    named = ", ".join(map(str, others[:5])) + (", ..." if len(others) > 5 else "")
    do_not = f"rank {named} does not exist" if len(others) == 1 else f"ranks {named} do not exist"
    return there, f"{do_not}: this attempt has " + ("rank 0 alone" if size == 1 else f"ranks 0 to {size - 1}")
