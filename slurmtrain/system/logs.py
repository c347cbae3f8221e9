"""The log of this package: the loggers below "slurmtrain", and the handler that redacts and shows what they are told.

Modules log to `logging.getLogger(__name__)`, and importing them sets nothing up. The command line and the ranks call
`set_up`. A program of the user's own calls it by `slurmtrain.init()`; its own handlers are used instead if it has any.
"""

from __future__ import annotations

import logging
import sys
import time

from slurmtrain.system.redaction import redact

PACKAGE = "slurmtrain"
_LEVELS = {logging.WARNING: "warning: ", logging.ERROR: "error: "}


class LogHandler(logging.Handler):
    """Write messages to stderr as `slurmtrain: SENTENCE`, redacted, as they are then for all later handlers.

    Attributes:
        rank: write the time and this rank before each message.
        leave_to_others: write nothing where another handler, such as one of the root logger, gets the message as well.
    """

    rank: int | None = None
    leave_to_others = False

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
            if (shown := redact(text)) != text:
                record.msg, record.args = shown, None
            if record.exc_info:
                text = logging.Formatter().formatException(record.exc_info)
                if (shown := redact(text)) != text:
                    record.exc_text, record.exc_info = shown, None
            if not (self.leave_to_others and _has_other_handlers(record.levelno)):
                when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
                prefix = "" if self.rank is None else f"{when} rank {self.rank} "
                line = f"{prefix}{PACKAGE}: {_LEVELS.get(record.levelno, '')}{self.format(record)}\n"
                sys.stderr.write(redact(line))  # at once: ranks and data workers share the file
                sys.stderr.flush()
        except Exception:  # a full disk must not make a crash of a message
            self.handleError(record)


def set_up(rank: int | None = None, *, leave_to_others: bool = False) -> None:
    """Show what the package logs, from level INFO on, in place of how an earlier call shows it.

    Args:
        rank: put the time and this rank before each message: for the log of a rank.
        leave_to_others: this program is the user's own, so handlers and a level that it sets itself take precedence.
    """
    package, handler = logging.getLogger(PACKAGE), LogHandler()
    handler.rank, handler.leave_to_others = rank, leave_to_others
    own = [each for each in package.handlers if not isinstance(each, LogHandler)]
    # First, so that the others get messages redacted.
    package.handlers = [handler, *own]
    if not leave_to_others:  # whatever a model's or a data set's code does with the root logger
        package.propagate = False
    if package.level == logging.NOTSET and not (leave_to_others and _has_other_handlers(logging.CRITICAL)):
        package.setLevel(logging.INFO)


def show_error(error: object) -> None:
    """Print the error that ends this process on stderr, whatever the program has made of logging."""
    print(f"{PACKAGE}: error: {redact(str(error))}", file=sys.stderr, flush=True)


def _has_other_handlers(level: int) -> bool:
    """Return whether another handler writes messages of this level."""
    package = logging.getLogger(PACKAGE)
    root = logging.getLogger().handlers if package.propagate else []
    others = (each for each in [*package.handlers, *root] if not isinstance(each, (LogHandler, logging.NullHandler)))
    return any(each.level <= level for each in others)
