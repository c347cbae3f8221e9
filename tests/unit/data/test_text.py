from __future__ import annotations

import math
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from slurmtrain.data.sources.text import ByteWindows, StdlibText
from slurmtrain.errors import ConfigError

CONF = Path(__file__).parents[3] / "conf"


def test_every_byte_after_the_first_is_a_target_exactly_once() -> None:
    text = np.arange(1, 24, dtype=np.uint8)
    windows = ByteWindows(text, seq_len=5)
    batch = windows.get_batch(np.arange(len(windows)))
    targets = batch["targets"].flatten()
    assert targets[targets != -100].tolist() == list(range(2, 24))
    kept = batch["targets"] != -100
    assert torch.equal(batch["inputs"][kept] + 1, batch["targets"][kept])  # each target follows its input
    assert len(windows) == 5 and (targets == -100).sum() == 3


def test_whole_files_are_held_out_and_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = {f"part{i:02d}/{i}.py": chr(ord("A") + i) * (20 + i) for i in range(26)}
    for name, content in {**contents, "tests/left_out.py": "?", "empty.py": ""}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    text = StdlibText(seq_len=8, valid_fraction=0.2)
    letters = {}
    for name, dataset in (("train", text.train), ("valid", text.valid)):
        targets = dataset.get_batch(np.arange(len(dataset)))["targets"]
        letters[name] = bytes(targets[targets > 0].tolist()).decode()
    assert sorted(letters["train"] + letters["valid"]) == sorted("".join(contents.values()))
    assert not set(letters["train"]) & set(letters["valid"])
    assert 0 < len(letters["valid"]) <= 0.2 * len("".join(contents.values()))
    with pytest.raises(ConfigError, match=r"too few \.py files"):
        StdlibText(seq_len=8, max_bytes=5)


def test_unigram_entropy_is_the_loss_of_guessing_by_frequency(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.py").write_text("xxxx")
    (tmp_path / "b.py").write_text("y")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    # Training text x x x x 0: counts + 1 are 5 for x, 2 for the separator, 1 for y, of 5 + 256 in all.
    entropy = StdlibText(seq_len=4, valid_fraction=0.2).unigram_entropy
    assert entropy == pytest.approx(-(math.log(1 / 261) + math.log(2 / 261)) / 2)


@pytest.mark.parametrize("name", ["stdlib", "stdlib_tiny"])
def test_the_standard_library_is_the_same_everywhere(name: str) -> None:
    text = instantiate(OmegaConf.load(CONF / "data" / f"{name}.yaml"), seq_len=64)
    assert len(text.train) > 1000 and len(text.valid) > 50 and 2.5 < text.unigram_entropy < 4.0
    assert text.vocab_size == 256 and "standard library" in text.description
    program = f"""from hydra.utils import instantiate; from omegaconf import OmegaConf
print(instantiate(OmegaConf.load({str(CONF / "data" / f"{name}.yaml")!r}), seq_len=64).fingerprint)"""
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(CONF.parent)}
    command = [sys.executable, "-c", program]
    other = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert text.fingerprint == other.stdout.strip()


def test_values_out_of_range_are_named() -> None:
    with pytest.raises(ConfigError, match=r"data\.seq_len is 0"):
        StdlibText(0)
    with pytest.raises(ConfigError, match=r"data\.valid_fraction is 1\.5"):
        StdlibText(8, max_bytes=1000, valid_fraction=1.5)
