"""Run directories of a shape that once ended a reading verb in a traceback or kept it busy: links to /, and to themselves."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from tests.faults.hostile_runs import mutate_and_read

FOUND = (438065778, 295950631, 767440973)  # seeds of `python -m tests.faults "any shape"`


def test_links_out_of_a_run_directory_are_not_followed(tmp_path: Path) -> None:
    with ProcessPoolExecutor(
        1, get_context("spawn")
    ) as process:  # which it limits, and whose view of SLURM it replaces
        found = process.submit(mutate_and_read, tmp_path, list(FOUND)).result()
    assert [wrong for _, wrong in found if wrong] == []
