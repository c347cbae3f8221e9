"""Hooks: which is meant, what it is told, and that it changes nothing but what it is there for."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slurmtrain.config.frozen import freeze
from slurmtrain.config.schema import Config, HooksConfig
from slurmtrain.runs.attempts import Attempt
from slurmtrain.runs.create import create_run_dir
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.supervise.hooks import hook_of
from tests.support.run_info import run_info
from tests.support.runs import add_attempt


@pytest.mark.parametrize(
    ("reason", "verdict", "stalled", "hook"),
    [
        ("node failure", "restarting", False, "on_failure"),
        ("time limit", "requeue", True, "on_preemption"),
        ("time limit", "end", True, "on_failure"),  # it gave up
        ("cancelled", "end", False, None),
        (None, None, False, None),
    ],
)
def test_the_hook_for_endings_that_are_none_of_those_in_test_job(
    reason: str | None, verdict: str | None, stalled: bool, hook: str | None
) -> None:
    assert hook_of(Attempt(1, reason=reason, verdict=verdict, stalled=stalled)) == hook


def ended_run(folder: Path, hooks: HooksConfig, **facts: Any) -> RunDir:
    run_dir = create_run_dir(folder / "runs", "train")
    run_dir.info_file.write_text(json.dumps(run_info(workdir=str(folder))))
    run_dir.config_file.write_text(freeze(Config(hooks=hooks)))
    values = {"reason": "crash", "verdict": "requeue", "sentence": "crashed: x", "job_id": "7", "exit_code": 3, **facts}
    add_attempt(run_dir, **values)
    return run_dir


def run_hook(run_dir: RunDir, number: int) -> None:
    """In a process of its own, as everywhere: it ends all processes below its own, which would be those of other tests, too."""
    words = ["supervise", str(run_dir.path), "--hook", str(number)]
    subprocess.run([sys.executable, "-m", "slurmtrain", *words], check=True, timeout=120)


def outcome(run_dir: RunDir) -> str:
    (ended,) = [event for event in run_dir.events() if event["event"] == "hook ended"]
    return str(ended["outcome"])


def test_it_is_told_the_facts_and_runs_once(tmp_path: Path) -> None:
    hooks = HooksConfig(on_failure="env | grep ^SLURMTRAIN_ >>told; cat >>record; pwd; echo oh >&2; exit 4")
    run_dir = ended_run(tmp_path, hooks, last_step=12)
    for _ in range(2):
        run_hook(run_dir, 1)
    told = dict(line.split("=", 1) for line in (tmp_path / "told").read_text().splitlines())
    facts = {
        "EVENT": "failure",
        "RUN_ID": run_dir.id,
        "RUN_NAME": "train",
        "RUN_DIR": str(run_dir.path),
        "ATTEMPT": "1",
    }
    facts |= {
        "JOB_ID": "7",
        "REASON": "crash",
        "NEXT": "requeue",
        "SENTENCE": "crashed: x",
        "STEP": "12",
        "EXIT_CODE": "3",
    }
    assert told.items() >= {f"SLURMTRAIN_{name}": value for name, value in facts.items()}.items()
    assert json.loads((tmp_path / "record").read_text())["sentence"] == "crashed: x"
    assert (run_dir.attempt(1).path / "hook.log").read_text() == f"{tmp_path}\noh\n"
    assert outcome(run_dir).startswith("ended with exit code 4")


def test_at_its_time_limit_it_dies_with_all_that_it_has_started(tmp_path: Path) -> None:
    late = "sleep 600"
    command = f"exec 9>held; {late} & setsid {late} & (setsid {late} &); trap '' TERM; {late}"
    run_dir = ended_run(tmp_path, HooksConfig(on_failure=command, timeout_s=1))
    os.mkfifo(tmp_path / "held")
    held = os.open(tmp_path / "held", os.O_RDONLY | os.O_NONBLOCK)
    try:
        run_hook(run_dir, 1)
        assert outcome(run_dir) == "was killed after hooks.timeout_s=1"
        # It can be read, and holds nothing: the last process that had it open is gone.
        assert select.select([held], [], [], 60)[0] and os.read(held, 1) == b""
    finally:
        os.close(held)
