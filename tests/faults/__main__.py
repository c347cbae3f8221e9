"""python -m tests.faults [--trials N] [--flips N] [ROW ...]: run the matrix, print the table, exit 1 if it is not clean."""

from __future__ import annotations

import argparse
import sys

from tests.faults.matrix import Matrix
from tests.faults.rows import BAD, ROWS, load, table


def main() -> int:
    load()
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", help="part of a row's name; default: all rows")
    parser.add_argument("--trials", type=int, default=500, help="kills of each kind (default: 500)")
    parser.add_argument("--flips", type=int, default=10_000, help="flipped bits (default: 10000)")
    parser.add_argument("--lanes", type=int, default=6, help="trials at a time (default: 6)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--skew", type=float, default=2.0, metavar="S", help="ranks write so far apart (default: 2 s)")
    parser.add_argument("--list", action="store_true", help="print the names of the rows")
    options = parser.parse_args()
    chosen = [row for name, row in ROWS.items() if not options.rows or any(part in name for part in options.rows)]
    if options.list or not chosen:
        print("\n".join(ROWS))
        return 0 if options.list else 2
    counts = {"trials": options.trials, "flips": options.flips}
    tallies = []
    with Matrix(lanes=options.lanes, seed=options.seed, skew_s=options.skew) as matrix:
        for row in chosen:
            print(f"{row.name} ...", file=sys.stderr, flush=True)
            tallies.append(matrix.run(row, counts.get(row.kind, row.full)))
    print(table(tallies))
    return 1 if any(tally[outcome] for tally in tallies for outcome in BAD) else 0


if __name__ == "__main__":
    sys.exit(main())
