"""Loggers of one's own are tried before the queue, as far as this machine can tell."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmtrain.config.compose import compose
from slurmtrain.errors import ConfigError
from slurmtrain.launch.logger_check import check_loggers

LOGGER = """
print("I am imported")
class Mine:
    def __init__(self, url, every=1):
        self.url = url
    class Inner:
        pass
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text(LOGGER)
    (tmp_path / "mine" / "driver.py").write_text("import a_driver_that_only_nodes_have\n")
    (tmp_path / "mine" / "breaks.py").write_text("raise OSError('no GPU')\n")
    return tmp_path


@pytest.mark.parametrize(
    ("logger", "wrong"),
    [
        ("{_target_: mine.Mine, url: x}", None),
        ("{_target_: mine.Mine, url: x, every: 3}", None),
        ("{_target_: mine.Mine.Inner}", None),
        ("{_target_: mine.driver.Mine}", None),  # the nodes may have it
        ("{_target_: mine.breaks.Mine}", None),
        ("{_target_: mine.Yours, url: x}", "mine has no Yours"),
        ("{_target_: mine.other.Mine}", "mine has no other.Mine"),
        ("{_target_: yours.Mine}", "there is no module yours"),
        ("{_target_: mine.Mine}", "missing a required argument: 'url'"),
        ("{_target_: mine.Mine, url: x, evry: 3}", "unexpected keyword argument 'evry'"),
        ("{_target_: mine}", "no name of a class"),
    ],
)
def test_a_logger_that_cannot_be_built_is_refused_before_the_queue(
    project: Path, logger: str, wrong: str | None
) -> None:
    config = compose(["experiment=smoke", f"+observe.loggers.own={logger}"])
    if wrong is None:
        check_loggers(config, project)
        return
    with pytest.raises(ConfigError) as refused:
        check_loggers(config, project)
    assert wrong in refused.value.message and "observe.loggers.own._target_=" in refused.value.message
