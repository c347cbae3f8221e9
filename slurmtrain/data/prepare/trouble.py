"""What goes wrong while data are prepared and a retry may mend, in one sentence."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

from slurmtrain.errors import SlurmtrainError

AGAIN = "the same command again goes on where this one ended"


class PrepareError(SlurmtrainError):
    """What a retry may mend: a full disk, an input that has vanished, a process that was killed."""


@contextlib.contextmanager
def in_a_sentence(output: Path) -> Iterator[None]:
    """Raise what the file system refuses as a PrepareError. `output` is where most is written."""
    try:
        yield
    except FileNotFoundError as error:
        raise PrepareError(
            f"{error.filename} has vanished while a data set was being prepared", hint=f"bring it back; {AGAIN}"
        ) from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise PrepareError(f"there is no space left for {output}", hint=f"make room; {AGAIN}") from None
        raise PrepareError(f"{error.filename or output}: {error.strerror or error}", hint=AGAIN) from None
