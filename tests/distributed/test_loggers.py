"""W&B and MLflow themselves, and a logger of one's own: a run that was interrupted is one run there, with each step once."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import struct
import zlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from slurmtrain.config.schema import MlflowConfig
from slurmtrain.observe import Ending, Held, LoggedRun
from slurmtrain.observe.metrics import read_metrics
from slurmtrain.observe.mlflow_logger import MlflowLogger
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system import process
from slurmtrain.system.records import read_json
from tests.distributed.test_training import LONG, go_on, pause, wait_for_attempt
from tests.support.gloo import wait_until
from tests.support.local_runs import Project

# What W&B has written in its offline mode, read back with its own record type. A .wandb file is a log in the format of LevelDB
# (blocks of 32 KiB; each part with checksum, length and kind) after 7 bytes that tell W&B's version of it:
# https://github.com/google/leveldb/blob/main/doc/log_format.md
HEADER = struct.Struct("<IHB")  # checksum, length, kind
BLOCK = 1 << 15
FIRST = 7
WHOLE, LAST = 1, 4


def wandb_records(path: Path) -> Iterator[Any]:
    """The whole records of a file."""
    from wandb.proto import wandb_internal_pb2

    data, position, parts = path.read_bytes(), FIRST, b""
    assert data[:4] == b":W&B"
    while position + HEADER.size <= len(data):
        left = BLOCK - position % BLOCK
        if left < HEADER.size:
            position += left
            continue
        checksum, length, kind = HEADER.unpack_from(data, position)
        part = data[position + HEADER.size : position + HEADER.size + length]
        if len(part) < length:
            return
        assert zlib.crc32(bytes([kind]) + part) == checksum
        parts += part
        position += HEADER.size + length
        if kind in (WHOLE, LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def wandb_has(run_dir: Path, kind: str) -> list[Any]:
    """The records of a kind in the files that `wandb sync RUN/wandb/offline-run-*` sends, in its order."""
    files = sorted(run_dir.glob("wandb/offline-run-*/*.wandb"))
    records = [record for file in files for record in wandb_records(file)]
    return [getattr(record, kind) for record in records if record.WhichOneof("record_type") == kind]


# Looked for and not imported: all processes of xdist collect this file.
pytestmark = [
    pytest.mark.skipif(find_spec(name) is None, reason=f"{name} is not installed: pip install 'slurmtrain[{name}]'")
    for name in ("wandb", "mlflow")
]

KEY = "0123456789abcdef0123456789abcdef01234567"
OWN_LOGGER = """
import json, os, time
from slurmtrain.observe import Held, Logger

class Mine(Logger):
    def __init__(self, path, seconds=0.0):
        self.path, self.seconds = path, seconds

    def open(self, run):
        lines = open(self.path).read().splitlines() if os.path.exists(self.path) else []
        return Held(json.loads(lines[-1])[0]) if lines else None

    def log(self, step, values):
        time.sleep(self.seconds)
        with open(self.path, "a") as file:
            file.write(json.dumps([step, values["loss"]]) + "\\n")

    def evaluated(self, step, values):
        pass
"""


SLOW_AND_BROKEN = """
class Slow(Mine):
    def log(self, step, values):
        if not os.path.exists(self.path + ".begun"):
            open(self.path + ".begun", "w").close()
            while True:
                time.sleep(1)
        super().log(step, values)

class Broken(Mine):
    def open(self, run):
        raise OSError("no route")
"""


def mlflow_run(run_dir: RunDir) -> Any:
    """The only run that MLflow has."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{run_dir.path / 'mlflow.db'}")
    experiments = [each.experiment_id for each in client.search_experiments()]
    (found,) = client.search_runs(experiments)
    return found


def steps_in_mlflow(run_dir: RunDir, metric: str) -> list[int]:
    """The steps of all points of a metric, in the order in which they came."""
    with sqlite3.connect(run_dir.path / "mlflow.db") as database:
        return [step for (step,) in database.execute("SELECT step FROM metrics WHERE key = ? ORDER BY rowid", [metric])]


def logged_by_own(folder: Path) -> int:
    path = folder / "own.jsonl"
    return int(json.loads(path.read_text().splitlines()[-1])[0]) if path.exists() and path.stat().st_size else -1


def test_a_run_that_was_interrupted_is_one_run_with_each_step_once(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    (project.path / "mine.py").write_text(OWN_LOGGER)
    prometheus = tmp_path / "prometheus"
    prometheus.mkdir()
    pause(project)
    run = project.submit(
        *LONG,
        "observe.wandb.enabled=true",
        "observe.wandb.mode=offline",
        "observe.wandb.tags=[short]",
        f"+observe.loggers.own={{_target_: mine.Mine, path: {tmp_path / 'own.jsonl'}}}",
        f"observe.textfile_dir={prometheus}",
        "+secrets.WANDB_API_KEY=env",
    )
    for number, told in ((1, signal.SIGTERM), (2, signal.SIGKILL)):  # killed: the loggers have no time either
        wait_for_attempt(run, number)
        reached = (run.attempts()[-1].first_step or 0) + 3
        run.wait_for_step(reached)
        (project.path / "hold").touch()
        wait_until(lambda reached=reached: logged_by_own(tmp_path) >= reached, "logged by ours")  # type: ignore[misc]
        assert wait_until(lambda: [path.read_text() for path in prometheus.glob("*.prom")], "shown to Prometheus")
        rank = run.rank_pid(0)
        for pid in (rank, *process.living_descendants(rank)):  # SLURM signals all; wandb-core dies of SIGTERM
            os.kill(pid, told)
        (project.path / "hold").unlink()
    go_on(project)
    run.finish()
    assert [attempt.reason for attempt in run.attempts()] == ["asked", "crash", "finished"]
    assert list(prometheus.glob("*.prom")) == []
    assert run.processes() == []

    run_dir = run.run_dir
    losses = {record["step"]: record["loss"] for record in read_metrics(run_dir.metrics_file) if "loss" in record}
    assert list(losses) == list(range(1, 31))

    rows = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in history.item}
        for history in wandb_has(run_dir.path, "history")
    ]
    assert {row["_step"]: row["loss"] for row in rows if "loss" in row} == losses
    assert [row["_step"] for row in rows] == sorted({row["_step"] for row in rows})  # none twice, in their order
    assert sorted(row["evaluated_step"] for row in rows if "evaluated_step" in row) == [15, 30]
    runs = wandb_has(run_dir.path, "run")
    assert {each.run_id for each in runs} == {run_dir.id}
    assert list(runs[-1].tags) == ["short"]
    config = {update.key: json.loads(update.value_json) for update in runs[-1].config.update}
    assert config["optim"]["lr"] == 0.003
    assert "secrets" not in config

    own = [json.loads(line) for line in (tmp_path / "own.jsonl").read_text().splitlines()]
    assert own == [[step, loss] for step, loss in losses.items()]

    for path in run_dir.path.rglob("*"):
        if path.is_file() and not path.is_symlink():
            assert KEY.encode() not in path.read_bytes(), path
    assert KEY not in run.output


def test_mlflow_has_one_run_with_each_step_once_whatever_ended_the_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = MlflowConfig(enabled=True, experiment="lm", tags={"team": "a"})
    described = {"optim": {"lr": 0.1}, "secrets": {"KEY": "env"}}
    run = LoggedRun(id="20261123-1", name="n", user="u", directory=tmp_path, attempt=1, config=described)
    run_dir = RunDir(tmp_path)

    with monkeypatch.context() as broken:
        broken.setattr("slurmtrain.observe.mlflow_logger._log_params", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            MlflowLogger(config).open(run)
    first = MlflowLogger(config)  # the next try, or attempt
    assert first.open(run) == Held()
    for step in (1, 2, 3):
        first.log(step, {"loss": 1 / step, "b/s (x)": float("nan")})
    first.evaluated(3, {"valid_loss": 1.0})
    first.flush()
    first.log(4, {"loss": 9.0})  # in the buffer when it is killed

    second = MlflowLogger(config)
    assert second.open(run) == Held(3, 3)
    second.log(4, {"loss": 0.25})
    second.flush()
    said = second.close(Ending.STOPPED) or ""
    assert said.startswith(f"MLflow: run {mlflow_run(run_dir).info.run_id} of experiment 1: ")
    assert said.endswith(f"mlflow ui --backend-store-uri sqlite:///{tmp_path / 'mlflow.db'}")
    assert mlflow_run(run_dir).info.status == "KILLED"

    third = MlflowLogger(config)
    assert third.open(run) == Held(4, 3)
    assert mlflow_run(run_dir).info.status == "RUNNING"
    third.log(5, {"loss": 0.2})
    third.close(Ending.FINISHED)
    found = mlflow_run(run_dir)
    assert found.info.status == "FINISHED"
    assert steps_in_mlflow(run_dir, "loss") == [1, 2, 3, 4, 5]
    assert found.data.params == {"optim.lr": "0.1"}
    assert found.data.tags["team"] == "a"


def test_a_logger_that_is_slow_or_fails_holds_up_neither_training_nor_its_end(project: Project, tmp_path: Path) -> None:
    (project.path / "mine.py").write_text(OWN_LOGGER + SLOW_AND_BROKEN)
    own = f"path: {tmp_path / 'own.jsonl'}"
    pause(project)
    run = project.submit(
        *LONG,
        f"+observe.loggers.slow={{_target_: mine.Slow, {own}}}",
        f"+observe.loggers.broken={{_target_: mine.Broken, {own}}}",
        "observe.textfile_dir=/proc/none",
    )
    wait_for_attempt(run, 1)
    wait_until((tmp_path / "own.jsonl.begun").exists, "begun")
    wait_until(lambda: (read_json(run.run_dir.logger_file("broken")) or {}).get("error"), "refused")
    os.kill(run.rank_pid(0), signal.SIGTERM)
    wait_for_attempt(run, 2)  # though the slow one never ends
    go_on(project)
    run.finish()
    assert "the logger slow has not closed in time" in run.logs()
    assert "no route" in run.logs()
    assert logged_by_own(tmp_path) == 30
    assert run.processes() == []
