"""The thread of one logger, in rank 0: it follows metrics.jsonl, and hands on what its logger does not have yet.

metrics.jsonl is the queue: it is on disk before the logger hears of it, so that a slow or failing logger holds up nothing and
misses nothing, and what a kill has cost it is made up for by the next attempt. No step is handed on twice: a logger says which
it has, or RUN/loggers/NAME.json does. Training waits for the thread at the end only, and not for long.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from slurmtrain.config.schema import Config, ObserveConfig
from slurmtrain.errors import ConfigError, why_not_built
from slurmtrain.observe.logger import Ending, Held, LoggedRun, Logger
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system import records
from slurmtrain.system.files import read_json, write_json
from slurmtrain.system.modes import folder_mode
from slurmtrain.system.redaction import redact, redacted

log = logging.getLogger(__name__)

POLL_S = 1.0  # between looks at metrics.jsonl
NOTE_EVERY_S = 5.0  # between notes of what the logger has
PAUSES_S = (5.0, 15.0, 60.0)  # after the first, second, and each further error in a row
TRIES = 3  # of a record
CLOSE_S = {Ending.FINISHED: 30.0, Ending.STOPPED: 5.0, Ending.FAILED: 5.0}  # the grace time of a stop is short
BUILT_IN = {
    "wandb": "slurmtrain.observe.wandb_logger.WandbLogger",
    "mlflow": "slurmtrain.observe.mlflow_logger.MlflowLogger",
}


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


class LoggerThread:
    """Hands the records of a run to a logger, each once, until `close`.

    Args:
        build: makes the logger anew, also after an error.
        describe: returns the run, without what the logger has.
        note_file: where to note what the logger has, for the next attempt.
    """

    def __init__(
        self,
        name: str,
        build: Callable[[], Logger],
        describe: Callable[[], LoggedRun],
        metrics_file: Path,
        note_file: Path,
    ):
        self.name = name
        self.sayings: deque[str] = deque()  # for the person who watches
        self._build, self._describe, self._note_file = build, describe, note_file
        self._tail = Tail(metrics_file)
        self._told = threading.Condition()
        self._rewound = False
        self._ending: Ending | None = None
        self._close_by = float("inf")  # in seconds of time.monotonic
        self._held = Held()
        self._logger: Logger | None = None
        self._noted, self._noted_held = 0.0, self._held
        self._failures = 0
        self._left_out = 0
        self._failing: dict[str, Any] | None = None  # the record that was handed over last
        self._error: str | None = None
        self._thread = threading.Thread(target=self._follow, name=f"logger-{name}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # too many threads
            log.warning("the logger %s cannot be started: %s", name, error)

    def rewind(self) -> None:
        """Tell it that records of metrics.jsonl were dropped."""
        with self._told:
            self._rewound = True
            self._told.notify()

    def close(self, ending: Ending, deadline: float) -> None:
        """Tell it to close its logger by `deadline`, in seconds of time.monotonic. Returns at once."""
        with self._told:
            self._ending, self._close_by = ending, deadline
            self._told.notify()

    def wait(self) -> None:
        """Wait until it has closed its logger, and leave it behind when its time is over."""
        if self._thread.is_alive():
            self._thread.join(max(0.0, self._close_by - time.monotonic()))
        if self._thread.is_alive():
            log.warning(
                "the logger %s has not closed in time, and is left behind; what it lacks is in metrics.jsonl, from where "
                "the next attempt takes it",
                self.name,
            )

    def _wait(self, seconds: float) -> None:
        """Wait until something was told, at most `seconds`."""
        with self._told:
            self._told.wait_for(lambda: self._rewound or self._ending is not None, seconds)
            if self._rewound:
                self._rewound = False
                self._tail.rewind()

    def _follow(self) -> None:
        """Follow the file until the end."""
        with contextlib.suppress(OSError, ValueError):  # without a note, the logger itself may know what it has
            self._note_file.parent.mkdir(mode=folder_mode(self._note_file.parent.parent), exist_ok=True)
            note = read_json(self._note_file) or {}
            self._held = Held(_count(note.get("step")), _count(note.get("evaluated")))
        tried_again = False
        while True:
            over = self._ending is not None  # before the file is read: what comes later is for the next attempt
            try:
                if self._logger is None:
                    self._open()
                self._hand_on()
                self._note()
            except (Exception, SystemExit) as error:  # whatever a logger raises
                self._failed(error)
                if not over:
                    self._wait(PAUSES_S[min(self._failures, len(PAUSES_S)) - 1])
            else:
                if not over:
                    self._wait(POLL_S)
            # What serves the logger may have been killed by the signal that ends the run: a second try, if there is time.
            if over and (self._close() or tried_again or time.monotonic() > self._close_by - 2.0):
                return
            tried_again = over

    def _open(self) -> None:
        logger = self._build()
        told = logger.open(replace(self._describe(), held=self._held))
        self._held = told if told is not None else self._held
        self._logger = logger
        self._tail.rewind()
        self._note(force=True)
        if said := getattr(logger, "said", None):
            self._say(said)

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
                if time.monotonic() > self._close_by - 1.0:
                    return  # the next attempt makes up for what is missing
        if given:
            self._flush(held)
        self._failing = None

    def _flush(self, held: Held) -> None:
        assert self._logger is not None
        self._logger.flush()
        self._held, self._failures, self._error = held, 0, None

    def _failed(self, error: BaseException) -> None:
        self._failures += 1
        said = error.message if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        if isinstance(error, ConfigError) and error.hint:
            said += f" ({error.hint})"
        sentence = redact(" ".join(said.split())[:500])
        if sentence != self._error:
            log.warning("the logger %s fails, and is tried again: %s", self.name, sentence)
        self._error = sentence
        if self._failing is not None and self._failures >= TRIES:
            step = self._failing["step"]
            log.warning("the logger %s lacks step %d, which failed %d times", self.name, step, self._failures)
            self._held = held_after(self._failing, self._held)
            self._left_out += 1
            self._failures = 0
        logger, self._logger, self._failing = self._logger, None, None
        if logger is not None:
            try:
                logger.close(Ending.FAILED)
            except Exception as another:
                log.warning("the logger %s could not be closed: %s", self.name, redact(str(another)))
        self._note(force=True)

    def _close(self) -> bool:
        """Close the logger, and return whether that went well."""
        closed = self._logger is not None
        if self._logger is not None:
            try:
                if said := self._logger.close(self._ending or Ending.FAILED):
                    self._say(said)
            except Exception as error:
                self._error = redact(f"{type(error).__name__}: {error}"[:500])
                log.warning("the logger %s could not be closed: %s", self.name, self._error)
                closed, self._logger = False, None
        self._note(force=True, closed=closed)
        return closed

    def _say(self, sentence: str) -> None:
        self.sayings.append(redact(sentence))

    def _note(self, *, force: bool = False, closed: bool = False) -> None:
        """Note what the logger has, now and then."""
        if not force and (self._held == self._noted_held or time.monotonic() - self._noted < NOTE_EVERY_S):
            return
        self._noted, self._noted_held = time.monotonic(), self._held
        note = {
            "step": self._held.step,
            "evaluated": self._held.evaluated,
            "closed": closed,
            "error": self._error,
            "left_out": self._left_out,
        }
        try:
            write_json(self._note_file, note, durable=closed)
        except OSError as error:  # a full disk
            log.warning("cannot note what the logger %s has: %s", self.name, error.strerror or error)


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else -1


class LoggerThreads:
    """All loggers of a run, on rank 0.

    Args:
        say: shows a sentence to the person who watches.
    """

    def __init__(self, run_dir: RunDir, config: Config, attempt: int, say: Callable[[str], None]):
        self._say = say
        self._said: set[str] = set()
        self._threads = [
            LoggerThread(
                name,
                lambda name=name: build_logger(name, config),  # type: ignore[misc]
                lambda: logged_run(run_dir, attempt),
                run_dir.metrics_file,
                run_dir.logger_file(name),
            )
            for name in loggers_of(config.observe)
        ]

    def look(self) -> None:
        """Show what they have to say."""
        for each in self._threads:
            while each.sayings:
                sentence = each.sayings.popleft()
                if sentence not in self._said:
                    self._said.add(sentence)
                    self._say(sentence)

    def rewind(self) -> None:
        """Tell them that records of metrics.jsonl were dropped."""
        for each in self._threads:
            each.rewind()

    def close(self, ending: Ending) -> None:
        """Have all of them close at the same time, and wait for that, but not for long."""
        deadline = time.monotonic() + CLOSE_S[ending]
        for each in self._threads:
            each.close(ending, deadline)
        for each in self._threads:
            each.wait()
        self.look()


def loggers_of(observe: ObserveConfig) -> Sequence[str]:
    """Return the names of the loggers that a config asks for."""
    return (*(name for name in BUILT_IN if getattr(observe, name).enabled), *observe.loggers)


def build_logger(name: str, config: Config) -> Logger:
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
