from __future__ import annotations

from pathlib import Path

from slurmtrain.data.prepared_config import with_absolute_paths

PREPARED = {"_target_": "slurmtrain.data.PreparedText"}


def test_what_was_relative_to_the_shell_that_submits_stays_what_it_was() -> None:
    own = {**PREPARED, "path": "tokens", "seq_len": 8, "evals": {"short": "few", "wiki": "../wiki/test"}}
    found = with_absolute_paths(own, Path("/home/me/project"))
    assert found["path"] == "/home/me/project/tokens" and found["seq_len"] == 8
    assert found["evals"] == {"short": "few", "wiki": "/home/me/wiki/test"}


def test_also_within_a_mixture_and_nothing_else_is_touched() -> None:
    sources = {"web": {**PREPARED, "path": "/data/web"}, "mine": {"_target_": "my.Data", "path": "here"}}
    found = with_absolute_paths({"_target_": "slurmtrain.data.Mixture", "sources": sources}, Path("/cwd"))
    assert found["sources"] == {"web": {**sources["web"], "evals": {}}, "mine": sources["mine"]}
