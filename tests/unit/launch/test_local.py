"""The ranks of cluster=local: what they leave behind, and what stays of what they print. How they end is in test_job.py."""

from __future__ import annotations

import io
import os
import socket
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from slurmtrain.supervise.platforms.local import _copy, waits_of_threads
from slurmtrain.supervise.platforms.plain_log import PlainLog
from slurmtrain.system import process
from tests.support.commands import Cli


@pytest.mark.parametrize("own", [{"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "5"}, {"KMP_BLOCKTIME": "1"}])
def test_how_threads_wait_is_left_to_whoever_says_so(own: dict[str, str]) -> None:
    assert waits_of_threads(own) == {}


def test_threads_of_ranks_on_this_machine_do_not_spin_while_they_wait(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.delenv(name, raising=False)
    said = cli("+cluster=local", "job=command", "job.command=env", "job.snapshot=none", "submit").stdout
    assert "OMP_WAIT_POLICY=passive" in said and "GOMP_SPINCOUNT=1000" in said


def rank(folder: Path, text: str) -> str:
    """A script in place of the interpreter of the ranks, as an override."""
    script = folder / "rank"
    script.write_text(text)
    script.chmod(0o700)
    return f"cluster.python={script}"


def test_what_a_killed_rank_leaves_behind_is_ended_with_the_attempt_and_holds_nothing_up(
    cli: Cli, project: Path
) -> None:
    """The program of a wrapper that the kernel has killed, and a process of a launcher, which has a group of its own."""
    python = rank(
        project,
        "#!/bin/bash -m\n"  # -m: each job has a process group of its own
        f"bash -c 'trap \"\" TERM; echo $$ >{project}/own; exec sleep 3000' &\n"
        "set +m\n"
        f"bash -c 'trap \"\" TERM; echo $$ >{project}/same; exec sleep 3000' &\n"
        f"until [ -s {project}/own ] && [ -s {project}/same ]; do sleep 0.01; done; kill -9 $$\n",
    )
    done = cli("+cluster=local", "requeue=off", python, "submit")
    assert done.returncode == 1 and f"crashed: {socket.gethostname()}: task 0: Killed" in done.stdout, done.stderr
    for name in ("own", "same"):
        assert not process.lives(int((project / name).read_text())), name


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ("kill -6 $$", "crashed: {host}: task 1: Aborted (std::bad_alloc)"),
        ("exit 1", "crashed: rank 0: RuntimeError: Connection reset by peer"),
    ],
)
def test_a_rank_that_a_signal_has_ended_is_named_and_not_the_one_that_has_lost_it(
    cli: Cli, project: Path, ends: str, said: str
) -> None:
    lost = '{"rank": 0, "exit_code": 1, "sentence": "RuntimeError: Connection reset by peer", '
    lost += '"because_of_peer": true, "node": null, "time": 9e9}'
    last_words = "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc"
    python = rank(
        project,
        f"#!/bin/bash\nlost=$SLURMTRAIN_RUN_DIR/attempts/0001/failed-0.json\n"
        f'if [ $RANK = 1 ]; then until [ -s $lost ]; do sleep 0.05; done; echo "{last_words}"; {ends}; fi\n'
        f"echo '{lost}' >$lost; sleep 60\n",
    )
    words = ("cluster.tasks_per_node=2", "cluster.srun_wait_s=1", "requeue=off", python)
    done = cli("+cluster=local", *words, "submit")
    assert said.format(host=socket.gethostname()) in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("full", [False, True])
def test_a_rank_prints_on_although_nobody_reads_or_its_log_is_on_a_full_disk(
    full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with `submit | head`: more than a pipe holds, so that a rank would wait for ever in its next print."""
    reader, writer = os.pipe()
    os.close(reader)
    printed = b"step 1  loss 2.5\n" * 20_000
    source, rank = os.pipe()
    log = open("/dev/full" if full else tmp_path / "rank-0.log", "wb")  # noqa: SIM115  # it is closed by what is tested
    with os.fdopen(writer, "w") as shown:
        monkeypatch.setattr(sys, "stdout", shown)
        copier = threading.Thread(target=_copy, args=(source, log, True), daemon=True)
        copier.start()
        printer = threading.Thread(target=lambda: os.fdopen(rank, "wb").write(printed), daemon=True)
        printer.start()
        printer.join(30)
        copier.join(30)
        assert not printer.is_alive() and not copier.is_alive()
        print("the next line goes nowhere", flush=True)
    if not full:
        assert (tmp_path / "rank-0.log").read_bytes() == printed


# What stays in the log of a rank that draws on a terminal.


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
