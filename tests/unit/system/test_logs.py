"""The package's log: one line on stderr, with rank and time in a rank's log, without secrets, and as the program wants it."""

from __future__ import annotations

import io
import logging
import os
import re
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


def test_a_rank_writes_the_time_and_its_number(capsys: pytest.CaptureFixture[str]) -> None:
    logs.set_up(3)
    log.info("loading PyTorch ...")
    said = capsys.readouterr().err
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d rank 3 slurmtrain: loading PyTorch \.\.\.\n", said)


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


@pytest.mark.parametrize(
    "quiet", ["logging.disable()", "import logging.config; logging.config.dictConfig({'version': 1})", "pass"]
)
def test_the_error_that_ends_a_program_is_shown_whatever_it_has_made_of_logging(quiet: str) -> None:
    program = f"import logging, slurmtrain\nslurmtrain.init(device='cpu')\n{quiet}\n{FAILS}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 78
    assert done.stderr.count("slurmtrain: error: no such data") == 1 and "Traceback" not in done.stderr


FAILS = "from slurmtrain.errors import ConfigError\nraise ConfigError('no such data', hint='look')"


def test_a_rank_says_it_once_whatever_a_model_does_with_the_root_logger() -> None:
    done = said_by("""
        from slurmtrain.system import logs
        logs.set_up(0)
        logging.basicConfig(level="WARNING")
        log.info("hello")
    """)
    assert done.stderr.count("hello") == 1 and done.stdout == ""


def test_nothing_is_lost_when_a_rank_leaves_nor_said_twice_by_its_forks() -> None:
    """A fork while another thread writes must not wait for that thread's lock for ever."""
    done = said_by("""
        import threading
        from slurmtrain.runtime.leaving import leave
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


def test_a_full_disk_makes_no_crash_of_a_message() -> None:
    with open("/dev/full", "w") as full:
        program = "import logging\nfrom slurmtrain.system import logs\nlogs.set_up()\nlogging.getLogger('slurmtrain').info('x')"
        words = [sys.executable, "-c", f"{program}\nimport os; os._exit(7)"]
        assert subprocess.run(words, stderr=full, env=dict(os.environ), timeout=60).returncode == 7
