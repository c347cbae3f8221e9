"""The manifest and the path of a prepared data set: equal data sets have equal ones, and a wrong one is a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmtrain.cli import main
from slurmtrain.data.format.manifest import (
    KINDS,
    Manifest,
    Shard,
    Split,
    TokenizerFacts,
    read_manifest,
)
from slurmtrain.data.sources.config_check import with_absolute_paths
from slurmtrain.errors import ConfigError
from tests.support.fake_slurm import FakeSlurm
from tests.support.prepared import write_prepared

TOKENIZER = TokenizerFacts("tokenizers", "tokenizer.json", "ab" * 32, 300, None, 0)
SHARDS = (Shard("00000", 2, 7, 5, dict.fromkeys(KINDS, "cd")), Shard("00002", 1, 4, 3, dict.fromkeys(KINDS, "ef")))
MANIFEST = Manifest(TOKENIZER, {"train": Split(SHARDS)}, bad=1)


@pytest.mark.parametrize(
    ("vocabulary", "dtype"), [(256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32")]
)
def test_the_smallest_type_holds_the_vocabulary(vocabulary: int, dtype: str) -> None:
    assert TokenizerFacts("bytes", None, None, vocabulary, None, 0).dtype == dtype


@pytest.mark.parametrize(
    ("written", "instead", "said"),
    [
        ('"eos": 0', '"eos": "</s>"', "Expected `int | null`, got `str` - at `$.tokenizer.eos`"),
        ('"name": "00000"', '"name": "../0"', "matching regex '^[^./][^/]*$' - at `$.splits[...].shards[0].name`"),
        ('"train": {', '"../x": {', "matching regex '^[^./][^/]*$' - at `key` in `$.splits`"),
        ("{", "[{", "is not valid JSON"),
    ],
)
def test_a_manifest_that_cannot_be_right_is_refused(tmp_path: Path, written: str, instead: str, said: str) -> None:
    MANIFEST.write(tmp_path)
    file = tmp_path / "manifest.json"
    assert written in file.read_text()
    file.write_text(file.read_text().replace(written, instead, 1))
    with pytest.raises(ConfigError) as refused:
        read_manifest(tmp_path)
    assert said in refused.value.message and str(file) in refused.value.message


PREPARED = {"_target_": "slurmtrain.data.PreparedText"}


def test_what_was_relative_to_the_shell_that_submits_stays_what_it_was_also_within_a_mixture() -> None:
    own = {**PREPARED, "path": "../tokens", "seq_len": 8}
    assert with_absolute_paths(own, Path("/home/me/project")) == {**own, "path": "/home/me/tokens"}
    sources = {"web": {**PREPARED, "path": "/data/web"}, "mine": {"_target_": "my.Data", "path": "here"}}
    found = with_absolute_paths({"_target_": "slurmtrain.data.Mixture", "sources": sources}, Path("/cwd"))
    assert found["sources"] == sources


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
    assert main(["+cluster=a100x4", "data=prepared", "data.path=soon", "submit"]) == 78
