"""How much of a GPU's arithmetic training uses (MFU), and what its watch costs: python -m tests.bench.gpu [1b 8b smoke].

A training with FSDP2 in place, as on many GPUs: sequences of 4,096 random tokens, bfloat16, blocks compiled. Prints tokens/s,
memory, and the model FLOPs utilisation

    MFU = tokens/s x (6 N + 12 L H D S) / peak        dense bfloat16 peak of the GPU; see Decoder.flops_per_token

    1b      Llama 3.2 1B, nothing computed again; wanted: 50 % of an H100 or H200
    8b      Llama 3.1 8B, blocks computed again in backward, which does not count as work; wanted: 58 %. 128 GB of parameters,
            gradients and optimiser in float32: for an H200
    smoke   a tiny model on the CPU, to see that the benchmark itself works

With `--rounds N`, each case runs N times as it is, and N times in turn without the watchdog and the times of the parts of a
step: the ratio of the two is what watching costs. Wanted: at most 1.5 %.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slurmtrain.config.compose import compose
from slurmtrain.models import Decoder
from slurmtrain.planner.hardware import BF16, peak_of
from slurmtrain.training.hooks import TrainingHook
from tests.bench.side_by_side import in_turn, ratio, run, show

WARM_UP, STEPS = 10, 30
UNWATCHED = ("observe.phases=false", "watchdog.enabled=false")


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


class Stopwatch(TrainingHook):
    """The time of each logged step; its loss has been waited for by then, and all the work before it is done."""

    def __init__(self, out: str) -> None:
        self._out, self._times = Path(out), dict[int, float]()

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self._times[step] = time.perf_counter()
        if step < STEPS:
            return
        found: dict[str, Any] = {"seconds": self._times[STEPS] - self._times[WARM_UP], "gpu": None}
        if torch.cuda.is_initialized():
            found |= {"gpu": torch.cuda.get_device_name(), "memory_gb": torch.cuda.max_memory_allocated() / 2**30}
        self._out.write_text(json.dumps(found))
        os._exit(0)  # the checkpoint of the last step would be some 100 GB


def words_of(case: Case) -> list[str]:
    return [
        *("experiment=smoke", *case.overrides, "data._target_=tests.bench.gpu.RandomTokens"),
        *("+data.vocab_size=${model.vocab_size}", f"data.seq_len={case.seq_len}", "parallel.param_dtype=bfloat16"),
        *(f"train.steps={STEPS}", f"train.log_every={WARM_UP}", "train.eval_every=0", "checkpoint.every_steps=0"),
        *(f"train.global_batch_size={case.micro_batch_size}", f"train.device={case.device}"),
    ]


def measure(case: Case, *more: str) -> dict[str, Any]:
    """Tokens per second from step WARM_UP to step STEPS, and what they mean."""
    with tempfile.TemporaryDirectory() as name:
        out = Path(name, "found.json")
        hook = f"train.hooks=[{{_target_:tests.bench.gpu.Stopwatch,out:'{out}'}}]"
        run([sys.executable, "-m", "slurmtrain", "train", *words_of(case), *more, hook], Path(name))
        found = json.loads(out.read_text())
    tokens_per_s = (STEPS - WARM_UP) * case.micro_batch_size * case.seq_len / found["seconds"]
    model = compose(words_of(case)).model
    with torch.device("meta"):
        decoder = Decoder(**{name: value for name, value in model.items() if name != "_target_"})
    flops = decoder.flops_per_token(case.seq_len)
    peak = peak_of(found["gpu"], BF16).tflops
    mfu = None if peak is None else tokens_per_s * flops / peak / 1e12
    return {**found, "tokens_per_s": tokens_per_s, "flops": flops, "mfu": mfu}


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("cases", nargs="*", choices=[[], *CASES], default=[])
    parser.add_argument("--rounds", type=int, default=0, help="of a run as it is and one without what watches")
    options = parser.parse_args(words)
    for name in options.cases or (["1b", "8b"] if torch.cuda.is_available() else ["smoke"]):
        case = CASES[name]
        if options.rounds:
            variants = {"as it is": partial(measure, case), "unwatched": partial(measure, case, *UNWATCHED)}
            each = in_turn(variants, options.rounds, warm_up=0)
            rates = {which: [found["tokens_per_s"] for found in all_rounds] for which, all_rounds in each.items()}
            said = "time of a step, as it is / unwatched"
            show(name, [ratio(said, rates["unwatched"], rates["as it is"], "<= 1.015")])
            continue
        found = measure(case)
        share = "" if found["mfu"] is None else f", MFU {found['mfu']:.1%} (wanted {case.wanted or 0:.0%})"
        memory = f", {found['memory_gb']:.1f} GB" if found["gpu"] else ""
        speed = f"{found['tokens_per_s']:,.0f} tokens/s{share}, {found['flops'] / 1e9:.2f} GFLOP a token{memory}"
        print(f"{name} on {found['gpu'] or 'CPUs'}: {speed}")


if __name__ == "__main__":
    main()
