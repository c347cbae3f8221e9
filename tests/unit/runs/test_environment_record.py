"""What each attempt ran with, and what `runs compare` says of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slurmtrain.cli import main
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runs.software import read_environment, record_environment
from slurmtrain.system.process_facts import gather_facts
from tests.support.runs import add_attempt, printed, submitted_run


def ran_with(run: RunDir, **groups: dict[str, str]) -> None:
    run.attempt(add_attempt(run, ended=2.0, verdict="done").number).environment_file.write_text(json.dumps(groups))


def test_an_attempt_records_what_its_process_runs_with(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = submitted_run(project, "cluster=local")
    number = run.new_attempt()
    monkeypatch.setenv("NCCL_ALGO", "a setting, or a secret")
    record_environment(run.attempt(number)).join(60)
    found = read_environment(run.attempt(number))
    assert found is not None and found["packages"] == gather_facts().packages
    assert "a setting, or a secret" not in json.dumps(found)


def test_runs_compare_shows_what_two_runs_ran_with_as_far_as_it_differs(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = (submitted_run(project, "cluster=local") for _ in range(2))
    assert "what a and b used is not known: no attempt recorded it" in printed("runs", "compare", a.id, b.id)
    many = {f"package-{number}": "1" for number in range(40)}
    ran_with(a, packages={"torch": "2.11.0", **many}, gpu={"driver": "535"}, system={"host": "n1"})
    ran_with(b, packages={"torch": "2.11.0", **many}, gpu={"driver": "535"}, system={"host": "n2"})
    assert "they ran with the same packages, driver and image" in printed("runs", "compare", a.id, b.id)
    ran_with(b, packages={"torch": "2.13.0\x1b[2J"}, gpu={"driver": "550"}, container={"image": "/x.sif"})
    shown = printed("runs", "compare", a.id, b.id)
    assert "\x1b" not in shown and "packages: 29 more (--json has all)" in shown
    rows = {line.split("  ")[0].strip(): line.split() for line in shown.splitlines()}
    assert rows["gpu.driver"][1:] == ["535", "550"] and rows["container.image"][1:] == ["-", "/x.sif"]
    assert main(["runs", "compare", a.id, b.id, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["environment"]) == 43 and found["unrecorded"] == []
    assert {"key": "gpu.driver", "a": "535", "b": "550"} in found["environment"]
