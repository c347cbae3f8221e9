"""The run directory: the one thing that login node and job share.

It is created exclusively at submit, its path is decided there once, and never derived again. Every path below it is
defined here and nowhere else; every verb works from it alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict

from slurmtrain.errors import UnavailableRecordError, UnreadableRecordError
from slurmtrain.runs.attempt_dir import AttemptDir, path_below
from slurmtrain.runs.reasons import Event
from slurmtrain.slurm.command_environment import trusted_slurm_conf
from slurmtrain.system import records
from slurmtrain.system.files import folder_mode, write_json
from slurmtrain.system.records import Count, JobId, Time, finite, read_json
from slurmtrain.system.redaction import redacted

RUN_DIR_VARIABLE = "SLURMTRAIN_RUN_DIR"
DRILLS = "drills"  # below runs/: the scratch runs of drills, in a folder for each
ENVIRONMENTS = ".environments-"  # below runs/: archives of environments (cluster.stage); the user's number follows
ATTEMPT_VARIABLE = "SLURMTRAIN_ATTEMPT"
EVENT_LOCK_S = 2.0  # longest wait of a line for those of others; the lock is held for milliseconds
INFO_LOCK_S = 10.0  # longest wait for somebody who changes run.json, which takes milliseconds


class RunInfo(TypedDict, total=False):
    """The fields of run.json that are checked when it is read."""

    name: str
    overrides: list[str]
    backend: str
    user: str
    host: str
    created: Time
    slurm_conf: str | None
    job_ids: list[JobId]
    config_hash: str
    steps: Count | None
    code: dict[str, Any] | None
    submitted_with: dict[str, Any] | None
    image: dict[str, Any] | None
    workdir: str
    submit_dir: str
    packed: bool | None
    own_checkpoints: dict[str, Any] | None
    chain: list[JobId] | None
    chain_after: Count | None
    varied: dict[str, Any] | list[str] | None
    made_at: dict[str, Any] | None
    copied_from: str | None
    copy: str | None


ALWAYS = ("name", "overrides", "backend", "user", "host", "created", "slurm_conf", "job_ids")  # in each run.json


@dataclass(frozen=True)
class RunDir:
    """The paths and small files of one run.

    Holds no state of its own; paths that tables of many runs need are cached.
    """

    path: Path

    # Files and folders, in the order in which a run makes them.
    @cached_property
    def id(self) -> str:
        """The run's id; for an evaluation, with the id of the run whose checkpoint it evaluates in front."""
        return f"{self.path.parents[1].name}.{self.path.name}" if self._is_evaluation else self.path.name

    info_file = path_below("run.json")
    config_file = path_below("config.yaml")
    code = path_below("code")
    script = path_below("job.sbatch")
    manifest = path_below("manifest.yaml")  # in its place for another engine than SLURM
    attempts = path_below("attempts")
    checkpoints = path_below("checkpoints")
    metrics_file = path_below("metrics.jsonl")
    events_file = path_below("events.jsonl")
    tensorboard = path_below("tensorboard")
    loggers = path_below("loggers")  # notes on loggers outside of the run directory: which steps they have
    evaluations = path_below("evaluations")  # folders of evaluation jobs, each of which is like a run's
    profiles = path_below("profiles")  # folders of profiles
    evaluations_file = path_below("evaluations.jsonl")  # metrics of evaluation jobs, in the format of metrics.jsonl
    result_file = path_below("result.json")  # of an evaluation
    request_file = path_below("request.json")  # a person's request: `cancel`, `preempt`, `requeue`
    interrupted_file = path_below("interrupted.json")  # the step at which `drill` has interrupted this run of its own

    # Files that anybody who may write here can make, with `touch`.
    stop_switch = path_below("stop")  # to end the run for good, as `cancel` does
    save_switch = path_below("save")  # to have a checkpoint saved now
    profile_switch = path_below("profile")  # to have some steps profiled

    def attempt(self, number: int) -> AttemptDir:
        return AttemptDir(self.attempts / f"{number:04d}")

    @property
    def code_record_file(self) -> Path:
        """The record of the snapshot; that of the runs of a sweep, which share one, lies in the sweep's folder."""
        return (self.code.resolve().parent if self.code.is_symlink() else self.path) / "code.json"

    @property
    def program_folders(self) -> tuple[Path, ...]:
        """The folders of files that a program of the user's own names by a relative path.

        They are the run directory, and the program's working directory.
        """
        return tuple(dict.fromkeys((self.path, self.path / (self.info().get("workdir") or "."))))

    def logger_file(self, name: str) -> Path:
        return self.loggers / f"{name}.json"

    def evaluation(self, step: int, variant: str = "") -> RunDir:
        """Return the folder of the evaluation of the checkpoint of `step`.

        `variant` distinguishes evaluations with other overrides.
        """
        return RunDir(self.evaluations / (f"step_{step:07d}" + (f"-{variant}" if variant else "")))

    @property
    def environments(self) -> Path:
        """The folder of this user's archives of environments, beside the runs; evaluations use that of their run."""
        run = self.evaluated_run or self
        return run.path.parent.parent / f"{ENVIRONMENTS}{os.getuid()}"

    @property
    def evaluated_run(self) -> RunDir | None:
        """The run whose checkpoint an evaluation evaluates; None for a run."""
        return RunDir(self.path.parents[1]) if self._is_evaluation else None

    @cached_property
    def _is_evaluation(self) -> bool:
        return self.path.parent.name == "evaluations"

    def profile(self, first: int, number: int = 1) -> Path:
        """Return the folder of a profile that begins with step `first`; of the second one that does, with number 2."""
        return self.profiles / (f"step_{first:07d}" + (f".{number}" if number > 1 else ""))

    def job_log(self, job_id: str) -> Path | None:
        """Return the log of a job's batch script; None when the job has not begun here.

        For an array, it is in the folder above.
        """
        paths = (os.path.join(folder, f"slurm-{job_id}.log") for folder in (self.path, self.path.parent))
        found = next((path for path in paths if os.path.lexists(path)), None)
        return Path(found) if found is not None else None

    # The contents of the files.
    def all_evaluations(self) -> list[RunDir]:
        """Return the evaluations, by step."""
        return [RunDir(path.parent) for path in sorted(self.evaluations.glob("*/run.json"))]

    def measured(self) -> dict[str, float]:
        """Return the metrics of an evaluation by name; nothing before it is done."""
        metrics = (read_json(self.result_file) or {}).get("metrics")
        if not isinstance(metrics, dict):
            return {}
        return {name: value for name, value in metrics.items() if records.is_scalar(value)}

    def measured_at(self) -> float | None:
        """Return when an evaluation was done, in unix seconds."""
        time: object = (read_json(self.result_file) or {}).get("time")
        return float(time) if records.is_time(time) else None

    def exists(self) -> bool:
        """Return whether this is a run, or one being created: `create` makes two folders.

        Run.json comes after the code is copied.
        """
        return os.path.isfile(self.info_file) or (os.path.isdir(self.attempts) and os.path.isdir(self.checkpoints))

    def info(self, *, whole: bool = False) -> dict[str, Any]:
        """Return run.json: id, name, overrides, config hash, code revision, user, host, job ids.

        The fields have their types. A copy of a run has no jobs: those are of the original, which `copied_from` names.

        Args:
            whole: require all fields that `submit` writes; callers that have asked for the run's state have checked
                that.

        Raises:
            UnreadableRecordError: this is not a run directory, or its run.json cannot be used.
        """
        info = read_json(self.info_file)
        if info is None:
            raise UnreadableRecordError(f"{self.path} is not a run directory: it has no readable run.json")
        if whole and (missing := [name for name in ALWAYS if name not in info]):
            raise UnreadableRecordError(f"{self.info_file} does not say {', '.join(missing)}")
        records.typed(RunInfo, info, self.info_file)
        original = copied_from(self.path, info)
        return info if original is None else {**info, "job_ids": [], "chain": None, "copied_from": str(original)}

    def config_values(self) -> Any:
        """Return config.yaml as plain values, of whichever version of the schema.

        Raises:
            UnreadableRecordError: there is none, or it is no YAML as `submit` writes it.
        """
        try:
            return records.parse_yaml(records.read_bytes(self.config_file))
        except OSError as error:
            raise UnavailableRecordError(f"{self.config_file} cannot be read: {error.strerror}", error) from None
        except (ValueError, TypeError):
            raise UnreadableRecordError(
                f"{self.config_file} is no YAML", hint="it was written at submit; has it been edited?"
            ) from None

    def slurm_conf(self) -> str | None:
        """Return the slurm.conf by which SLURM's commands reach the run's cluster; None: this machine's own.

        A slurm.conf names libraries that those commands load, so it is used only if nobody but this user and root can
        have written it and the run.json that names it; or if it is the one that this shell uses anyway.

        Raises:
            ClusterError: somebody else can have written one of them.
            UnreadableRecordError: run.json cannot be used.
        """
        return trusted_slurm_conf(self.info().get("slurm_conf"), named_by=self.info_file)

    def changed_keys(self) -> frozenset[str]:
        """Return the fields of the config that a person has changed since the run was submitted (`resume RUN KEY=VALUE`)."""
        words = [word for change in self._changes() for word in change.get("set") or ()]
        return frozenset(str(word).partition("=")[0].lstrip("+") for word in words)

    def changed_at(self) -> float:
        """Return when a person last changed the run's config or code, in unix seconds; 0 if nobody has."""
        return max((finite(change.get("time")) or 0.0 for change in self._changes()), default=0.0)

    def _changes(self) -> list[dict[str, Any]]:
        changes = (read_json(self.info_file) or {}).get("changes")
        return [change for change in changes if isinstance(change, dict)] if isinstance(changes, list) else []

    def update_info(self, **changes: Any) -> None:
        """Replace fields of run.json. Raises as `info`."""
        with self._changing_info():
            write_json(self.info_file, {**self.info(), **changes})

    def add_job(self, job_id: str, **changes: Any) -> None:
        """Record the run's latest job, and replace other fields of run.json. Raises as `info`."""
        with self._changing_info():
            info = self.info()
            write_json(self.info_file, {**info, **changes, "job_ids": [*info["job_ids"], job_id]})

    def make_up_job(self, job_id: str, submitted: float, **changes: Any) -> bool:
        """Record a job that was submitted a while ago, before those that were submitted later.

        The order is that of the submissions: SLURM's ids begin anew on a cluster that is set up again.

        Args:
            submitted: time of its submission in unix seconds.
            changes: other fields of run.json.

        Returns:
            False if the job is recorded already; nothing is changed then.

        Raises:
            UnreadableRecordError: there is no usable run.json.
        """
        with self._changing_info():
            info = self.info()
            job_ids = list(info["job_ids"])
            if job_id in job_ids:
                return False
            events = [event for event in self.events() if event["event"] == Event.SUBMITTED] if job_ids else []
            # An event that is added here also says when that job was submitted.
            later = [
                event.get("job_id") for event in events if (finite(event.get("submitted")) or event["time"]) > submitted
            ]
            place = next((index for index, each in enumerate(job_ids) if each in later), len(job_ids))
            job_ids.insert(place, job_id)
            write_json(self.info_file, {**info, **changes, "job_ids": job_ids}, durable=False)
            return True

    @contextlib.contextmanager
    def _changing_info(self) -> Iterator[None]:
        """Hold a lock while run.json is read, changed and written: the running job does that, too, on another host.

        The lock is on events.jsonl, which is never replaced. If it cannot be had, run.json is changed without it.
        """
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                stack.enter_context(records.locked(self.events_file, at_most_s=INFO_LOCK_S))
            yield

    def event(self, name: Event, **facts: Any) -> None:
        """Append one line to events.jsonl, a file of this user, under a lock: ranks of all nodes and login nodes write it.

        Raises:
            OSError: it cannot be written.
        """
        line = json.dumps({"time": round(time.time(), 3), "event": name, **redacted(facts)}) + "\n"
        records.append_line(self.events_file, line, lock_s=EVENT_LOCK_S)

    def take_switch(self, switch: Path, event: Event, act: Callable[[], object] = lambda: None) -> bool:
        """Remove a switch, such as `stop_switch`, and return whether it was there; record then who had made it.

        It works once: the next attempt must not find it again. A storage that fails just then gives False, and a record
        that cannot be written is left out.

        Args:
            act: what it asks for; it is done before the record, which may wait for a lock.
        """
        try:
            owner = switch.stat().st_uid
            switch.unlink()
        except OSError:
            return False
        act()
        with contextlib.suppress(OSError):
            self.event(event, uid=owner)
        return True

    def events(self) -> list[dict[str, Any]]:
        """Return the run's events, oldest first, each with at least its `event` and `time`.

        Torn and foreign lines are left out.

        Raises:
            UnreadableRecordError: events.jsonl is not a regular file, or cannot be read.
        """
        lines = records.read_tail(self.events_file, records.EVENTS_BYTES).splitlines()
        lines = [line for line in lines if line.endswith(b"}")]
        # One call for all lines takes half the time; a torn one among them makes it fail, or counts for several.
        found = records.parse(b"[%s]" % b",".join(lines))
        if not isinstance(found, list) or len(found) != len(lines):
            found = [records.parse(line) for line in lines]
        known = [each for each in found if type(each) is dict and type(each.get("event")) is str]
        return [each for each in known if records.is_time(each.get("time"))]

    def attempt_numbers(self) -> list[int]:
        """Return the numbers of the attempts, in order.

        Raises:
            UnreadableRecordError: the folder cannot be read.
        """
        try:
            with os.scandir(self.attempts) as entries:
                found = [e.name for e in entries if e.is_dir(follow_symlinks=False)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise UnavailableRecordError(f"{self.attempts} cannot be read: {error.strerror}", error) from None
        return sorted(int(name) for name in found if name.isdecimal() and name.isascii() and len(name) <= 9)

    @property
    def workdir(self) -> Path:
        """The working directory of the ranks: in the snapshot, or where a run without one was submitted."""
        return self.path / str(self.info()["workdir"])

    def new_attempt(self) -> int:
        """Claim the next attempt number by creating its folder. Two claimants never get the same one."""
        self.attempts.mkdir(mode=folder_mode(self.path), exist_ok=True)
        number = (self.attempt_numbers() or [0])[-1] + 1
        while True:
            try:
                self.attempt(number).path.mkdir(mode=folder_mode(self.attempts))
                return number
            except FileExistsError:
                number += 1


# Where a run or a sweep was made: a copy of its folder is another one, whose jobs are not those of the original.


def made_at(folder: Path, path: Path | None = None) -> dict[str, Any]:
    """Return the facts by which a folder is told from a copy of it, for its run.json or sweep.json.

    Args:
        path: the path that the folder will be renamed to; None: it stays.
    """
    found = os.stat(folder)
    return {"path": str(path or folder), "device": found.st_dev, "inode": found.st_ino}


def copied_from(folder: Path, info: Mapping[str, Any]) -> Path | None:
    """Return the path of the original if a folder is a copy; None if it is where it was made, or was moved.

    A move within a file system keeps the inode. A move to another one does not, but leaves nothing at the old path.

    Args:
        info: the contents of its run.json or sweep.json.
    """
    made = info.get("made_at")
    if not isinstance(made, dict) or made.get("path") == str(folder):
        return None
    original = Path(str(made.get("path")))
    try:
        here = os.stat(folder)
        # The number of a device differs between hosts, so only the inode tells that this is the original.
        if here.st_ino == made.get("inode"):
            return None
        return original if here.st_dev == made.get("device") or os.path.lexists(original) else None
    except OSError:  # the folder cannot be looked at, or the path is none
        return None
