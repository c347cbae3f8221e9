"""Benchmarks: python -m tests.bench [NAME ...] [--options of one]; without a name, all that BENCHMARKS names."""

from __future__ import annotations

import importlib
import sys

BENCHMARKS = (
    "cli",
    "quickstart",
    "throughput",
    "overhead",
    "observe",
    "stop",
    "recovery",
    "checkpoint",
    "node_copies",
    "collect",
    "status",
    "report",
    "usage",
    "sweep",
    "layout",
    "prepare",
    "data",
    "numbers",
    "weights",
    "goodput",
    "hf_checkpoint",
    "preflight",
)


def main() -> None:
    words = sys.argv[1:]
    first_option = next((index for index, word in enumerate(words) if word.startswith("-")), len(words))
    names = words[:first_option] or list(BENCHMARKS)
    for name in names:
        if name not in BENCHMARKS:
            raise SystemExit(f"there is no benchmark {name!r}; there are: {', '.join(BENCHMARKS)}")
        print(f"== {name}", flush=True)
        importlib.import_module(f"tests.bench.{name}").main()


if __name__ == "__main__":
    main()
