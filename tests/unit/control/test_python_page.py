"""The lines of the page `python`, run as they stand."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import slurmtrain

PAGE = Path(slurmtrain.__file__).parent / "docs" / "python.md"


def lines_of(page: Path) -> str:
    """Return all indented blocks of a page as one program."""
    blocks = [block for block in page.read_text().split("\n\n") if block.startswith("    ")]
    return "\n".join(textwrap.dedent(block) for block in blocks)


def test_the_lines_of_the_page_python_do_what_it_says(project: Path) -> None:
    program = lines_of(PAGE) + "\nassert program.wait().state == 'finished' and 'of your own' in program.logs()\n"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(PAGE.parents[2])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout.splitlines()
    assert said[0].startswith(("starting", "running")), said
    assert "'valid_loss'" in said[1] and "checkpoint_" in said[2]
    assert "is not running: finished" in done.stdout
    assert {"0 3", "1 12", "2 27"} <= {*said} and said[-1] == "[3, 12, 27]"
    assert done.stderr == ""
