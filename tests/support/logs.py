"""What the package has logged, in a process of a test's own, where there is no `caplog`."""

from __future__ import annotations

import logging

from slurmtrain.system.logs import PACKAGE


class _Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def collect_messages() -> list[str]:
    """Return a list to which all messages are added from now on. A list that was returned before gets no more."""
    package, collector = logging.getLogger(PACKAGE), _Collector()
    package.setLevel(logging.INFO)
    for handler in [each for each in package.handlers if isinstance(each, _Collector)]:
        package.removeHandler(handler)
    package.addHandler(collector)
    return collector.messages
