"""Benchmarks: python -m tests.bench NAME [options of it]; `all` runs all, and without a name they are listed."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

BENCHES = ("cli", "runs", "training", "checkpoint", "data", "gpu")


def main() -> None:
    name, *options = sys.argv[1:] or [""]
    if name not in (*BENCHES, "all", ""):
        raise SystemExit(f"there is no benchmark {name!r}; there are: {', '.join(BENCHES)}")
    for each in BENCHES if name == "all" else [name] if name else []:
        importlib.import_module(f"tests.bench.{each}").main(options)
    for each in BENCHES if not name else []:
        text = ast.get_docstring(ast.parse(Path(__file__).with_name(f"{each}.py").read_text())) or ""
        print(f"{each:14} {text.splitlines()[0]}")


if __name__ == "__main__":
    main()
