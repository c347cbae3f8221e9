"""How much of a GPU's arithmetic training uses (MFU): python -m tests.bench.gpu [1b 8b smoke].

A training with FSDP2 in place, as on many GPUs: sequences of 4,096 random tokens, bfloat16, blocks compiled. Prints tokens/s,
memory, and the model FLOPs utilisation

    MFU = tokens/s x (6 N + 12 L H D S) / peak        dense bfloat16 peak of the GPU; see Decoder.flops_per_token

    1b      Llama 3.2 1B, nothing computed again; wanted: 50 % of an H100 or H200
    8b      Llama 3.1 8B, blocks computed again in backward, which does not count as work; wanted: 58 %. 128 GB of parameters,
            gradients and optimiser in float32: for an H200
    smoke   a tiny model on the CPU, to see that the benchmark itself works
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slurmtrain.training.hooks.base import RecordingHook
from tests.bench.side_by_side import run

STEPS = 40  # the first half warms up


@dataclass(frozen=True)
class Case:
    overrides: tuple[str, ...]
    seq_len: int
    micro_batch_size: int
    device: str = "cuda"
    wanted: float | None = None


CASES = {
    "1b": Case(("model=llama3_1b", "parallel.compile=true"), 4096, 4, wanted=0.50),
    "8b": Case(
        ("model=llama3_8b", "parallel.compile=true", "parallel.activation_checkpointing=full"), 4096, 1, wanted=0.58
    ),
    "smoke": Case(("model=tiny",), 64, 2, device="cpu"),
}


class RandomTokens:
    """As a `data._target_`: sample i is the same sequence each time."""

    def __init__(self, *, vocab_size: int, seq_len: int, **ignored: Any):
        self.train = _Samples(vocab_size, seq_len)


class _Samples:
    def __init__(self, vocab_size: int, seq_len: int):
        self._tokens = np.random.default_rng(0).integers(vocab_size, size=(1024, seq_len + 1))

    def __len__(self) -> int:
        return len(self._tokens)

    def get_batch(self, indices: NDArray[np.int64]) -> dict[str, Tensor]:
        rows = torch.from_numpy(self._tokens[indices])
        return {"inputs": rows[:, :-1].contiguous(), "targets": rows[:, 1:].contiguous()}


class EndsThere(RecordingHook):
    """Ends the process when the last step is logged: its checkpoint would be some 100 GB."""

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        if step == STEPS:
            os._exit(0)


def words_of(case: Case) -> list[str]:
    return [
        *("experiment=smoke", *case.overrides, "data._target_=tests.bench.gpu.RandomTokens"),
        *("+data.vocab_size=${model.vocab_size}", f"data.seq_len={case.seq_len}", "parallel.param_dtype=bfloat16"),
        *(f"train.steps={STEPS}", f"train.log_every={STEPS // 2}", "train.eval_every=0", "checkpoint.every_steps=0"),
        *(f"train.global_batch_size={case.micro_batch_size}", f"train.device={case.device}"),
    ]


def measure(case: Case) -> dict[str, Any]:
    """What the training has logged of its last steps, which have a record of their own."""
    hook = "train.hooks=[{_target_:tests.bench.gpu.EndsThere}]"
    with tempfile.TemporaryDirectory() as name:
        run([sys.executable, "-m", "slurmtrain", "train", *words_of(case), hook], Path(name))
        (log,) = Path(name).glob("runs/*/*/metrics.jsonl")
        found: dict[str, Any] = json.loads(log.read_text().splitlines()[-1])
    assert found["step"] == STEPS
    return found


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("cases", nargs="*", choices=[[], *CASES], default=[])
    options = parser.parse_args(words)
    for name in options.cases or (["1b", "8b"] if torch.cuda.is_available() else ["smoke"]):
        case = CASES[name]
        found = measure(case)
        share = f", MFU {found['mfu']:.1%} (wanted {case.wanted or 0:.0%})" if "mfu" in found else ""
        memory = f", {found['memory_allocated_gb']:.1f} GB" if "memory_allocated_gb" in found else ""
        print(f"{name}: {found['tokens_per_s']:,.0f} tokens/s{share}{memory}", flush=True)


if __name__ == "__main__":
    main()
