"""python -m tests.bench.gpu [1b | 8b | smoke ...] [--micro-batch-size N]: how much of a GPU's arithmetic training uses.

Through the trainer, with FSDP2 in place, as on many GPUs: sequences of 4,096 random tokens, bfloat16, blocks compiled. Prints
and appends to results.jsonl, beside this file: tokens/s, memory, and the model FLOPs utilisation

    MFU = tokens/s x (6 N + 12 L H D S) / peak        dense bfloat16 peak of the GPU; see Decoder.flops_per_token

    1b      Llama 3.2 1B, nothing computed again; wanted: 50 % of an H100 or H200
    8b      Llama 3.1 8B, blocks computed again in backward, which does not count as work; wanted: 58 %. 128 GB of parameters,
            gradients and optimiser in float32: for an H200
    smoke   a tiny model on the CPU, to see that the benchmark itself works
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import platform
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slurmtrain.config.compose import compose
from slurmtrain.models import Decoder
from slurmtrain.planner.peaks import BF16, peak_of
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runtime.agreement import StopAgreement
from slurmtrain.runtime.attempt_context import AttemptContext
from slurmtrain.runtime.distributed_context import DistributedContext, choose_device
from slurmtrain.runtime.jobs.train import build_trainer
from slurmtrain.runtime.startup_times import Timeline
from slurmtrain.slurm.environment import Environment
from slurmtrain.system import signals
from slurmtrain.training.hooks.base import TrainingHook, TrainingHooks
from slurmtrain.training.hooks.nonfinite_guard import NonfiniteGuard
from slurmtrain.training.hooks.reporting import StepReports

WARM_UP, STEPS = 10, 30


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

    def __init__(self) -> None:
        self.times: dict[int, float] = {}
        self.losses: dict[int, float] = {}

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self.times[step], self.losses[step] = time.perf_counter(), values["loss"]


def measure(case: Case) -> dict[str, Any]:
    """Tokens per second from step WARM_UP to step STEPS, and what they mean."""
    config = compose(
        [
            "experiment=smoke",
            *case.overrides,
            f"data._target_={__name__ if __name__ != '__main__' else 'tests.bench.gpu.__main__'}.RandomTokens",
            *("+data.vocab_size=${model.vocab_size}", f"data.seq_len={case.seq_len}"),
            *("parallel.param_dtype=bfloat16", f"train.steps={STEPS}", f"train.log_every={WARM_UP}"),
            f"train.global_batch_size={case.micro_batch_size}",
        ]
    )
    environment = Environment(source="single")
    device = choose_device(case.device, environment)
    with tempfile.TemporaryDirectory() as folder:
        where = AttemptContext(RunDir(Path(folder)), 1, supervised=True)
        where.attempt_dir.path.mkdir(parents=True)
        agreement = StopAgreement(signals.StopFlag(), None)
        trainer = build_trainer(config, DistributedContext(environment, device), where, agreement, Timeline())
        watch = Stopwatch()
        kept = [hook for hook in trainer.state.hooks if isinstance(hook, StepReports | NonfiniteGuard)]
        trainer.state.hooks = TrainingHooks([*kept, watch])  # no files, above all no checkpoint
        trainer.fit()
    tokens = (STEPS - WARM_UP) * case.micro_batch_size * case.seq_len
    tokens_per_s = tokens / (watch.times[STEPS] - watch.times[WARM_UP])
    with torch.device("meta"):
        arguments = {name: value for name, value in config.model.items() if name != "_target_"}
        flops = Decoder(**arguments).flops_per_token(case.seq_len)
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else None
    peak = peak_of(gpu, BF16).tflops
    return {
        "gpu": gpu or platform.processor() or platform.machine(),
        "tokens_per_s": round(tokens_per_s, 1),
        "flops_per_token": flops,
        "mfu": None if peak is None else round(tokens_per_s * flops / peak / 1e12, 4),
        "wanted": case.wanted,
        "memory_gb": round(torch.cuda.max_memory_allocated() / 2**30, 1) if gpu else None,
        "loss": watch.losses[STEPS],
        **{name: value for name, value in dataclasses.asdict(case).items() if name not in ("wanted", "device")},
    }


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu")
    parser.add_argument("cases", nargs="*", choices=[[], *CASES], default=[])
    parser.add_argument("--micro-batch-size", type=int)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results.jsonl")
    options = parser.parse_args(words)
    for name in options.cases or (["1b", "8b"] if torch.cuda.is_available() else ["smoke"]):
        case = CASES[name]
        if options.micro_batch_size:
            case = dataclasses.replace(case, micro_batch_size=options.micro_batch_size)
        versions = {"date": datetime.date.today().isoformat(), "torch": torch.__version__, "cuda": torch.version.cuda}
        found = {"case": name, **versions, **measure(case)}
        with options.results.open("a") as file:
            file.write(json.dumps(found) + "\n")
        share = "" if found["mfu"] is None else f", MFU {found['mfu']:.1%} (wanted {found['wanted']:.0%})"
        print(
            f"{name} on {found['gpu']}: {found['tokens_per_s']:,.0f} tokens/s{share}, "
            f"{found['flops_per_token'] / 1e9:.2f} GFLOP a token, {found['memory_gb'] or '?'} GB"
        )


if __name__ == "__main__":
    main()
