"""`python -m tests.parity [WORDS]`: train all rows of the matrix, or those whose names hold all WORDS, and print the table."""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from pathlib import Path

from tests.parity.matrix import ROWS, compare, config_of, train_alone, train_rows
from tests.support.gloo import GlooRanks


def main(words: list[str]) -> int:
    rows = [row for row in ROWS if all(word.lower() in row.name.lower() for word in words)]
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        ranks = GlooRanks(root)
        for model in {row.model for row in rows}:
            train_alone(root, model)
        print(
            f"{'layout':<44}{'ranks':>6}{'loss':>10}{'grad norm':>11}{'param norm':>12}{'valid':>12}{'bound':>9}{'seconds':>9}"
        )
        for size, group in itertools.groupby(sorted(rows, key=lambda row: row.ranks), key=lambda row: row.ranks):
            for row in group:
                began = time.monotonic()
                try:
                    ranks(size, train_rows, root, {row.name: config_of(row)}, timeout_s=300)
                except BaseException as error:
                    print(f"{row.name:<44}{row.ranks:>6}  {error}")
                    failed += 1
                    continue
                found = compare(root, row)
                failed += max(found.values()) > row.bound
                figures = "".join(
                    f"{value:>{width}.1e}" for value, width in zip(found.values(), (10, 11, 12, 12), strict=True)
                )
                print(
                    f"{row.name:<44}{row.ranks:>6}{figures}{row.bound:>9.0e}{time.monotonic() - began:>9.1f}",
                    flush=True,
                )
    print(f"{len(rows) - failed} of {len(rows)} layouts compute what one process computes")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
