"""The lines that the manual tells a person to type, typed as they stand: of bash about data, and of Python."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import zstandard

from slurmtrain.data.format.manifest import read_manifest
from tests.support.raw_text import json_lines, texts, write_tokenizer

CLONE = Path(__file__).parents[3]
MANUAL = CLONE / "slurmtrain" / "docs"


def lines_of(page: str, heading: str, block: int) -> list[str]:
    """Return the lines of one of the indented blocks below a heading of a page of the manual."""
    section = (MANUAL / f"{page}.md").read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    blocks = [part for part in section.split("\n\n") if part.strip("\n").startswith("    ")]
    return [line.strip() for line in blocks[block].strip("\n").replace("\\\n", "").splitlines()]


def said_by(command: Sequence[str], folder: Path) -> tuple[str, str]:
    """Return the output and the errors of a command in `folder`."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(CLONE)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, done.stderr


def typed(lines: Sequence[str], folder: Path) -> str:
    """Type the lines in `folder`, one after another, and return all that they said."""
    return "".join(said_by(["bash", "-e", "-c", "\n".join(lines)], folder))


def test_the_first_lines_about_data_prepare_text_and_train_on_it(project: Path) -> None:
    (project / "raw.jsonl").write_bytes(json_lines(texts(200, seed=1)))
    said = typed(lines_of("data", "Prepare text once", 0), project)
    assert read_manifest(project / "tokens").tokenizer.dtype == "uint8"
    assert "step 20/20" in said and "slurmtrain: finished" in said


def test_the_lines_with_a_tokenizer_prepare_text(project: Path) -> None:
    for folder in ("models", "data/raw"):
        (project / folder).mkdir(parents=True)
    write_tokenizer(project / "models" / "tokenizer.json")
    (project / "data/raw/a.jsonl.zst").write_bytes(zstandard.compress(json_lines(texts(200, seed=1))))
    prepare, _, _, verify = lines_of("data", "Prepare text once", 1)
    typed([line.replace("/data/", "data/").replace("/models/", "models/") for line in (prepare, verify)], project)


def test_the_lines_of_the_page_python_do_what_it_says(project: Path) -> None:
    blocks = [block for block in (MANUAL / "python.md").read_text().split("\n\n") if block.startswith("    ")]
    program = "\n".join(textwrap.dedent(block) for block in blocks)
    program += "\nassert program.wait().state == 'finished' and 'of your own' in program.logs()\n"
    out, err = said_by([sys.executable, "-c", program], project)
    said = out.splitlines()
    assert said[0].startswith(("starting", "running")), said
    assert "'valid_loss'" in said[1] and "checkpoint_" in said[2]
    assert "is not running: finished" in out
    assert {"0 3", "1 12", "2 27"} <= {*said} and said[-1] == "[3, 12, 27]"
    assert err == ""
