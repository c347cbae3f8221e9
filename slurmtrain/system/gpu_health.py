"""What the driver says of the health of this node's GPUs, by nvidia-smi, which asks NVML. Nothing where there is none."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterator

# Two questions, since nvidia-smi refuses a question as a whole for one field that it does not know there.
ERRORS = "--query-gpu=index,ecc.errors.uncorrected.volatile.total"
REMAPPED = "--query-remapped-rows=gpu_bus_id,remapped_rows.pending,remapped_rows.failure"
PATIENCE_S = 5.0  # a driver whose GPU is lost may never answer


def broken_gpus(patience_s: float = PATIENCE_S) -> str | None:
    """Say what is broken on GPUs of this node: "GPU 3 has 2 uncorrectable ECC errors"; None if nothing is, or is known."""
    if shutil.which("nvidia-smi") is None:
        return None
    until = time.monotonic() + patience_s
    asked = [_ask(question) for question in (ERRORS, REMAPPED)]
    errors, remapped = (_answer(each, until) for each in asked)
    return parse_health(errors, remapped)


def _ask(question: str) -> subprocess.Popen[str] | None:
    command = ["nvidia-smi", question, "--format=csv,noheader"]
    try:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        return None


def _answer(asked: subprocess.Popen[str] | None, until: float) -> str:
    """Return what is said until then; nothing if it is no answer."""
    if asked is None:
        return ""
    try:
        answer, _ = asked.communicate(timeout=max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        with contextlib.suppress(OSError):
            asked.kill()  # and it is not waited for: the driver may hold it
        return ""
    return answer if asked.returncode == 0 else ""


def parse_health(errors: str, remapped: str) -> str | None:
    """Read the answers of nvidia-smi to ERRORS and REMAPPED, a line each GPU, into what `broken_gpus` says."""
    found = [f"GPU {gpu} has {count} uncorrectable ECC errors" for gpu, count in _rows(errors, 2) if _positive(count)]
    for gpu, pending, failed in _rows(remapped, 3):
        if failed == "Yes":
            found.append(f"GPU {gpu} has uncorrectable memory that cannot be remapped")
        elif _positive(pending) or pending == "Yes":
            found.append(f"GPU {gpu} has uncorrectable memory that waits to be remapped")
    return "; ".join(found) or None


def _rows(answer: str, columns: int) -> Iterator[list[str]]:
    for line in answer.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) == columns:
            yield words


def _positive(word: str) -> bool:
    return word.isdigit() and int(word) > 0
