"""What stays in the log of a rank that draws on a terminal."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from slurmtrain.launch.plain_log import PlainLog


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        (b"plain\r\nlines\r\n", b"plain\nlines\n"),
        (b"no end", b"no end\n"),
        (b"\x1b[31mred\x1b[0m\r\n", b"red\n"),
        (b"\x1b]0;title\x07text\r\n", b"text\n"),
        (b"1 %\r2 %\r3 %\r\n", b"3 %\n"),
        (b"\x1b[2K1 %\r\x1b[2K2 %\r\x1b[2Ksaid\r\n2 %\r\x1b[2K3 %\r\n", b"said\n3 %\n"),
        (b"caf\xc3\xa9\r\n", "café\n".encode()),
    ],
)
def test_a_log_holds_what_a_person_would_have_seen(written: bytes, kept: bytes) -> None:
    log = PlainLog()
    assert log.feed(written) + log.close() == kept


def test_of_a_bar_a_log_keeps_a_line_now_and_then_and_the_last() -> None:
    clock = Clock()
    log, kept = PlainLog(clock), b""
    for step in range(100):
        clock.now = step / 4
        kept += log.feed(b"\r\x1b[2Kstep %d/99" % step)
    assert (kept + log.feed(b"\r\n")).splitlines() == [b"step 39/99", b"step 79/99", b"step 99/99"]


def test_a_bar_of_rich_leaves_no_frames_behind() -> None:
    terminal = io.StringIO()
    console = Console(file=terminal, force_terminal=True, width=80)
    with Progress(BarColumn(24), TextColumn("{task.fields[line]}"), console=console) as bar:
        task = bar.add_task("", total=50, line="")
        for step in range(50):
            bar.update(task, completed=step, line=f"step {step}")
            bar.refresh()
        bar.console.print("said")
    log = PlainLog()
    kept = log.feed(terminal.getvalue().replace("\n", "\r\n").encode()) + log.close()
    assert b"\x1b" not in kept and b"said\n" in kept and b"step 49\n" in kept
    assert len(kept) < 500 < len(terminal.getvalue())


@given(
    st.lists(st.sampled_from([b"a", b"\r", b"\n", b"\r\n", b"\x1b[2K", b"\x1b[1A", b"\x1b]0;x\x07", b"\xc3\xa9"])),
    st.data(),
)
def test_it_does_not_matter_how_the_bytes_come(parts: list[bytes], data: st.DataObject) -> None:
    written = b"".join(parts)
    whole = PlainLog(Clock())
    expected = whole.feed(written) + whole.close()
    cut = data.draw(st.integers(0, len(written)))
    log = PlainLog(Clock())
    assert log.feed(written[:cut]) + log.feed(written[cut:]) + log.close() == expected
