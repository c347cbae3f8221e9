"""What the driver says of the health of this node's GPUs, by nvidia-smi, which asks NVML. Nothing where there is none."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Sequence

FIELDS = ("index", "ecc.errors.uncorrected.volatile.total", "remapped_rows.pending", "remapped_rows.failure")
INVALID_ARGUMENT = 2  # exit code for a field that it does not know: older ones do not know those of remapped rows
PATIENCE_S = 5.0  # a driver whose GPU is lost may never answer


def broken_gpus(patience_s: float = PATIENCE_S) -> str | None:
    """Say what is broken on GPUs of this node: "GPU 3 has 2 uncorrectable ECC errors"; None if nothing is, or is known."""
    if shutil.which("nvidia-smi") is None:
        return None
    code, answer = _asked(FIELDS, patience_s)
    if code == INVALID_ARGUMENT:
        code, answer = _asked(FIELDS[:2], patience_s)
    return parse_health(answer) if code == 0 else None


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


def parse_health(answer: str) -> str | None:
    """Read the answer of nvidia-smi, a line each GPU with the values of FIELDS, into what `broken_gpus` says.

    Errors are counted since the driver was loaded, by whichever job had the GPU. Where none of its memory waits to be
    replaced, they do no harm any more, and no program fails for them; preflight lets such a GPU pass, too.
    """
    found = []
    for line in answer.splitlines():
        index, errors, pending, failed = [*(word.strip() for word in line.split(",")), "", "", "", ""][:4]
        if errors.isdigit() and int(errors) and failed != "Yes" and pending != "No":
            found.append(f"GPU {index} has {errors} uncorrectable ECC error{'s' if int(errors) > 1 else ''}")
        elif failed == "Yes":
            found.append(f"GPU {index} has uncorrectable memory that cannot be remapped")
        elif pending == "Yes":
            found.append(f"GPU {index} has uncorrectable memory that waits to be remapped")
    return "; ".join(found) or None
