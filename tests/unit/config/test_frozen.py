"""Frozen configs: those of other versions of the package."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmtrain.config.compose import compose
from slurmtrain.config.frozen import freeze, load_frozen
from slurmtrain.errors import ConfigError


def test_a_frozen_config_of_another_version_of_the_package(tmp_path: Path) -> None:
    """A field that it lacks has its default; one that is not known here is an error."""
    path, text = tmp_path / "config.yaml", freeze(compose(["cluster=local", "train.log_every=7"]))
    with pytest.raises(ConfigError, match="is missing"):
        load_frozen(path)
    path.write_text("cluster: [torn")
    with pytest.raises(ConfigError, match="not a config of this version"):
        load_frozen(path)
    path.write_text(text.replace("  log_every: 7\n", ""))
    assert load_frozen(path) == compose(["cluster=local"])
    path.write_text(text.replace("  log_every: 7\n", "  clock: 1\n"))
    with pytest.raises(ConfigError, match="is not a config of this version: train has no field 'clock'") as error:
        load_frozen(path)
    assert "another version of slurmtrain" in str(error.value.hint)
