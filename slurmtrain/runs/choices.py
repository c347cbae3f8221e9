"""cluster=first: a run that is submitted to several clusters or partitions, and that the first job that starts takes.

`choices/NAME/` holds what the run is if that job is the first: its frozen config, its batch script with and without the
question who has taken the run, and `choice.json`, by which its job is found. `choices/taken-0001/claim.json` says who has
taken it. The folder gets its name with the file in it, by a rename, which no file system makes over a folder that holds
something: so of several jobs that start at the same moment one makes it, on file systems without hard links, too, and
whoever comes later leaves. Claims are numbered and never removed. The newest counts, and one of nobody opens the run again.

The one that has taken the run makes its config, script and job those of the run directory (`settle` in
`runtime/take_run.py`). From then on the run is one like any other.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any

from slurmtrain.errors import UnavailableRecordError, UnreadableRecordError
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.job_states import GONE, LIVE, JobState
from slurmtrain.slurm.trusted_conf import trusted_slurm_conf
from slurmtrain.system import records
from slurmtrain.system.files import read_json, temporary_beside, write_json
from slurmtrain.system.modes import folder_mode
from slurmtrain.system.records import COUNT, JOB_IDS, NOTHING, TEXT

CHOICES_MAX = 64
SEEN_S = 0.1
_OF_A_CHOICE = {"name": TEXT, "place": COUNT, "slurm_conf": TEXT | NOTHING, "token": TEXT, "job_ids": JOB_IDS}
_OF_A_CLAIM = {"choice": TEXT | NOTHING, "job_id": TEXT | NOTHING}
_CLAIM_NAME = re.compile(r"taken-(\d{1,9})")


@dataclass(frozen=True)
class Choice:
    """One of the clusters or partitions that a run is submitted to.

    Attributes:
        folder: its folder in the run directory.
        place: its place in cluster.choices.
        name: the name of its cluster file.
        named_conf: the slurm.conf by which its SLURM is reached; None: the machine's own.
        token: the token in the comment of its job; "": not submitted yet.
        job_id: its latest job; None where nobody has noted it.
    """

    folder: Path
    place: int
    name: str
    named_conf: str | None
    token: str = ""
    job_id: str | None = None

    @property
    def record_file(self) -> Path:
        return self.folder / "choice.json"

    @property
    def config_file(self) -> Path:
        return self.folder / "config.yaml"

    @property
    def asking_script(self) -> Path:
        """The script that is submitted: it asks first who has taken the run."""
        return self.folder / "first.sbatch"

    @property
    def script(self) -> Path:
        """The script of the run once this choice has taken it."""
        return self.folder / "job.sbatch"

    def slurm_conf(self) -> str | None:
        """Return the slurm.conf of its SLURM. Raises ClusterError as `RunDir.slurm_conf`."""
        return trusted_slurm_conf(self.named_conf, named_by=self.record_file)

    def write(self) -> None:
        """Write its record."""
        values: dict[str, Any] = {"name": self.name, "place": self.place, "slurm_conf": self.named_conf}
        write_json(self.record_file, {**values, "token": self.token, "job_ids": [self.job_id] if self.job_id else []})


@dataclass(frozen=True)
class Claim:
    """Who has taken a run: the job `job_id` of the choice `choice`."""

    number: int
    choice: str
    job_id: str

    def is_of(self, choice: str, job_id: str) -> bool:
        return (self.choice, self.job_id) == (choice, job_id)


def choices_of(run_dir: RunDir) -> list[Choice]:
    """Return the choices of a run, in the order of cluster.choices; none for a run that has a cluster of its own.

    Raises:
        UnreadableRecordError: the record of one cannot be used.
    """
    try:
        names = os.listdir(run_dir.choices)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UnavailableRecordError(f"{run_dir.choices} cannot be read: {error.strerror}", error) from None
    found = []
    # Claims are never removed, so there may be many; they, and what a killed process has left of one, are no choices.
    folders = sorted(name for name in names if not name.startswith(".") and not is_name_of_claim(name))
    for name in folders[: 2 * CHOICES_MAX]:
        folder = run_dir.choices / name
        values = read_json(folder / "choice.json")
        if values is None:
            continue
        missing = [key for key in _OF_A_CHOICE if key not in values]
        if missing:
            raise UnreadableRecordError(f"{folder / 'choice.json'} does not say {', '.join(missing)}")
        records.check_fields(values, _OF_A_CHOICE, folder / "choice.json")
        job_id = values["job_ids"][-1] if values["job_ids"] else None
        found.append(Choice(folder, values["place"], name, values["slurm_conf"], values["token"], job_id))
    return sorted(found, key=lambda choice: choice.place)


def is_open(run_dir: RunDir) -> bool:
    """Return whether a run was submitted to several choices and is none's yet.

    Raises:
        UnreadableRecordError: its run.json cannot be used.
    """
    return run_dir.choices.is_dir() and not run_dir.info()["job_ids"] and not run_dir.attempt_numbers()


def is_name_of_claim(name: str) -> bool:
    """Return whether a folder of this name, in the folder of the choices, is a claim's."""
    return _CLAIM_NAME.fullmatch(name) is not None


def claim_of(run_dir: RunDir) -> Claim | None:
    """Return who has taken a run; None while nobody has.

    Raises:
        UnreadableRecordError: the claim cannot be used.
    """
    return _newest_claim(run_dir)[1]


def _newest_claim(run_dir: RunDir) -> tuple[int, Claim | None]:
    """Return the number of the newest claim, 0 for none, and the claim; None for a claim of nobody. Raises as `claim_of`."""
    try:
        names = os.listdir(run_dir.choices)
    except (FileNotFoundError, NotADirectoryError):
        names = []
    except OSError as error:
        raise UnavailableRecordError(f"{run_dir.choices} cannot be read: {error.strerror}", error) from None
    made = {int(found[1]): name for name in names if (found := _CLAIM_NAME.fullmatch(name))}
    if not made:
        return 0, None
    number = max(made)
    path = run_dir.choices / made[number] / "claim.json"
    values = read_json(path)
    if values is None or any(key not in values for key in _OF_A_CLAIM):
        raise UnreadableRecordError(f"{path} does not say who took the run")
    records.check_fields(values, _OF_A_CLAIM, path)
    choice, job_id = values["choice"], values["job_id"]
    if choice is None:
        return number, None
    if not records.is_job_id(job_id):
        raise UnreadableRecordError(f"{path}: job_id is not a job ID")
    return number, Claim(number, choice, job_id)


def take(run_dir: RunDir, choice: str, job_id: str, given_up: Callable[[Claim], bool]) -> Claim:
    """Take a run for a job, unless another one has taken it; return the claim that holds.

    Args:
        given_up: says of the claim of another job whether it holds no more.

    Raises:
        OSError: the claim cannot be written.
        UnreadableRecordError: the claim that is there cannot be used.
    """
    while True:
        number, claim = _newest_claim(run_dir)
        if claim is not None and (claim.is_of(choice, job_id) or not given_up(claim)):
            return claim
        if not _make_claim(run_dir, number + 1, choice, job_id):
            # Another one was quicker; or NFS has asked twice, and the claim is this job's own. It may be seen a little later.
            time.sleep(SEEN_S)


def open_again(run_dir: RunDir) -> None:
    """Let the next job that starts take a run whose jobs are all gone, and that is submitted once more.

    Raises: as `take`.
    """
    while (newest := _newest_claim(run_dir))[1] is not None:
        _make_claim(run_dir, newest[0] + 1, None, None)


def _make_claim(run_dir: RunDir, number: int, choice: str | None, job_id: str | None) -> bool:
    """Make the claim of this number in one step, and return whether it was there not yet. Raises OSError."""
    path = run_dir.choices / f"taken-{number:04d}"
    temporary = temporary_beside(path)
    temporary.mkdir(mode=folder_mode(run_dir.choices))
    try:
        write_json(temporary / "claim.json", {"choice": choice, "job_id": job_id})
        os.rename(temporary, path)
        return True
    except OSError:
        if not os.path.lexists(path):
            raise
        return False
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


class Standing(Enum):
    """What a claim of another job means to a job that has started."""

    HOLDS = auto()  # the run goes on with that job, or has ended with it
    UNDECIDED = auto()  # that job is there and has not begun: it may still die without having begun
    GIVEN_UP = auto()  # it has died without having begun


def standing_of(state: str | None, *, has_begun: bool) -> Standing:
    """Return what the claim of a job means to another job of the run.

    A job may die between taking the run and claiming its first attempt, and SLURM may notice that minutes later. What has
    begun goes on as requeue.mode says. One that waits in the queue again keeps the run, and a job that somebody has ended
    with scancel has ended the run.

    Args:
        state: SLURM's word for the state of the job that has the claim; None: SLURM does not know it any more.
        has_begun: an attempt of the run was claimed.
    """
    if has_begun or state == JobState.CANCELLED:
        return Standing.HOLDS
    if state is None or state in GONE:
        return Standing.GIVEN_UP
    return Standing.UNDECIDED if state in LIVE else Standing.HOLDS
