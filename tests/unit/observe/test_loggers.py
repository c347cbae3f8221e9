"""Loggers: each step once, whatever fails; where the numbers go; the text file for Prometheus."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from slurmtrain.choices import WandbMode
from slurmtrain.observe import Ending, Held, LoggedRun, Logger, logger_thread
from slurmtrain.observe.logger_thread import LoggerThread
from slurmtrain.observe.metrics import MetricsLog
from slurmtrain.observe.textfile import TextFileLogger
from slurmtrain.observe.wandb_logger import why_offline
from slurmtrain.rank.leaving import close_client_loggers


@dataclass
class Backend:
    """What a logger has been given, over all its lives."""

    given: list[tuple[str, int]] = field(default_factory=list)
    endings: list[Ending] = field(default_factory=list)
    opened: int = 0
    fails_at: Callable[[int], bool] = lambda step: False
    tells: Callable[[], Held | None] = lambda: None


class Fake(Logger):
    def __init__(self, backend: Backend):
        self._backend = backend

    def open(self, run: LoggedRun) -> Held | None:
        self._backend.opened += 1
        return self._backend.tells()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self._backend.fails_at(step):
            raise ConnectionError("no route to host")
        self._backend.given.append(("train", step))

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        self._backend.given.append(("eval", step))

    def close(self, ending: Ending) -> str | None:
        self._backend.endings.append(ending)
        return None


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logger_thread, "PAUSE_S", 0.0)


def ship(
    folder: Path,
    backend: Backend,
    ending: Ending = Ending.STOPPED,
    *,
    rewound: bool = False,
    until_flushed: bool = False,
    build: Callable[[], Logger] | None = None,
) -> Any:
    """One attempt of a logger's thread, which is told at once that it is over, or when a group has gone through.

    Returns:
        its note.
    """
    flushed = threading.Event()

    class Shipped(Fake):
        def flush(self) -> None:
            flushed.set()

    run = LoggedRun("r", "n", "u", folder, 1, {"train": {"steps": 9}})
    build = build or (lambda: Shipped(backend))
    note = folder / "note.json"
    thread = LoggerThread("own", build, lambda: run, folder / "metrics.jsonl", note, lambda said: None)
    if rewound:
        thread.rewind()
    if until_flushed:
        assert flushed.wait(60)
    thread.close(ending, time.monotonic() + 60)
    thread.wait()
    return json.loads(note.read_text())


def write(folder: Path, resume_step: int, *records: dict[str, float]) -> None:
    log = MetricsLog(folder / "metrics.jsonl", resume_step)
    for record in records:
        log.write(**record)  # type: ignore[arg-type]
    log.close()


def steps(*numbers: int) -> list[dict[str, float]]:
    return [{"step": number, "loss": 1 / number} for number in numbers]


def test_what_a_kill_has_cost_a_logger_comes_with_the_next_attempt(tmp_path: Path) -> None:
    backend = Backend()
    write(tmp_path, -1, *steps(1, 2, 3, 4, 5))
    ship(tmp_path, backend)
    backend.given = backend.given[:2]  # the rest was in a buffer of the server's client
    backend.tells = lambda: Held(step=2)
    write(tmp_path, 5, *steps(6))
    ship(tmp_path, backend)
    assert [step for _, step in backend.given] == [1, 2, 3, 4, 5, 6]


def test_an_evaluation_that_a_stop_has_put_off_is_logged_by_the_next_attempt(tmp_path: Path) -> None:
    backend = Backend()
    write(tmp_path, -1, *steps(1, 2))
    ship(tmp_path, backend)
    write(tmp_path, 2, {"step": 2, "valid_loss": 1.0}, *steps(3))
    ship(tmp_path, backend)
    assert backend.given == [("train", 1), ("train", 2), ("eval", 2), ("train", 3)]


def test_a_logger_that_fails_for_a_while_misses_nothing(tmp_path: Path) -> None:
    backend, outages = Backend(), [1, 1]
    backend.fails_at = lambda step: step == 3 and bool(outages and outages.pop())
    backend.tells = lambda: Held(step=max((step for _, step in backend.given), default=-1))
    write(tmp_path, -1, *steps(1, 2, 3, 4))
    ship(tmp_path, backend, until_flushed=True)
    assert backend.opened == 3
    assert [step for _, step in backend.given] == [1, 2, 3, 4]


def test_after_a_rollback_the_steps_that_a_logger_has_are_not_logged_again(tmp_path: Path) -> None:
    backend = Backend()
    write(tmp_path, -1, *steps(1, 2, 3, 4))
    ship(tmp_path, backend)
    write(tmp_path, 2, *steps(3, 4, 5))
    ship(tmp_path, backend, rewound=True)
    assert [step for _, step in backend.given] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("wanted", "variables", "host", "why"),
    [
        ("auto", {}, "wandb.example", None),
        ("auto", {"WANDB_BASE_URL": ""}, "", None),  # `wandb login` has written the name of W&B's own service
        ("auto", {}, "other.example", "no API key"),  # netrc has none for it
        ("auto", {"WANDB_API_KEY": "k"}, "other.example", None),
        ("auto", {"WANDB_API_KEY": "k", "HTTPS_PROXY": ""}, "localhost:1", "cannot be reached"),
        ("auto", {"WANDB_MODE": "offline"}, "wandb.example", "says so"),
        ("auto", {"WANDB_MODE": "online"}, "other.example", None),
        ("online", {"WANDB_MODE": "offline"}, "other.example", None),
        ("offline", {}, "wandb.example", "says so"),
    ],
)
def test_wandb_is_online_only_where_it_can_be(
    wanted: str, variables: dict[str, str], host: str, why: str | None, tmp_path: Path
) -> None:
    hosts = ("wandb.example", "api.forge.coreweave.com")
    entries = (f"machine {name} login user password 0123456789\n" for name in hosts)
    (tmp_path / "netrc").write_text("".join(entries))
    (tmp_path / "netrc").chmod(0o600)
    usual = {"NETRC": str(tmp_path / "netrc"), "WANDB_BASE_URL": f"http://{host}", "HTTPS_PROXY": "http://p"}
    found = why_offline(WandbMode(wanted), usual | variables)
    assert found is None if why is None else found is not None and why in found


def test_the_text_file_is_whole_readable_by_all_and_removed_at_the_end(tmp_path: Path) -> None:
    old, new = tmp_path / "slurmtrain_gone.prom", tmp_path / "slurmtrain_other.prom"
    for path in (old, new):
        path.touch()
    os.utime(old, (0, 0))
    logger, path = TextFileLogger(str(tmp_path)), tmp_path / "slurmtrain_r.prom"
    logger.open(LoggedRun("r", 'a"b\\c\nd', "jane", tmp_path, 2, {"train": {"steps": 9}}))
    for step in (1, 2):
        logger.log(step, {"loss": 0.5, "valid/loss": float("inf")})
        logger.flush()
        samples = [each for family in text_string_to_metric_families(path.read_text()) for each in family.samples]
        values = {each.name.removeprefix("slurmtrain_"): each.value for each in samples}
        assert values.pop("logged_timestamp_seconds") > 1e9
        assert values == {"attempt": 2, "steps": 9, "step": step, "loss": 0.5, "valid_loss": float("inf")}
        labels = [each.labels for each in samples]
        assert labels == [{"run": "r", "job": 'a"b\\c\nd', "user": "jane", "node": os.uname().nodename}] * 6
    assert path.stat().st_mode & 0o777 == 0o644
    logger.close(Ending.FINISHED)
    assert [path.name for path in tmp_path.iterdir()] == [new.name]  # that of a run of before is gone, too


def test_a_resumed_run_has_its_text_file_before_it_logs_anything_new(tmp_path: Path) -> None:
    """So that there is no gap as long as the steps that are done again."""
    seen: list[str] = []

    class Seen(TextFileLogger):
        def flush(self) -> None:
            super().flush()
            seen.append((tmp_path / "slurmtrain_r.prom").read_text())

    write(tmp_path, -1, *steps(1, 2, 3))
    ship(tmp_path, Backend(), build=lambda: Seen(str(tmp_path)))
    write(tmp_path, 2)  # resumed from a checkpoint of step 2
    ship(tmp_path, Backend(), build=lambda: Seen(str(tmp_path)))
    assert [text.count("\nslurmtrain_step{") for text in seen] == [1, 1]
    assert "} 3.0\n" in seen[0] and "} 3.0\n" not in seen[1] and "} 2.0\n" in seen[1]


def test_a_program_that_leaves_has_wandb_and_mlflow_write_what_they_hold_but_not_for_long(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    done: list[str] = []
    never = threading.Event()

    class Run:
        def mark_preempting(self) -> None:
            done.append("preempting")

        def finish(self, exit_code: int) -> None:
            done.append("finished")
            never.wait()

    def flush() -> None:
        raise ConnectionError("no server")

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(run=Run()))
    mlflow = types.SimpleNamespace(active_run=lambda: "run", flush_async_logging=flush)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    close_client_loggers(within_s=0.05)
    never.set()
    assert done == ["preempting", "finished"]
    assert "no server" in caplog.text
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(run=None))
    mlflow.active_run = lambda: None
    close_client_loggers()
    assert len(done) == 2

    def broken() -> None:
        raise RuntimeError("its database is gone")

    mlflow.active_run = broken
    close_client_loggers()
    assert "its database is gone" in caplog.text
