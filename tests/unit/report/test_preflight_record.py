"""What the checks have found is read as a record that anybody may have written, and shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slurmtrain.choices import FindingKind
from slurmtrain.cli.preflight import print_record
from slurmtrain.errors import UnreadableRecordError
from slurmtrain.report.preflight import in_words, read_preflight
from slurmtrain.runs.attempt_dir import AttemptDir
from slurmtrain.runtime.preflight.check import record_of
from slurmtrain.runtime.preflight.facts import DiskFacts, GatheredFacts, NodeFacts, RankFacts
from slurmtrain.runtime.preflight.findings import Fault, Finding

FACTS = GatheredFacts(
    (RankFacts(0, "n0"), RankFacts(1, "n1")),
    (
        NodeFacts("n0", 0, {"torch": "2.13.0"}, disks={"/tmp": DiskFacts(5.0)}, memory_gb=9.0, interface="ib0"),
        NodeFacts("n1", 1),
    ),
)
FINDING = Finding(FindingKind.DISK_FULL, ("n1",), "/tmp has 0 GB left", "at least 0.05 GB", True, Fault.NODE)
RATES = {
    "tflops": {"0": 1.5, "1": 1.4},
    "all_reduce": 0.7,
    "all_gather": None,
    "links": [["n0", "n1", 2.5]],
    "pairs": [],
}


def written(tmp_path: Path, text: str) -> AttemptDir:
    (tmp_path / "preflight.json").write_text(text)
    return AttemptDir(tmp_path)


def test_what_was_found_is_shown_with_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = read_preflight(written(tmp_path, json.dumps(record_of("full", FACTS, [FINDING], 0.05, RATES))))
    assert found is not None and found.fatal
    print_record(found)
    shown = capsys.readouterr().out
    assert "preflight, full: 2 ranks on 2 nodes compared in 0.05 s: 1 finding" in shown
    assert "ends a training, disk_full: n1: /tmp has 0 GB left; expected: at least 0.05 GB" in shown
    assert "-> make room there" in shown and "between nodes 2.5 to 2.5 GB/s in 1 pairs" in shown
    assert in_words(found.findings) == "disk_full: n1: /tmp has 0 GB left; expected: at least 0.05 GB"


STRANGE: list[Any] = [
    [],
    {},
    {"findings": {}, "nodes": 3, "measured": [1], "ranks": -1, "seconds": "long"},
    {"findings": [1, {"sentence": "\x1b[31mred", "fatal": "yes", "nodes": [1]}], "nodes": [{}, {"versions": 3}, None]},
    {"findings": [], "nodes": [{"node": "\x1b]0;x", "disks_gb": {"a": "b"}, "memory_gb": None, "gpus": [1]}]},
    {"nodes": [{"rank": [1]}], "measured": {"tflops": {"[1]": "fast"}, "links": [[1], ["a", "b", "c"], 3], "pairs": 1}},
]


@pytest.mark.parametrize("values", STRANGE)
def test_a_record_of_any_shape_is_shown_without_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], values: Any
) -> None:
    found = read_preflight(written(tmp_path, json.dumps(values)))
    if found is not None:
        print_record(found)
        assert not found.fatal
    assert "\x1b" not in capsys.readouterr().out


def test_a_torn_record_is_none_and_a_link_is_refused(tmp_path: Path) -> None:
    assert read_preflight(written(tmp_path, '{"mode": "qu')) is None
    assert read_preflight(AttemptDir(tmp_path / "none")) is None
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "preflight.json").symlink_to(tmp_path / "preflight.json")
    with pytest.raises(UnreadableRecordError):
        read_preflight(AttemptDir(tmp_path / "other"))
