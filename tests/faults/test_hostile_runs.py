"""Run directories of a shape that once ended a reading verb in a traceback or kept it busy: links to /, and to themselves."""

from __future__ import annotations

from pathlib import Path

from tests.faults.hostile_runs import mutate_and_read

FOUND = (438065778, 295950631, 767440973)  # seeds of `python -m tests.faults "any shape"`


def test_links_out_of_a_run_directory_are_not_followed(tmp_path: Path) -> None:
    assert [wrong for _, wrong in mutate_and_read(tmp_path, list(FOUND)) if wrong] == []
