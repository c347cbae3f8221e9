"""python -m tests.bench [cli] [throughput] [stop]"""

from __future__ import annotations

import importlib
import sys

BENCHMARKS = ("cli", "throughput", "stop")


def main() -> None:
    names = sys.argv[1:] or list(BENCHMARKS)
    for name in names:
        if name not in BENCHMARKS:
            raise SystemExit(f"there is no benchmark {name!r}; there are: {', '.join(BENCHMARKS)}")
        print(f"== {name}", flush=True)
        importlib.import_module(f"tests.bench.{name}").main()


if __name__ == "__main__":
    main()
