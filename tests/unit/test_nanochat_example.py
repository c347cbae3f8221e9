"""jobs/nanochat_base.py: where nanochat is to go on."""

from __future__ import annotations

import runpy
import zipfile
from pathlib import Path
from typing import Any

JOBS = Path(__file__).parents[2] / "jobs"


def saved(folder: Path, step: int, ranks: int) -> None:
    """The files that nanochat's save_checkpoint writes."""
    names = [f"model_{step:06d}.pt", *(f"optim_{step:06d}_rank{rank}.pt" for rank in range(ranks))]
    for name in names:
        with zipfile.ZipFile(folder / name, "w") as archive:
            archive.writestr("data", b"0" * 1000)
    (folder / f"meta_{step:06d}.json").write_text("{}")


def test_nanochat_goes_on_at_the_newest_step_whose_files_are_all_whole(tmp_path: Path) -> None:
    newest_step: Any = runpy.run_path(str(JOBS / "nanochat_base.py"))["newest_step"]
    assert newest_step(tmp_path, 2) == -1
    for step in (250, 500, 750, 1000, 1250):
        saved(tmp_path, step, ranks=2)
    assert newest_step(tmp_path, 2) == 1250
    (tmp_path / "meta_001250.json").unlink()
    (tmp_path / "optim_001000_rank1.pt").unlink()
    torn = tmp_path / "optim_000750_rank1.pt"
    torn.write_bytes(torn.read_bytes()[:-30])
    assert newest_step(tmp_path, 2) == 500
    assert newest_step(tmp_path, 4) == -1  # a part for each rank
