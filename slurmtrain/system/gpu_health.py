"""What the driver says of the health of this node's GPUs, by nvidia-smi, which asks NVML. Nothing where there is none."""

from __future__ import annotations

import contextlib
import shutil
import subprocess

FIELDS = ("index", "ecc.errors.uncorrected.volatile.total", "remapped_rows.pending", "remapped_rows.failure")
PATIENCE_S = 5.0  # a driver whose GPU is lost may never answer


def broken_gpus(patience_s: float = PATIENCE_S) -> str | None:
    """Say what is broken on GPUs of this node: "GPU 3 has 2 uncorrectable ECC errors"; None if nothing is, or is known."""
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
    return parse_health(answer) if asked.returncode == 0 else None


def parse_health(answer: str) -> str | None:
    """Read the answer of nvidia-smi, a line each GPU with the values of FIELDS, into what `broken_gpus` says."""
    found = []
    for line in answer.splitlines():
        index, errors, pending, failed = [*(word.strip() for word in line.split(",")), "", "", "", ""][:4]
        if errors.isdigit() and int(errors):
            found.append(f"GPU {index} has {errors} uncorrectable ECC errors")
        elif failed == "Yes":
            found.append(f"GPU {index} has uncorrectable memory that cannot be remapped")
        elif pending == "Yes":
            found.append(f"GPU {index} has uncorrectable memory that waits to be remapped")
    return "; ".join(found) or None
