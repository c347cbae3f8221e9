"""Tables of cases as text: a line each, with `  ->  ` between the cells."""

from __future__ import annotations


def cells_of(table: str, count: int) -> list[list[str]]:
    """The cells of each line, so many of them; those that a line lacks are empty. Lines that begin with # say why."""
    rows = [line.split("  ->  ") for line in table.splitlines() if line and not line.startswith("#")]
    assert max(map(len, rows)) <= count
    return [[*row, *[""] * (count - len(row))] for row in rows]


def words_of(cell: str) -> list[str]:
    """The words of a cell, which have two blanks between them."""
    return cell.split("  ") if cell else []
