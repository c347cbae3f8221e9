"""The GPU benchmark, as far as it goes without a GPU."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from slurmtrain.models import Decoder


@pytest.mark.slow
def test_the_gpu_benchmark_measures_and_writes_down(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    command = [sys.executable, "-m", "tests.bench.gpu", "smoke", "--results", str(results)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    (found,) = [json.loads(line) for line in results.read_text().splitlines()]
    tiny = Decoder(vocab_size=256, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, max_seq_len=128)
    assert found["flops_per_token"] == 6 * (tiny.num_parameters() - 5 * 32) + 12 * 2 * 32 * 64
    assert found["tokens_per_s"] > 0
    assert abs(found["loss"] - math.log(256)) < 1
    assert (found["mfu"], found["case"], found["seq_len"]) == (None, "smoke", 64)
    assert f"{found['tokens_per_s']:,.0f} tokens/s" in done.stdout
