"""The run directory: the one thing that login node and job share.

It is created exclusively at submit, its path is decided there once, and never derived again. Every path below it is
defined here and nowhere else; every verb works from it alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pwd
import re
import secrets
import shlex
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from slurmtrain import records
from slurmtrain.errors import ClusterError, ConfigError, UnreadableRecord, UsageError
from slurmtrain.modes import file_mode, folder_mode
from slurmtrain.paths import absolute, located
from slurmtrain.records import COUNT, FLAG, JOB_IDS, NOTHING, OBJECT, TEXT, TEXTS, TIME, finite
from slurmtrain.redaction import redacted

RUN_DIR_VARIABLE = "SLURMTRAIN_RUN_DIR"
PREPARING = ".preparing"  # below runs/: sweeps in the making; deep enough that no verb takes what is in it for runs
ATTEMPT_VARIABLE = "SLURMTRAIN_ATTEMPT"

INFO_LOCK_S = 10.0  # longest wait for somebody who changes run.json, which takes milliseconds
INFO_LOCK_POLL_S = 0.01

# The fields of run.json: those that every run has, and those that some have.
_ALWAYS = {
    "name": TEXT,
    "overrides": TEXTS,
    "backend": TEXT,
    "user": TEXT,
    "host": TEXT,
    "created": TIME,
    "slurm_conf": TEXT | NOTHING,
    "job_ids": JOB_IDS,
}
_SOMETIMES = {
    "config_hash": TEXT,
    "steps": COUNT | NOTHING,
    "code": OBJECT | NOTHING,
    "workdir": TEXT,
    "submit_dir": TEXT,
    "packed": FLAG | NOTHING,
    "chain": JOB_IDS | NOTHING,
    "chain_after": COUNT | NOTHING,
    "varied": OBJECT | TEXTS | NOTHING,
    "changing": COUNT | NOTHING,
}


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

    @cached_property
    def info_file(self) -> Path:
        return self.path / "run.json"

    @property
    def config_file(self) -> Path:
        return self.path / "config.yaml"

    @property
    def code(self) -> Path:
        return self.path / "code"

    @property
    def program_folders(self) -> tuple[Path, ...]:
        """The folders of files that a program of the user's own names by a relative path.

        They are the run directory, and the program's working directory.
        """
        return tuple(dict.fromkeys((self.path, self.path / (self.info().get("workdir") or "."))))

    @property
    def script(self) -> Path:
        return self.path / "job.sbatch"

    @cached_property
    def attempts(self) -> Path:
        return self.path / "attempts"

    def attempt(self, number: int) -> Path:
        return self.attempts / f"{number:04d}"

    @cached_property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @cached_property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @cached_property
    def events_file(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @cached_property
    def evaluations(self) -> Path:
        """The folder of the folders of evaluation jobs, each of which is like a run's."""
        return self.path / "evaluations"

    def evaluation(self, step: int, variant: str = "") -> RunDir:
        """Return the folder of the evaluation of the checkpoint of `step`.

        `variant` distinguishes evaluations with other overrides.
        """
        return RunDir(self.evaluations / (f"step_{step:07d}" + (f"-{variant}" if variant else "")))

    @cached_property
    def evaluations_file(self) -> Path:
        """The file of the metrics of evaluation jobs, one per line, in the format of metrics.jsonl."""
        return self.path / "evaluations.jsonl"

    @property
    def result_file(self) -> Path:
        """The file of the result of an evaluation."""
        return self.path / "result.json"

    @property
    def evaluated_run(self) -> RunDir | None:
        """The run whose checkpoint an evaluation evaluates; None for a run."""
        return RunDir(self.path.parents[1]) if self._is_evaluation else None

    @cached_property
    def _is_evaluation(self) -> bool:
        return self.path.parent.name == "evaluations"

    @cached_property
    def request_file(self) -> Path:
        """The file of a person's request to the running job, written by `cancel`, `preempt` and `requeue`."""
        return self.path / "request.json"

    @property
    def stop_switch(self) -> Path:
        """A file that anybody who may write here can make, with `touch`, to end the run for good, as `cancel` does."""
        return self.path / "stop"

    @property
    def save_switch(self) -> Path:
        """A file that anybody who may write here can make, with `touch`, to have a checkpoint saved now."""
        return self.path / "save"

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
        return {name: value for name, value in metrics.items() if _is_value(value)} if isinstance(metrics, dict) else {}

    def measured_at(self) -> float | None:
        """Return when an evaluation was done, in unix seconds."""
        time: object = (read_json(self.result_file) or {}).get("time")
        return float(time) if records.is_time(time) else None  # type: ignore[arg-type]

    def exists(self) -> bool:
        """Return whether this is a run, or one being created: `create` makes two folders.

        Run.json comes after the code is copied.
        """
        return os.path.isfile(self.info_file) or (os.path.isdir(self.attempts) and os.path.isdir(self.checkpoints))

    def info(self, *, whole: bool = False) -> dict[str, Any]:
        """Return run.json: id, name, overrides, config hash, code revision, user, host, job ids.

        The fields have their types.

        Args:
            whole: require all fields that `submit` writes; callers that have asked for the run's state have checked
                that.

        Raises:
            UnreadableRecord: this is not a run directory, or its run.json cannot be used.
        """
        info = read_json(self.info_file)
        if info is None:
            raise UnreadableRecord(f"{self.path} is not a run directory: it has no readable run.json")
        missing = [name for name in _ALWAYS if name not in info]
        if missing and whole:
            raise UnreadableRecord(f"{self.info_file} does not say {', '.join(missing)}")
        records.check_fields(info, {**_ALWAYS, **_SOMETIMES}, self.info_file)
        return info

    def config_values(self) -> Any:
        """Return config.yaml as plain values, of whichever version of the schema.

        Raises:
            UnreadableRecord: there is none, or it is no YAML as `submit` writes it.
        """
        import yaml

        class Plain(yaml.SafeLoader):
            """A loader that refuses aliases, which `submit` does not write.

            A few lines of aliases expand to more values than fit anywhere.
            """

            def compose_node(self, parent: Any, index: Any) -> Any:
                if self.check_event(yaml.AliasEvent):
                    raise yaml.YAMLError("an alias")
                return super().compose_node(parent, index)

        try:
            return yaml.load(records.read_bytes(self.config_file), Plain)
        except OSError as error:
            raise UnreadableRecord(f"{self.config_file} cannot be read: {error.strerror}") from None
        except (ValueError, TypeError, RecursionError, yaml.YAMLError):
            raise UnreadableRecord(
                f"{self.config_file} is no YAML", hint="it was written at submit; has it been edited?"
            ) from None

    def slurm_conf(self) -> str | None:
        """Return the slurm.conf by which SLURM's commands reach the run's cluster; None: this machine's own.

        A slurm.conf names libraries that those commands load, so it is used only if nobody but this user, root and the
        account `slurm` can have written it, and nobody but this user and root the run.json that names it; or if it is
        the one that this shell uses anyway.

        Raises:
            ClusterError: somebody else can have written one of them.
            UnreadableRecord: run.json cannot be used.
        """
        return trusted_slurm_conf(self.info().get("slurm_conf"), named_by=self.info_file)

    def changed_keys(self) -> frozenset[str]:
        """Return the fields of the config that a person has changed since the run was submitted (`resume RUN --set`)."""
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
            UnreadableRecord: there is no usable run.json.
        """
        with self._changing_info():
            info = self.info()
            job_ids = list(info["job_ids"])
            if job_id in job_ids:
                return False
            events = [event for event in self.events() if event["event"] == "submitted"] if job_ids else []
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

        The lock is on events.jsonl, which is never replaced. NFS passes flock(2) on to its server, and it ends with the
        process that holds it. If a file system has no locks, or a process that was suspended holds it, run.json is
        changed without it.
        """
        try:
            descriptor = records.open_to_append(self.events_file)
        except OSError:
            yield
            return
        try:
            give_up = time.monotonic() + INFO_LOCK_S
            while time.monotonic() < give_up:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(INFO_LOCK_POLL_S)
                except OSError:
                    break
            yield
        finally:
            os.close(descriptor)

    def event(self, name: str, **facts: Any) -> None:
        """Append one line to events.jsonl, a file of this user.

        Raises:
            OSError: it cannot be written.
        """
        line = json.dumps({"time": round(time.time(), 3), "event": name, **redacted(facts)}) + "\n"
        records.append_line(self.events_file, line)

    def events(self) -> list[dict[str, Any]]:
        """Return the run's events, oldest first, each with at least its `event` and `time`.

        Torn and foreign lines are left out.

        Raises:
            UnreadableRecord: events.jsonl is not a regular file, or cannot be read.
        """
        lines = records.read_tail(self.events_file, records.EVENTS_BYTES).splitlines()
        found = [records.parse(line) for line in lines if line.endswith(b"}")]
        return [each for each in found if _is_event(each)]

    def attempt_numbers(self) -> list[int]:
        """Return the numbers of the attempts, in order.

        Raises:
            UnreadableRecord: the folder cannot be read.
        """
        try:
            with os.scandir(self.attempts) as entries:
                found = [e.name for e in entries if e.is_dir(follow_symlinks=False)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise UnreadableRecord(f"{self.attempts} cannot be read: {error.strerror}") from None
        return sorted(int(name) for name in found if re.fullmatch("[0-9]{1,9}", name))

    def new_attempt(self) -> int:
        """Claim the next attempt number by creating its folder. Two claimants never get the same one.

        The batch script does the same in bash, before any Python of ours runs.
        """
        self.attempts.mkdir(mode=folder_mode(self.path), exist_ok=True)
        number = (self.attempt_numbers() or [0])[-1] + 1
        while True:
            try:
                self.attempt(number).mkdir(mode=folder_mode(self.attempts))
                return number
            except FileExistsError:
                number += 1


def _is_event(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("event"), str) and records.is_time(value.get("time"))


def _is_value(value: object) -> bool:
    """Return whether a value is a number, NaN and the infinities included."""
    return isinstance(value, float) or records.is_number(value)


def trusted_slurm_conf(conf: str | None, *, named_by: Path, known: dict[str, str | None] | None = None) -> str | None:
    """Return the slurm.conf that a record names, if only users whom this user has to trust can have written both.

    The account `slurm`, as which slurmctld runs on most clusters, decides what root's slurmd starts. So it may own the
    file, in a folder that root has given it.

    Args:
        conf: its path; None: this machine's own.
        named_by: the record.
        known: as for `records.why_distrusted`.

    Raises:
        ClusterError: somebody else can have written one of them.
    """
    if conf is None or conf == os.environ.get("SLURM_CONF"):
        return conf
    why = records.why_distrusted(named_by, known)
    if why is not None and records.only_mine(named_by):
        why = None
    if why is None and os.path.lexists(conf):
        why = records.why_distrusted(conf, known)
        if why is not None and _is_of_slurm(conf):
            why = None
    if why is not None:
        raise ClusterError(
            f"{named_by} names {conf}, which is not used, because it may be somebody else's work: {why}",
            hint=f"if you trust it: export SLURM_CONF={shlex.quote(conf)}",
        )
    return conf


def _is_of_slurm(path: str) -> bool:
    account = _slurm_account()
    return account is not None and records.only_of_account(path, account)


def _slurm_account() -> int | None:
    try:
        return pwd.getpwnam("slurm").pw_uid
    except KeyError:
        return None


def is_sweep(folder: Path | str) -> bool:
    """Return whether a folder under the runs holds the points of one sweep."""
    return os.path.isfile(os.path.join(folder, "sweep.json"))  # not in a folder that cannot be read


def new_run_id() -> str:
    """Return an id that sorts by time, to the millisecond; its random part distinguishes two of the same moment."""
    now = time.time()
    return f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}-{int(now * 1000) % 1000:03d}{secrets.token_hex(1)}"


def create(runs_dir: Path, name: str) -> RunDir:
    """Create a run directory that did not exist before, mode 0700, or 0750 in a team's folder.

    Raises:
        ConfigError: the folder cannot be created.
    """
    try:
        make_folder(runs_dir, name)
        while True:
            path = runs_dir / name / new_run_id()
            try:
                path.mkdir(mode=folder_mode(path.parent))
                break
            except FileExistsError:
                continue
    except OSError as error:
        raise ConfigError(
            f"cannot create a run directory under {runs_dir}: {error.strerror}",
            hint="set job.runs_dir to a folder that you may write and that the compute nodes see",
        ) from None
    run_dir = RunDir(located(path))
    for folder in (run_dir.attempts, run_dir.checkpoints):
        folder.mkdir(mode=folder_mode(run_dir.path))
    return run_dir


def make_folder(runs_dir: Path, *names: str) -> None:
    """Make the folders in which runs of several people may lie, and check that nobody else can replace what is in them.

    A user who may rename a run's directory can put another in its place, and the next attempt runs that. In a team's
    folder (of a group, with the setgid bit) the folders made here are the group's, too, and sticky: each member can add
    runs, and rename none but their own.

    Raises:
        OSError: a folder cannot be made.
        ConfigError: everybody, or the owner of a folder, can replace what is in it.
    """
    runs_dir.parent.mkdir(parents=True, exist_ok=True)
    above, folder = runs_dir.parent, runs_dir
    for folder in (runs_dir, *(runs_dir.joinpath(*names[:depth]) for depth in range(1, len(names) + 1))):
        try:
            os.mkdir(folder, 0o775)
        except FileExistsError:
            pass
        else:
            team = os.stat(above)
            if team.st_mode & stat.S_ISGID and team.st_mode & stat.S_IWGRP:
                os.chmod(folder, stat.S_IMODE(os.stat(folder).st_mode) | stat.S_IRWXG | stat.S_ISGID | stat.S_ISVTX)
        _check_folder(folder)
        above = folder


def _check_folder(folder: Path) -> None:
    """Raise ConfigError if a user who is in no group with this user can replace what is in a folder."""
    found = os.stat(folder)
    hint = "set job.runs_dir or job.name to a folder of your own, or of your group"
    if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        raise ConfigError(
            f"everybody may replace what is in {folder} (mode {stat.S_IMODE(found.st_mode):04o}), and a job would run that",
            hint=f"chmod o-w {folder}, or chmod +t",
        )
    own = found.st_uid in (os.geteuid(), 0)
    ours = found.st_mode & stat.S_IWGRP and found.st_gid in (os.getegid(), *os.getgroups())
    if not own and not ours and os.access(folder, os.W_OK):
        raise ConfigError(
            f"{folder} belongs to user {found.st_uid}, who may replace what is in it, and a job would run that",
            hint=hint,
        )


def runs_root() -> Path:
    """Return where `submit` puts runs unless job.runs_dir says otherwise, and where verbs look.

    It is SLURMTRAIN_RUNS, else ./runs.
    """
    return Path(os.environ.get("SLURMTRAIN_RUNS") or "runs").expanduser()


def reference(run_dir: RunDir) -> str:
    """Return what a person types to mean this run: its id if the verbs find it, else its path."""
    found = run_dir.path.parent.parent == located(runs_root())
    return run_dir.id if found else shlex.quote(str(run_dir.path))


def all_runs(root: Path) -> list[RunDir]:
    """Return every run under `root`, oldest first.

    Hidden folders, which are being removed, and links of somebody else are left out.
    """
    found: list[tuple[str, RunDir]] = []
    for folder in _folders(absolute(root)):
        if foreign_link(folder):
            continue
        runs = (run for run in _folders(folder) if not run.name.startswith("."))
        own = [run for run in runs if os.access(os.path.join(run, "run.json"), os.R_OK) and not foreign_link(run)]
        place = Path(os.path.realpath(folder) if folder.is_symlink() else folder)
        found += [(run.name, RunDir(located(Path(run)) if run.is_symlink() else place / run.name)) for run in own]
    return [run_dir for _, run_dir in sorted(found, key=lambda pair: pair[0])]


def _folders(folder: str | os.PathLike[str]) -> list[os.DirEntry[str]]:
    """Return the folders in a folder, and links to folders; none if it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if _is_folder(entry)]
    except OSError:
        return []


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link in a circle, or to where nobody may look
        return False


def foreign_link(path: Path | os.DirEntry[str]) -> bool:
    """Return whether this is a link that neither this user nor root has made: it may lead anywhere."""
    if isinstance(path, os.DirEntry) and not path.is_symlink():
        return False
    found = os.lstat(path)
    return stat.S_ISLNK(found.st_mode) and found.st_uid not in (os.geteuid(), 0)


def is_own(run_dir: RunDir) -> bool:
    """Return whether the run's folder and its run.json belong to this user."""
    return all(records.is_mine(path) for path in (run_dir.path, run_dir.info_file))


def check_parts(run_dir: RunDir) -> None:
    """Check that the run has the parts that `submit` makes: folders and files of one user, and no links to elsewhere.

    Links that the reader has made, for instance to move a folder to a larger disk, are accepted.

    Raises:
        UnreadableRecord: it has others.
    """
    try:
        owner = os.stat(run_dir.path).st_uid
        me, info_file = os.geteuid(), run_dir.info_file
        for path in (info_file, run_dir.attempts, run_dir.checkpoints, run_dir.evaluations):
            try:
                found = os.lstat(path)
            except FileNotFoundError:
                continue
            if stat.S_ISLNK(found.st_mode) and (path is info_file or found.st_uid not in (me, 0)):
                raise UnreadableRecord(f"{path} is a link, and links in a run are not followed")
            if found.st_uid not in (owner, me, 0):
                raise UnreadableRecord(f"{path} belongs to user {found.st_uid}, and the run to user {owner}")
    except OSError as error:
        raise UnreadableRecord(f"{run_dir.path} cannot be read: {error.strerror}") from None


def require_own(run_dir: RunDir) -> None:
    """Check that the run belongs to this user in all its parts, before anything of it is started, changed or removed.

    The contents of a run are executed: its script by SLURM, its config by the trainer. Root is no exception.

    Raises:
        UsageError: it belongs to somebody else, or a part of it does.
    """
    run = run_dir.evaluated_run or run_dir
    for each in dict.fromkeys((run, run_dir)):
        parts = (each.info_file, each.config_file, each.script, each.events_file, each.metrics_file, each.request_file)
        folders = (each.attempts, each.checkpoints, each.evaluations, each.code)
        for path in (each.path, *parts, *folders):
            if os.path.lexists(path) and not records.is_mine(path):
                whose = os.lstat(path).st_uid
                raise UsageError(
                    f"{path} belongs to user {whose}: only who has submitted a run may change it, or start it again",
                    hint="`status` and `logs` show it; to go on from it: checkpoint.restore_from with a run of your own",
                )
        check_parts(each)


def check_not_linked(run_dir: RunDir) -> None:
    """Check that the folders of a run are in it, before something in them is removed.

    Raises:
        UsageError: one is a link to elsewhere.
    """
    for path in (run_dir.attempts, run_dir.checkpoints, run_dir.evaluations):
        if path.is_symlink():
            raise UsageError(
                f"{path} is a link to {os.path.realpath(path)}, and nothing is removed through a link",
                hint="name that folder itself, if it is to be pruned",
            )


def unreadable(root: Path) -> list[Path]:
    """Return the runs and sweeps under `root`, or whole folders of them, that belong to somebody else and are not readable."""
    found = []
    for folder in _visible_folders(root):
        if _closed(folder):
            found.append(Path(folder))
        elif not is_sweep(folder):
            found += [Path(run) for run in _visible_folders(folder) if _closed(run)]
    return sorted(found)


def _visible_folders(folder: Path | str) -> list[str]:
    return [entry.path for entry in _folders(folder) if not entry.name.startswith(".")]


def _closed(folder: Path | str) -> bool:
    if not os.access(folder, os.R_OK | os.X_OK):
        return True
    info = os.path.join(folder, "sweep.json" if is_sweep(folder) else "run.json")
    return not os.access(info, os.R_OK) and os.path.exists(info)


def refuse_unreadable(reference: str, root: Path) -> None:
    """Raise UsageError if what the person means exists and cannot be read."""
    named = Path(reference)
    for path in [named] if os.path.isdir(named) and _closed(named) else unreadable(root):
        if path == named or path.name.startswith(reference):
            raise UsageError(
                f"{path} cannot be read: it belongs to user {path.stat().st_uid}",
                hint="ask for it to be shared: chmod -R g+rX",
            )


def find(reference: str, root: Path) -> RunDir:
    """Return the run that a person means: an id, a unique prefix of one, a path, or "last", which is the last of their own.

    Raises:
        UsageError: none or several match.
    """
    path = Path(reference)
    if os.path.isfile(path / "run.json"):
        found = RunDir(located(path))
        check_parts(found)
        return found
    runs = all_runs(root)
    if not runs:
        refuse_unreadable(reference, root)
        raise nothing_under(root, "runs")
    if reference == "last":
        own = [run for run in runs if is_own(run)]
        if not own:
            raise UsageError(f"none of the runs under {root.resolve()} is yours", hint=f"the latest is {runs[-1].id}")
        return own[-1]
    # Another user can give a run any id: a run whose id was typed in full comes first, then this user's own.
    by_id = [run for run in runs if run.id == reference] or [run for run in runs if run.id.startswith(reference)]
    matching = by_id if len(by_id) == 1 else [run for run in by_id if is_own(run)] or by_id
    if len(matching) == 1:
        check_parts(matching[0])
        return matching[0]
    if not matching:
        refuse_unreadable(reference, root)
        latest = ", ".join(run.id for run in runs[-3:])
        raise UsageError(f"no run's id begins with {reference!r}", hint=f"the latest are: {latest}")
    raise UsageError(
        f"{len(matching)} runs begin with {reference!r}",
        hint="write more of the id: " + ", ".join(r.id for r in matching[:5]),
    )


def nothing_under(root: Path, what: str) -> UsageError:
    """Return the error for a folder that holds no runs or sweeps."""
    return UsageError(
        f"there are no {what} under {absolute(root)}",
        hint="go to the folder where submit was typed, or set SLURMTRAIN_RUNS to its runs folder",
    )


def disk_usage(path: Path) -> int:
    """Return the bytes of a file, or of all files below a folder. Links are not followed."""
    if path.is_symlink():
        return os.lstat(path).st_size
    total = os.lstat(path).st_size if path.is_file() else 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except OSError:  # it goes away just now
                continue
    return total


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file, or None when it is missing or torn.

    Raises:
        UnreadableRecord: it is not a regular file, too large, or cannot be read.
    """
    try:
        value = records.parse(records.read_bytes(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    return value if isinstance(value, dict) else None


def write_json(path: Path, value: dict[str, Any], *, durable: bool = True) -> None:
    """Write an object as JSON by `write_text`, without secrets."""
    write_text(path, json.dumps(redacted(value), indent=1) + "\n", durable=durable)


def write_text(path: Path, text: str, *, durable: bool = True) -> None:
    """Replace a file atomically: a reader sees the old or the new one, never half of it; other links keep the old one.

    Args:
        durable: wait until it is on the disk; not for thousands of files that can be made again.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(2)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, file_mode(path.parent))
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    temporary.replace(path)
