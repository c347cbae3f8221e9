"""The ranks of cluster=local share the machine with others."""

from __future__ import annotations

import os
import socket
import sys
import threading
from pathlib import Path

import pytest

from slurmtrain.config.compose import compose
from slurmtrain.config.schema import Config
from slurmtrain.launch.local import LocalAttempt, _copy, waits_of_threads
from slurmtrain.runs.create import create_run_dir
from slurmtrain.runs.failures import Failure, record_failure
from slurmtrain.runtime.finish_attempt import finish_attempt
from slurmtrain.system import process
from slurmtrain.system.files import write_json
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


def test_what_a_killed_rank_leaves_behind_is_ended_with_the_attempt_and_holds_nothing_up(tmp_path: Path) -> None:
    """The program of a wrapper that the kernel has killed, and a process of a launcher, which has a group of its own."""
    rank = tmp_path / "rank"
    rank.write_text(
        "#!/bin/bash -m\n"  # -m: each job has a process group of its own
        f"bash -c 'trap \"\" TERM; echo $$ >{tmp_path}/own; exec sleep 3000' &\n"
        "set +m\n"
        f"bash -c 'trap \"\" TERM; echo $$ >{tmp_path}/same; exec sleep 3000' &\n"
        f"until [ -s {tmp_path}/own ] && [ -s {tmp_path}/same ]; do sleep 0.01; done; kill -9 $$\n"
    )
    rank.chmod(0o700)
    run = create_run_dir(tmp_path, "train")
    write_json(run.info_file, {"workdir": "."})
    assert LocalAttempt(run, compose(["cluster=local", f"cluster.python={rank}"])).run() == 128 + 9
    for name in ("own", "same"):
        assert not process.lives(int((tmp_path / name).read_text())), name


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ("kill -9 $$", "crashed: {host}: task 1: Killed"),
        ("kill -6 $$", "crashed: {host}: task 1: Aborted (std::bad_alloc)"),
        ("exit 1", "crashed: rank 0: RuntimeError: Connection reset by peer"),
    ],
)
def test_a_rank_that_a_signal_has_ended_is_named_and_not_the_one_that_has_lost_it(
    tmp_path: Path, ends: str, said: str
) -> None:
    rank = tmp_path / "rank"
    last_words = "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc"
    rank.write_text(f'#!/bin/bash\nif [ $RANK = 1 ]; then echo "{last_words}"; {ends}; fi\nsleep 60\n')
    rank.chmod(0o700)
    run = create_run_dir(tmp_path, "train")
    write_json(run.info_file, {"workdir": "."})
    words = ["cluster.tasks_per_node=2", "cluster.srun_wait_s=1", f"cluster.python={rank}"]
    code = LocalAttempt(run, compose(["cluster=local", *words])).run()
    lost = Failure(1, "RuntimeError: Connection reset by peer", because_of_peer=True)
    record_failure(run.attempt(1), 0, lost)
    assert finish_attempt(run, 1, code, Config(), None).why == said.format(host=socket.gethostname())


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
