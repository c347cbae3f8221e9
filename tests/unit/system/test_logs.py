"""The package's log: one line on stderr, with rank and time in a rank's log, without secrets, and as the program wants it."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
import textwrap

import pytest

from slurmtrain.system import logs
from slurmtrain.system.redaction import hide

log = logging.getLogger("slurmtrain.some.module")


def said_by(program: str) -> subprocess.CompletedProcess[str]:
    beginning = "import logging, os, sys\nlog = logging.getLogger('slurmtrain.some.module')\n"
    words = [sys.executable, "-c", beginning + textwrap.dedent(program)]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)


def test_a_message_is_one_line_that_names_us_and_how_bad_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    logs.set_up()
    log.info("%d runs", 3)
    log.warning("100% full")
    log.error("no %s", "node")
    log.debug("nobody sees this")
    logs.set_up()  # once more: nothing is shown twice
    log.info("done")
    said = [line.removeprefix("slurmtrain: ") for line in capsys.readouterr().err.splitlines()]
    assert said == ["3 runs", "warning: 100% full", "error: no node", "done"]


def test_messages_and_tracebacks_hold_no_secret_for_whichever_handler(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for a handler of the application that has taken hold of stderr before it was redacted."""
    hide({"TOKEN": "hf_123456"})
    own = logging.StreamHandler(io.StringIO())
    monkeypatch.setattr(logging.getLogger(), "handlers", [own])
    for leave_to_others in (False, True):
        logs.set_up(leave_to_others=leave_to_others)
        logging.getLogger("slurmtrain").propagate = True
        try:
            raise ValueError("no login as hf_123456")
        except ValueError:
            log.exception("login as %s failed", "hf_123456")
        said = own.stream.getvalue() if leave_to_others else capsys.readouterr().err
        assert "login as ***TOKEN*** failed" in said and "ValueError: no login as ***TOKEN***" in said
    assert "hf_123456" not in own.stream.getvalue() and capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("before", "after", "out", "err"),
    [
        ("", "", "", "slurmtrain: hello\n"),
        ("logging.basicConfig(stream=sys.stdout, level='INFO')", "", "INFO:slurmtrain.some.module:hello\n", ""),
        ("", "logging.basicConfig(stream=sys.stdout)", "INFO:slurmtrain.some.module:hello\n", ""),
        ("logging.basicConfig(stream=sys.stdout)", "", "", ""),  # its level is WARNING
        ("", "logging.getLogger('slurmtrain').setLevel('WARNING')", "", ""),
        ("logging.getLogger('slurmtrain').setLevel('WARNING')", "", "", ""),
        ("", "logging.getLogger('slurmtrain').addHandler(logging.StreamHandler(sys.stdout))", "hello\n", ""),
        ("", "logging.getLogger('slurmtrain').addHandler(logging.NullHandler())", "", "slurmtrain: hello\n"),
        ("h = logging.StreamHandler(); h.setLevel(40)", "logging.getLogger().addHandler(h)", "", "slurmtrain: hello\n"),
    ],
)
def test_a_program_of_the_users_own_silences_or_redirects_us_by_standard_logging(
    before: str, after: str, out: str, err: str
) -> None:
    done = said_by(f"""
        from slurmtrain.system import logs
        {before}
        logs.set_up(leave_to_others=True)
        {after}
        log.info("hello")
    """)
    assert (done.stdout, done.stderr) == (out, err)


def test_nothing_is_lost_when_a_rank_leaves_nor_said_twice_by_its_forks() -> None:
    """A fork while another thread writes must not wait for that thread's lock for ever."""
    done = said_by("""
        import threading
        from slurmtrain.rank.leaving import leave
        from slurmtrain.system import logs
        logs.set_up(0)
        threading.Thread(target=lambda: [log.info("busy") for _ in range(2000)], daemon=True).start()
        for number in range(20):
            if not (child := os.fork()):
                log.info("child %d", number)
                os._exit(0)
            os.waitpid(child, 0)
        log.info("the last words")
        try:
            leave(0)
        finally:
            os._exit(1)
    """)
    for words in (*(f"child {number}\n" for number in range(20)), "the last words\n"):
        assert done.stderr.count(words) == 1, words
