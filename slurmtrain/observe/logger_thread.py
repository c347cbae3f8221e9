"""The thread of one logger, in rank 0: it follows metrics.jsonl, and hands on what its logger does not have yet.

metrics.jsonl is the queue: it is on disk before the logger hears of it, so that a slow or failing logger holds up nothing and
misses nothing, and what a kill has cost it is made up for by the next attempt. No step is handed on twice: a logger says which
it has, or RUN/loggers/NAME.json does. Training waits for the thread at the end only, and not for long.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from slurmtrain.config.schema import Config
from slurmtrain.errors import ConfigError, why_not_built
from slurmtrain.observe.logger import Ending, Held, LoggedRun, Logger
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system import records
from slurmtrain.system.files import folder_mode, write_json
from slurmtrain.system.records import read_json
from slurmtrain.system.redaction import redact, redacted

log = logging.getLogger(__name__)

POLL_S = 1.0  # between looks at metrics.jsonl
NOTE_EVERY_S = 5.0  # between notes of what the logger has
PAUSE_S = 30.0  # after an error
CLOSE_S = {Ending.FINISHED: 30.0, Ending.STOPPED: 5.0, Ending.FAILED: 5.0}  # the grace time of a stop is short
# Seconds that must be left for another try at the end: the signal of a stop may have killed what serves the logger.
AGAIN_S = 2.0
BUILT_IN = {
    "wandb": "slurmtrain.observe.wandb_logger.WandbLogger",
    "mlflow": "slurmtrain.observe.mlflow_logger.MlflowLogger",
    "textfile": "slurmtrain.observe.textfile.TextFileLogger",
    "tensorboard": "slurmtrain.observe.tensorboard.TensorBoardLogger",
}


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


def held_after(record: dict[str, Any], held: Held) -> Held:
    """Return what a logger has when it has been given a record, too."""
    if is_evaluation(record):
        return replace(held, evaluated=max(held.evaluated, record["step"]))
    return replace(held, step=max(held.step, record["step"]))


def read_records(path: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """Return the whole records of a metrics file from byte `offset` on, and the byte after the last one."""
    found, rest = [], b""
    for piece in records.pieces(path, offset):
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            offset += len(line) + 1
            record = records.parse(line)
            if isinstance(record, dict) and records.is_count(record.get("step")):
                found.append(record)
    return found, offset


class LoggerThread:
    """Hands the records of a run to a logger, each once, until `close`.

    Args:
        build: makes the logger anew, also after an error.
        describe: returns the run, without what the logger has.
        note_file: where to note what the logger has, for the next attempt.
        say: shows a sentence to the person who watches.
    """

    def __init__(
        self,
        name: str,
        build: Callable[[], Logger],
        describe: Callable[[], LoggedRun],
        metrics_file: Path,
        note_file: Path,
        say: Callable[[str], None],
    ):
        self.name = name
        self._build, self._describe, self._say = build, describe, say
        self._metrics_file, self._note_file = metrics_file, note_file
        self._over = threading.Event()
        self._ending, self._close_by = Ending.STOPPED, float("inf")  # the latter in seconds of time.monotonic
        self._offset, self._rewound = 0, False
        self._held, self._noted = Held(), 0.0
        self._error: str | None = None
        self._said: str | None = None
        self._thread = threading.Thread(target=self._follow, name=f"logger-{name}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # too many threads
            log.warning("the logger %s cannot be started: %s", name, error)

    def rewind(self) -> None:
        """Tell it that records of metrics.jsonl were dropped."""
        self._rewound = True

    def close(self, ending: Ending, deadline: float) -> None:
        """Tell it to close its logger by `deadline`, in seconds of time.monotonic. Returns at once."""
        self._ending, self._close_by = ending, deadline
        self._over.set()

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

    def _follow(self) -> None:
        """Keep a logger at work until the end; after an error, with a pause, a new one."""
        with contextlib.suppress(OSError, ValueError):  # without a note, the logger itself may know what it has
            self._note_file.parent.mkdir(mode=folder_mode(self._note_file.parent.parent), exist_ok=True)
            note = read_json(self._note_file) or {}
            self._held = records.typed_or_none(Held, note) or Held()
        while True:
            was_over = self._over.is_set()
            try:
                return self._work()
            except (Exception, SystemExit) as error:  # whatever a logger raises
                self._failed(error)
            if was_over or time.monotonic() > self._close_by - AGAIN_S:
                return
            self._over.wait(PAUSE_S)

    def _work(self) -> None:
        """Open a logger, give it what it does not have until the end, and close it."""
        logger = self._build()
        try:
            told = logger.open(replace(self._describe(), held=self._held))
            self._held = told if told is not None else self._held
            self._offset = 0
            self._note()
            self._show(getattr(logger, "said", None))
            while True:
                over = self._over.is_set()  # before the file is read: what comes later is for the next attempt
                self._hand_on(logger)
                if over:
                    break
                self._over.wait(POLL_S)
        except BaseException:
            with contextlib.suppress(Exception):
                logger.close(Ending.FAILED)
            raise
        said = logger.close(self._ending)
        self._note(durable=True)
        self._show(said)

    def _hand_on(self, logger: Logger) -> None:
        """Give a logger the records since the last time, as far as it does not have them."""
        begin, self._rewound, held = 0 if self._rewound else self._offset, False, self._held
        found, self._offset = read_records(self._metrics_file, begin)
        for record in found:
            if record["step"] <= (self._held.evaluated if is_evaluation(record) else self._held.step):
                continue
            hand = logger.evaluated if is_evaluation(record) else logger.log
            hand(record["step"], numbers_of(record))
            held = held_after(record, held)
        if held != self._held:
            logger.flush()
            self._held, self._error = held, None
            if time.monotonic() - self._noted > NOTE_EVERY_S:
                self._note()

    def _failed(self, error: BaseException) -> None:
        said = error.message if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        if isinstance(error, ConfigError) and error.hint:
            said += f" ({error.hint})"
        sentence = redact(" ".join(said.split())[:500])
        if sentence != self._error:
            log.warning("the logger %s fails, and is tried again: %s", self.name, sentence)
        self._error = sentence
        self._note()

    def _show(self, said: str | None) -> None:
        """Say once where the numbers go."""
        if said and said != self._said:
            self._said = said
            self._say(redact(said))

    def _note(self, *, durable: bool = False) -> None:
        """Note what the logger has."""
        self._noted = time.monotonic()
        try:
            write_json(self._note_file, {**asdict(self._held), "error": self._error}, durable=durable)
        except OSError as error:  # a full disk
            log.warning("cannot note what the logger %s has: %s", self.name, error.strerror or error)


def follow(name: str, run_dir: RunDir, config: Config, attempt: int, say: Callable[[str], None]) -> LoggerThread:
    """Start the thread of a logger of the config, on rank 0.

    Args:
        say: shows a sentence to the person who watches.
    """
    return LoggerThread(
        name,
        lambda: build_logger(name, config),
        lambda: logged_run(run_dir, attempt),
        run_dir.metrics_file,
        run_dir.logger_file(name),
        say,
    )


def loggers_of(config: Config) -> Sequence[str]:
    """Return the names of the loggers that a config asks for; TensorBoard, which none has to ask for, if it is installed."""
    observe, curves = config.observe, config.train.tensorboard and importlib.util.find_spec("tensorboard")
    used = {"wandb": observe.wandb.enabled, "mlflow": observe.mlflow.enabled, "textfile": observe.textfile_dir}
    return tuple({name: None for name, is_used in {**used, "tensorboard": curves}.items() if is_used} | observe.loggers)


def build_logger(name: str, config: Config) -> Logger:
    """Build a logger of the config: one of `BUILT_IN`, or of `observe.loggers`.

    Raises:
        ConfigError: it cannot be built.
    """
    from hydra.errors import InstantiationException
    from hydra.utils import get_object, instantiate

    if name not in config.observe.loggers:
        observe = config.observe
        settings = {"wandb": observe.wandb, "mlflow": observe.mlflow, "textfile": observe.textfile_dir}
        built: Logger = get_object(BUILT_IN[name])(settings.get(name))
    else:
        try:
            built = instantiate(config.observe.loggers[name], _convert_="all")
        except InstantiationException as error:
            target = str(config.observe.loggers[name].get("_target_"))
            raise ConfigError(
                f"observe.loggers.{name}._target_={target}: {why_not_built(error, target)}",
                hint="can it be imported where the job runs, and are its arguments spelled correctly?",
            ) from None
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
