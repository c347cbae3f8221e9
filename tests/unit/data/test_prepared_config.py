from __future__ import annotations

import re
from pathlib import Path

import pytest

from slurmtrain.cli import main
from slurmtrain.config.compose import compose
from slurmtrain.data.sources.config_check import check_prepared, with_absolute_paths
from slurmtrain.errors import ConfigError
from tests.support.fake_slurm import FakeSlurm
from tests.support.prepared import write_prepared

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


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("tokns", "there is no such folder in .*\n.*did you mean tokens"),
        ("raw.jsonl", "is a file, .*\n.*prepare.inputs=.*raw.jsonl"),
        ("raw", "has no manifest.json"),
        ("[tokens,more]", r"\['tokens', 'more'\] is not the path of a folder"),
    ],
)
def test_a_wrong_data_path_is_told_before_the_queue(
    path: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_prepared(tmp_path / "tokens", {"train": [[[1, 2, 3]]]}, vocab_size=256)
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw.jsonl").touch()
    config = compose(["data=prepared", f"data.path={path}"])
    with pytest.raises(ConfigError, match=r"data\.path|manifest") as caught:
        check_prepared(config)
    assert re.search(told, str(caught.value))


def test_data_that_another_job_prepares_or_that_only_the_nodes_see_is_no_error(project: Path, slurm: FakeSlurm) -> None:
    write_prepared(project / "tokens", {"train": [[[1, 2, 3]]]}, vocab_size=256)
    assert main(["+cluster=a100x4", "submit"]) == 0
    container = ["cluster.container.kind=pyxis", "cluster.container.image=ubuntu"]
    for path, words, options in (
        ("tokens", [], []),
        ("not/here/tokens", [], []),
        ("/tmp/staged-by-the-job", [], []),
        (f"{project}/inside", container, []),
        ("soon", [], ["--after", "last"]),
    ):
        line = ["+cluster=a100x4", "data=prepared", f"data.path={path}", *words, "submit", "--dry-run", *options]
        assert main(line) == 0, path
    assert main(["+cluster=a100x4", "data=prepared", "data.path=soon", "submit", "--dry-run"]) == 78
