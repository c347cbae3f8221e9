"""The ranks of cluster=local share the machine with others."""

from __future__ import annotations

import pytest

from slurmtrain.launch.local import waits_of_threads
from tests.support.commands import Cli


@pytest.mark.parametrize("own", [{"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "5"}, {"KMP_BLOCKTIME": "1"}])
def test_how_threads_wait_is_left_to_whoever_says_so(own: dict[str, str]) -> None:
    assert waits_of_threads(own) == {}


def test_threads_of_ranks_on_this_machine_do_not_spin_while_they_wait(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.delenv(name, raising=False)
    said = cli("+cluster=local", "job=command", "job.command=env", "job.snapshot=none", "submit").stdout
    assert "OMP_WAIT_POLICY=passive" in said and "GOMP_SPINCOUNT=1000" in said
