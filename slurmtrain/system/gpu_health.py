"""What the driver says of the health of this node's GPUs, by nvidia-smi, which asks NVML. Nothing where there is none."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Collection

FIELDS = ("index", "ecc.errors.uncorrected.volatile.total", "remapped_rows.pending", "remapped_rows.failure")
PATIENCE_S = 5.0  # a driver whose GPU is lost may never answer


def broken_gpus(patience_s: float = PATIENCE_S, *, before: Collection[str] = ()) -> str | None:
    """Say what is broken on GPUs of this node: "GPU 3 has 2 uncorrectable ECC errors"; None if nothing is, or is known.

    Args:
        before: what has been said of its GPUs before, by `words_of`, and is not said again. Errors are counted since the
            driver was loaded, and those of weeks ago, in memory that is out of use since, have ended no rank of today.
    """
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader"]
    try:
        asked = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        return None
    try:
        answer, _ = asked.communicate(timeout=patience_s)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(OSError):
            asked.kill()  # and it is not waited for: the driver may hold it
        return None
    return parse_health(answer, before) if asked.returncode == 0 else None


def parse_health(answer: str, before: Collection[str] = ()) -> str | None:
    """Read the answer of nvidia-smi, a line each GPU with the values of FIELDS, into what `broken_gpus` says."""
    found = []
    for line in answer.splitlines():
        index, errors, pending, failed = [*(word.strip() for word in line.split(",")), "", "", "", ""][:4]
        words = words_of(index, int(errors) if errors.isdigit() else 0, pending == "Yes", failed == "Yes")
        if words is not None and words not in before:
            found.append(words)
    return "; ".join(found) or None


def words_of(index: int | str, ecc_errors: int, remap_pending: bool, remap_failed: bool) -> str | None:
    """Say what is broken on a GPU: uncorrectable errors, or memory that waits to be remapped or cannot be; None: nothing."""
    if ecc_errors:
        return f"GPU {index} has {ecc_errors} uncorrectable ECC errors"
    if remap_failed:
        return f"GPU {index} has uncorrectable memory that cannot be remapped"
    return f"GPU {index} has uncorrectable memory that waits to be remapped" if remap_pending else None
