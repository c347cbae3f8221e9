"""What a user reads when the object of a `_target_` cannot be built."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hydra.errors import InstantiationException
from hydra.utils import instantiate

from slurmtrain.errors import why_not_built

MODULE = """
class Net:
    def __init__(self, width): pass
"""


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"_target_": "mine_of_targets.Nett", "width": 1}, "mine_of_targets has no Nett"),
        ({"_target_": "no_such_module.Net"}, "No module named 'no_such_module'"),
        ({"_target_": "needs_another.Net"}, "No module named 'not_installed'"),
        ({"_target_": "mine_of_targets.Net", "widht": 1}, "Net.__init__() got an unexpected keyword argument 'widht'"),
    ],
)
def test_the_innermost_cause_is_said_in_one_line(
    values: dict[str, object], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine_of_targets.py").write_text(MODULE)
    (tmp_path / "needs_another.py").write_text("import not_installed")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InstantiationException) as caught:
        instantiate(values)
    assert why_not_built(caught.value, str(values["_target_"])) == why
    sys.modules.pop("mine_of_targets", None)
