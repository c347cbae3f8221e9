"""The run directory: the one thing that login node and job share.

It is created exclusively at submit, named there once, and never derived again. Every path below it is spelled here
and nowhere else; every verb works from it alone.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmtrain.errors import ConfigError, UsageError
from slurmtrain.paths import absolute, located
from slurmtrain.redaction import redacted

RUN_DIR_VARIABLE = "SLURMTRAIN_RUN_DIR"
PREPARING = ".preparing"  # below runs/: sweeps in the making; deep enough that no verb takes what is in it for runs
ATTEMPT_VARIABLE = "SLURMTRAIN_ATTEMPT"


@dataclass(frozen=True)
class RunDir:
    """Paths and small files of one run. Holds no state of its own."""

    path: Path

    # Files and folders, in the order in which a run makes them.
    @property
    def id(self) -> str:
        """Of an evaluation, with the id of the run whose checkpoint it is of."""
        return f"{self.path.parents[1].name}.{self.path.name}" if self._is_evaluation else self.path.name

    @property
    def info_file(self) -> Path:
        return self.path / "run.json"

    @property
    def config_file(self) -> Path:
        return self.path / "config.yaml"

    @property
    def code(self) -> Path:
        return self.path / "code"

    @property
    def script(self) -> Path:
        return self.path / "job.sbatch"

    @property
    def attempts(self) -> Path:
        return self.path / "attempts"

    def attempt(self, number: int) -> Path:
        return self.attempts / f"{number:04d}"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def events_file(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def evaluations(self) -> Path:
        """Folders of evaluations that are not made by the run's own ranks, each like a run's."""
        return self.path / "evaluations"

    def evaluation(self, step: int, variant: str = "") -> RunDir:
        """Of the checkpoint of `step`; `variant` tells apart those that differ in more."""
        return RunDir(self.evaluations / (f"step_{step:07d}" + (f"-{variant}" if variant else "")))

    @property
    def evaluations_file(self) -> Path:
        """What they have measured, a line each; as in metrics.jsonl."""
        return self.path / "evaluations.jsonl"

    @property
    def result_file(self) -> Path:
        """Of an evaluation: what it has measured."""
        return self.path / "result.json"

    @property
    def evaluated_run(self) -> RunDir | None:
        """Of an evaluation: the run whose checkpoint it is of."""
        return RunDir(self.path.parents[1]) if self._is_evaluation else None

    @property
    def _is_evaluation(self) -> bool:
        return self.path.parent.name == "evaluations"

    @property
    def request_file(self) -> Path:
        """What a person asked of the running job: written by `cancel`, `preempt` and `requeue`."""
        return self.path / "request.json"

    @property
    def stop_switch(self) -> Path:
        """A file that anybody who may write here can make, with `touch`: end the run for good, as `cancel` does."""
        return self.path / "stop"

    @property
    def save_switch(self) -> Path:
        """The same: save a checkpoint now, and go on."""
        return self.path / "save"

    def job_log(self, job_id: str) -> Path | None:
        """What the batch script of a job has printed; None when the job has not begun here. Of an array: the folder above."""
        paths = (folder / f"slurm-{job_id}.log" for folder in (self.path, self.path.parent))
        return next((path for path in paths if path.exists()), None)

    # What is in them.
    def all_evaluations(self) -> list[RunDir]:
        """By step."""
        return [RunDir(path.parent) for path in sorted(self.evaluations.glob("*/run.json"))]

    def measured(self) -> dict[str, float]:
        """Of an evaluation: its metrics by name; nothing before it is done."""
        metrics: dict[str, float] = (read_json(self.result_file) or {}).get("metrics", {})
        return metrics

    def measured_at(self) -> float | None:
        """Of an evaluation: when it was done, unix seconds."""
        return (read_json(self.result_file) or {}).get("time")

    def exists(self) -> bool:
        """Is this a run, or one in the making? `create` makes two folders; run.json comes after the code is copied."""
        return self.info_file.is_file() or (self.attempts.is_dir() and self.checkpoints.is_dir())

    def info(self) -> dict[str, Any]:
        """run.json: id, name, overrides, config hash, code revision, user, host, job ids.

        Raises:
            UsageError: this is not a run directory.
        """
        info = read_json(self.info_file)
        if info is None:
            raise UsageError(f"{self.path} is not a run directory: it has no readable run.json")
        return info

    def update_info(self, **changes: Any) -> None:
        write_json(self.info_file, {**self.info(), **changes})

    def event(self, name: str, **facts: Any) -> None:
        """Append one line to events.jsonl. O_APPEND keeps lines of several writers whole."""
        line = json.dumps({"time": round(time.time(), 3), "event": name, **redacted(facts)}) + "\n"
        descriptor = os.open(self.events_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)

    def events(self) -> list[dict[str, Any]]:
        if not self.events_file.exists():
            return []
        return [json.loads(line) for line in self.events_file.read_text().splitlines() if line.endswith("}")]

    def attempt_numbers(self) -> list[int]:
        if not self.attempts.is_dir():
            return []
        return sorted(int(path.name) for path in self.attempts.iterdir() if path.name.isdigit())

    def new_attempt(self) -> int:
        """Claim the next attempt number by creating its folder. Two claimants never get the same one.

        The batch script does the same in bash, before any Python of ours runs.
        """
        self.attempts.mkdir(mode=0o700, exist_ok=True)
        number = (self.attempt_numbers() or [0])[-1] + 1
        while True:
            try:
                self.attempt(number).mkdir(mode=0o700)
                return number
            except FileExistsError:
                number += 1


def is_sweep(folder: Path) -> bool:
    """A folder under the runs that holds the points of one sweep."""
    return os.path.isfile(folder / "sweep.json")  # not in a folder that cannot be read


def new_run_id() -> str:
    """Sorts by time, to the millisecond; the random part keeps two of the same moment apart."""
    now = time.time()
    return f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}-{int(now * 1000) % 1000:03d}{secrets.token_hex(1)}"


def create(runs_dir: Path, name: str) -> RunDir:
    """Create a run directory that did not exist before, mode 0700.

    Raises:
        ConfigError: the folder cannot be created.
    """
    try:
        (runs_dir / name).mkdir(parents=True, exist_ok=True)
        while True:
            path = runs_dir / name / new_run_id()
            try:
                path.mkdir(mode=0o700)
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
        folder.mkdir(mode=0o700)
    return run_dir


def runs_root() -> Path:
    """Where `submit` puts runs unless job.runs_dir says otherwise, and where verbs look: SLURMTRAIN_RUNS, else ./runs."""
    return Path(os.environ.get("SLURMTRAIN_RUNS") or "runs").expanduser()


def reference(run_dir: RunDir) -> str:
    """What a person types to mean this run: its id where the verbs find it, else its path."""
    found = run_dir.path.parent.parent == located(runs_root())
    return run_dir.id if found else shlex.quote(str(run_dir.path))


def all_runs(root: Path) -> list[RunDir]:
    """Every run under `root`, oldest first. A hidden folder is one that is being removed."""
    files = [f for f in root.glob("*/*/run.json") if not f.parent.name.startswith(".") and os.access(f, os.R_OK)]
    return [RunDir(located(file.parent)) for file in sorted(files, key=lambda file: file.parent.name)]


def unreadable(root: Path) -> list[Path]:
    """Runs and sweeps under `root`, or whole folders of them, that belong to somebody else and are not for us."""
    found = []
    for folder in _visible_folders(root):
        if _closed(folder):
            found.append(folder)
        elif not is_sweep(folder):
            found += [run for run in _visible_folders(folder) if _closed(run)]
    return sorted(found)


def _visible_folders(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*") if os.path.isdir(path) and not path.name.startswith(".")]


def _closed(folder: Path) -> bool:
    info = folder / ("sweep.json" if is_sweep(folder) else "run.json")
    return not os.access(folder, os.R_OK | os.X_OK) or (info.exists() and not os.access(info, os.R_OK))


def refuse_unreadable(reference: str, root: Path) -> None:
    """Raises: UsageError: what the person means is there and cannot be read."""
    named = Path(reference)
    for path in [named] if named.is_dir() and _closed(named) else unreadable(root):
        if path == named or path.name.startswith(reference):
            raise UsageError(
                f"{path} cannot be read: it belongs to user {path.stat().st_uid}",
                hint="ask for it to be shared: chmod -R g+rX",
            )


def find(reference: str, root: Path) -> RunDir:
    """The run that a person means: an id, a unique prefix of one, a path, or "last".

    Raises:
        UsageError: none or several match.
    """
    path = Path(reference)
    if (path / "run.json").is_file():
        return RunDir(located(path))
    runs = all_runs(root)
    if not runs:
        refuse_unreadable(reference, root)
        raise nothing_under(root, "runs")
    if reference == "last":
        return runs[-1]
    matching = [run for run in runs if run.id.startswith(reference)]
    if len(matching) == 1:
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
    return UsageError(
        f"there are no {what} under {absolute(root)}",
        hint="go to the folder where submit was typed, or set SLURMTRAIN_RUNS to its runs folder",
    )


def disk_usage(path: Path) -> int:
    """Bytes of a file, or of all files below a folder."""
    total = os.lstat(path).st_size if path.is_file() else 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except OSError:  # it goes away just now
                continue
    return total


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file, or None when it is missing or torn."""
    try:
        value = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return None
    return value if isinstance(value, dict) else None


def write_json(path: Path, value: dict[str, Any], *, durable: bool = True) -> None:
    """`write_text` of an object, without secrets."""
    write_text(path, json.dumps(redacted(value), indent=1) + "\n", durable=durable)


def write_text(path: Path, text: str, *, durable: bool = True) -> None:
    """Replace a file in one step: a reader sees the old or the new one, never half of it; other links keep the old one.

    Args:
        durable: wait until it is on the disk; not for thousands of files that can be made again.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(2)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    temporary.replace(path)
