"""The process of one logger: it follows metrics.jsonl, and hands on what its logger does not have yet.

    python -m slurmtrain.observe.logger_process RUN_DIR NAME ATTEMPT

metrics.jsonl is the queue: it is on disk before the logger hears of it, so that a slow or failing logger holds up nothing and
misses nothing, and what a kill has cost it is made up for by the next attempt. No step is handed on twice: a logger says which
it has, or RUN/loggers/NAME.json does.

Rank 0 tells through stdin: a line `rewind` when it has dropped records of the file, a line `close ENDING SECONDS` at the
end. The end of stdin means that rank 0 is gone.
"""

from __future__ import annotations

import logging
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from slurmtrain.errors import ConfigError, SlurmtrainError, why_not_built
from slurmtrain.observe.logger import Ending, Held, LoggedRun, Logger, NewProcessNeededError
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system import records
from slurmtrain.system.files import read_json, write_json
from slurmtrain.system.redaction import redact, redacted

log = logging.getLogger(__name__)

POLL_S = 1.0  # between looks at metrics.jsonl: a file of another process has no event to await
NOTE_EVERY_S = 5.0  # between notes of what the logger has
PAUSES_S = (5.0, 15.0, 60.0)  # after the first, second, and each further error in a row
TRIES = 3  # of a record
GONE_S = 5.0  # to close in when rank 0 is gone: what has killed it may come for this process, too
AGAIN = 3  # exit code: start me again, to go on or to close
LOCK_S = 30.0  # how long the process of an attempt before may take to go
BUILT_IN = {
    "wandb": "slurmtrain.observe.wandb_logger.WandbLogger",
    "mlflow": "slurmtrain.observe.mlflow_logger.MlflowLogger",
}


class Control:
    """What rank 0 tells through a pipe."""

    def __init__(self, descriptor: int):
        self._descriptor, self._text = descriptor, b""
        self._rewound = False
        self.ending: Ending | None = None
        self.close_by: float | None = None  # in seconds of time.monotonic

    def wait(self, seconds: float) -> None:
        """Wait until rank 0 has told something, at most `seconds`."""
        deadline = time.monotonic() + seconds
        while self.ending is None:
            left = deadline - time.monotonic()
            if not select.select([self._descriptor], [], [], max(0.0, left))[0]:
                break
            data = os.read(self._descriptor, 4096)
            *lines, self._text = (self._text + data).split(b"\n")
            for line in lines:
                self._hear(line.decode(errors="replace").split())
            if not data and self.ending is None:
                self._close(Ending.FAILED, GONE_S)
            if self._rewound:
                break

    def take_rewound(self) -> bool:
        """Return whether records were dropped since this was last asked."""
        rewound, self._rewound = self._rewound, False
        return rewound

    def _hear(self, words: list[str]) -> None:
        if words[:1] == ["rewind"]:
            self._rewound = True
        elif words[:1] == ["close"]:
            self._close(Ending(words[1]), float(words[2]))

    def _close(self, ending: Ending, seconds: float) -> None:
        self.ending, self.close_by = ending, time.monotonic() + seconds


class Tail:
    """The records of a metrics file, as they come."""

    def __init__(self, path: Path):
        self._path, self._offset = path, 0

    def rewind(self) -> None:
        """Begin again at the first record."""
        self._offset = 0

    def new(self) -> Iterator[dict[str, Any]]:
        """Yield the whole records since the last call."""
        rest = b""
        for piece in records.pieces(self._path, self._offset):
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                self._offset += len(line) + 1
                record = records.parse(line)
                if isinstance(record, dict) and records.is_count(record.get("step")):
                    yield record


def is_evaluation(record: dict[str, Any]) -> bool:
    """Return whether a record of metrics.jsonl is of an evaluation: one of training has a loss."""
    return "loss" not in record


def numbers_of(record: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a record, without its step."""
    return {
        name: value
        for name, value in record.items()
        if name != "step" and isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def is_held(record: dict[str, Any], held: Held) -> bool:
    """Return whether a logger has a record already."""
    return bool(record["step"] <= (held.evaluated if is_evaluation(record) else held.step))


def held_after(record: dict[str, Any], held: Held) -> Held:
    """Return what a logger has when it has been given a record, too."""
    if is_evaluation(record):
        return replace(held, evaluated=max(held.evaluated, record["step"]))
    return replace(held, step=max(held.step, record["step"]))


class RecordShipper:
    """Hands the records of a run to a logger, each once, until rank 0 says that it is over.

    Args:
        build: makes the logger anew, also after an error.
        run: the run, without what the logger has.
        note_file: where to note what it has, for the next attempt.
    """

    def __init__(self, build: Callable[[], Logger], run: LoggedRun, tail: Tail, control: Control, note_file: Path):
        self._build, self._run, self._tail, self._control = build, run, tail, control
        self._note_file = note_file
        note = read_json(note_file) or {}
        self._held = Held(_count(note.get("step")), _count(note.get("evaluated")))
        self._logger: Logger | None = None
        self._noted, self._noted_held = 0.0, self._held
        self._failures = 0
        self._left_out = 0
        self._failing: dict[str, Any] | None = None  # the record that was handed over last
        self._said: str | None = None
        self._error: str | None = None

    def run(self) -> int:
        """Follow the file until the end.

        Returns:
            The exit code: 0, or AGAIN if another process is to go on, or to close what could not be closed.
        """
        while True:
            try:
                if self._logger is None:
                    self._open()
                self._hand_on()
                if self._control.ending is not None:
                    break
                self._note()
                self._control.wait(POLL_S)
                if self._control.take_rewound():
                    self._tail.rewind()
            except NewProcessNeededError:
                self._note(force=True)
                return AGAIN
            except Exception as error:  # whatever a logger raises
                self._failed(error)
                if self._control.ending is not None:
                    break
                self._control.wait(PAUSES_S[min(self._failures, len(PAUSES_S)) - 1])
        return 0 if self._close() else AGAIN

    def _open(self) -> None:
        logger = self._build()
        told = logger.open(replace(self._run, held=self._held))
        self._held = told if told is not None else self._held
        self._logger = logger
        self._tail.rewind()
        self._note(force=True)

    def _hand_on(self) -> None:
        """Give the logger all that it does not have."""
        assert self._logger is not None
        held, given = self._held, 0
        for record in self._tail.new():
            if is_held(record, held):
                continue
            self._failing = record
            hand = self._logger.evaluated if is_evaluation(record) else self._logger.log
            hand(record["step"], numbers_of(record))
            held = held_after(record, held)
            given += 1
            if given % 1000 == 0:
                self._flush(held)
                if self._is_late():
                    return
        if given:
            self._flush(held)
        self._failing = None

    def _flush(self, held: Held) -> None:
        assert self._logger is not None
        self._logger.flush()
        self._held, self._failures, self._error = held, 0, None

    def _is_late(self) -> bool:
        """Return whether the time to close in is nearly over; the next attempt makes up for what is missing."""
        return self._control.close_by is not None and time.monotonic() > self._control.close_by - 1.0

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        said = error.message if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        if isinstance(error, ConfigError) and error.hint:
            said += f" ({error.hint})"
        sentence = redact(" ".join(said.split())[:500])
        if sentence != self._error:
            log.warning("the logger failed, and is tried again: %s", sentence)
        self._error = sentence
        if self._failing is not None and self._failures >= TRIES:
            log.warning("step %d is left out, since it failed %d times", self._failing["step"], self._failures)
            self._held = held_after(self._failing, self._held)
            self._left_out += 1
            self._failures = 0
        logger, self._logger, self._failing = self._logger, None, None
        if logger is not None:
            try:
                logger.close(Ending.FAILED)
            except Exception as another:
                log.warning("it could not be closed: %s", redact(str(another)))
        self._note(force=True)

    def _close(self) -> bool:
        """Close the logger, and return whether that went well."""
        closed = self._logger is not None
        if self._logger is not None:
            try:
                self._said = self._logger.close(self._control.ending or Ending.FAILED)
            except Exception as error:
                self._error = redact(f"{type(error).__name__}: {error}"[:500])
                log.warning("the logger could not be closed: %s", self._error)
                closed = False
        self._note(force=True, closed=closed)
        return closed

    def _note(self, *, force: bool = False, closed: bool = False) -> None:
        """Note what the logger has, now and then."""
        if not force and (self._held == self._noted_held or time.monotonic() - self._noted < NOTE_EVERY_S):
            return
        self._noted, self._noted_held = time.monotonic(), self._held
        note = {
            "step": self._held.step,
            "evaluated": self._held.evaluated,
            "closed": closed,
            "attempt": self._run.attempt,
            "said": self._said or getattr(self._logger, "said", None),
            "error": self._error,
            "left_out": self._left_out,
        }
        try:
            write_json(self._note_file, note, durable=closed)
        except OSError as error:  # a full disk
            log.warning("cannot note what the logger has: %s", error.strerror or error)


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else -1


def build_logger(name: str, config: Any) -> Logger:
    """Build a logger of the config: "wandb", "mlflow", or one of `observe.loggers`.

    Raises:
        ConfigError: it cannot be built, or has not the methods of a logger.
    """
    from hydra.errors import InstantiationException
    from hydra.utils import get_object, instantiate

    if name in BUILT_IN:
        built = get_object(BUILT_IN[name])(getattr(config.observe, name))
    else:
        try:
            built = instantiate(config.observe.loggers[name], _convert_="all")
        except InstantiationException as error:
            target = str(config.observe.loggers[name].get("_target_"))
            raise ConfigError(
                f"observe.loggers.{name}._target_={target}: {why_not_built(error, target)}",
                hint="can it be imported where the job runs, and are its arguments spelled correctly?",
            ) from None
    if not isinstance(built, Logger):
        missing = [method for method in ("open", "log", "evaluated", "flush", "close") if not hasattr(built, method)]
        raise ConfigError(
            f"observe.loggers.{name} is not a logger: it has no {', '.join(missing)}",
            hint="derive it from slurmtrain.observe.Logger",
        )
    return built


def logged_run(run_dir: RunDir, attempt: int) -> LoggedRun:
    """Return what a logger is told of a run. No secret is in it."""
    from slurmtrain.config.frozen import load_frozen, to_values

    info = run_dir.info()
    sweep = run_dir.path.parent
    return LoggedRun(
        id=run_dir.id,
        name=str(info["name"]),
        user=str(info["user"]),
        directory=run_dir.path,
        attempt=attempt,
        config=redacted(to_values(load_frozen(run_dir.config_file, with_secrets=False))),
        sweep=sweep.name if (sweep / "sweep.json").is_file() else None,
    )


def _leave_when_alone(descriptor: int) -> None:
    """End this process some time after rank 0 is gone: a logger may be in a call that never returns.

    Args:
        descriptor: the end of a pipe whose other end rank 0 holds.
    """
    closed = select.poll()
    closed.register(descriptor, 0)  # POLLHUP is told unasked, and nothing is taken from the pipe
    closed.poll()
    time.sleep(LOCK_S)
    os._exit(1)


def main(words: list[str]) -> int:
    """Run the logger NAME of a run until rank 0 says that it is over."""
    from slurmtrain.config import secrets
    from slurmtrain.config.frozen import load_frozen
    from slurmtrain.system import logs

    logs.set_up()
    run_dir, name, attempt = RunDir(Path(words[0])), words[1], int(words[2])
    note_file = run_dir.logger_file(name)
    try:
        config = load_frozen(run_dir.config_file)
        secrets.take(config.secrets)
        threading.Thread(target=_leave_when_alone, args=(0,), name="alone", daemon=True).start()
        with records.locked(note_file.with_suffix(".lock"), at_most_s=LOCK_S):
            run, tail = logged_run(run_dir, attempt), Tail(run_dir.metrics_file)
            code = RecordShipper(lambda: build_logger(name, config), run, tail, Control(0), note_file).run()
    except (SlurmtrainError, OSError) as error:
        logs.show_error(error)
        return 1
    return code


if __name__ == "__main__":
    code = main(sys.argv[1:])
    if code == AGAIN:  # without exit handlers, which may wait for what has broken
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
