"""What the driver says of the health of this node's GPUs, by nvidia-smi, which asks NVML. Nothing where there is none."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Collection, Sequence

FIELDS = ("index", "ecc.errors.uncorrected.volatile.total", "remapped_rows.pending", "remapped_rows.failure")
INVALID_ARGUMENT = 2  # exit code for a field that it does not know: older ones do not know those of remapped rows
PATIENCE_S = 5.0  # a driver whose GPU is lost may never answer


def broken_gpus(patience_s: float = PATIENCE_S, *, before: Collection[str] | None = None) -> str | None:
    """Say what is broken on GPUs of this node: "GPU 3 has 2 uncorrectable ECC errors"; None if nothing is, or is known.

    Args:
        before: what `words_of` has said of its GPUs before, which is not said again; None: it is not known.
    """
    if shutil.which("nvidia-smi") is None:
        return None
    code, answer = _asked(FIELDS, patience_s)
    if code == INVALID_ARGUMENT:
        code, answer = _asked(FIELDS[:2], patience_s)
    return parse_health(answer, before) if code == 0 else None


def _asked(fields: Sequence[str], patience_s: float) -> tuple[int | None, str]:
    """Return how nvidia-smi ended, and its answer; None if it did not."""
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        asked = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        return None, ""
    try:
        answer, _ = asked.communicate(timeout=patience_s)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(OSError):
            asked.kill()  # and it is not waited for: the driver may hold it
        return None, ""
    return asked.returncode, answer


def parse_health(answer: str, before: Collection[str] | None = None) -> str | None:
    """Read the answer of nvidia-smi, a line each GPU with the values of FIELDS, into what `broken_gpus` says.

    Errors are counted since the driver was loaded, by whichever job had the GPU. Those of weeks ago, in memory that has
    been replaced since, have ended no rank of today. So they count if they are new; and where that is not known, if some
    memory still waits to be replaced, or the GPU does not say.
    """
    found = []
    for line in answer.splitlines():
        index, errors, pending, failed = [*(word.strip() for word in line.split(",")), "", "", "", ""][:4]
        count = int(errors) if errors.isdigit() and (before is not None or pending != "No") else 0
        words = words_of(index, count, pending == "Yes", failed == "Yes")
        if words is not None and words not in (before or ()):
            found.append(words)
    return "; ".join(found) or None


def words_of(index: int | str, ecc_errors: int, remap_pending: bool, remap_failed: bool) -> str | None:
    """Say what is broken on a GPU: uncorrectable errors, or memory that waits to be remapped or cannot be; None: nothing."""
    if remap_failed:
        return f"GPU {index} has uncorrectable memory that cannot be remapped"
    if ecc_errors:
        return f"GPU {index} has {ecc_errors} uncorrectable ECC error{'s' if ecc_errors > 1 else ''}"
    return f"GPU {index} has uncorrectable memory that waits to be remapped" if remap_pending else None
