"""Errors of the file system while data is prepared, each in one sentence."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

from slurmtrain.errors import DataError

RERUN_HINT = "the same command again goes on where this one ended"


@contextlib.contextmanager
def file_errors_reported(output: Path) -> Iterator[None]:
    """Raise errors of the file system as DataError. `output` is the folder that most is written to."""
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(
            f"{error.filename} disappeared while a data set was being prepared", hint=f"restore it; {RERUN_HINT}"
        ) from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DataError(f"there is no space left for {output}", hint=f"free some space; {RERUN_HINT}") from None
        raise DataError(f"{error.filename or output}: {error.strerror or error}", hint=RERUN_HINT) from None
