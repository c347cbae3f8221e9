from __future__ import annotations

import os
import subprocess
from dataclasses import replace

import pytest

from slurmtrain.system import process
from slurmtrain.system.process_mark import ProcessMark


def test_a_mark_is_alive_as_long_as_its_process_also_when_it_was_read_back() -> None:
    me = ProcessMark.own()
    assert me.pid == os.getpid() and me.lives() and ProcessMark.from_json(me.to_json()) == me
    with subprocess.Popen(["sleep", "60"]) as child:
        mark = replace(me, pid=child.pid, born=process.born(child.pid))
        assert mark.lives()
        child.kill()
    assert mark.lives() is False


def test_the_process_that_has_a_pid_after_another_one_is_not_taken_for_it() -> None:
    assert replace(ProcessMark.own(), born="1").lives() is False


def test_a_process_of_another_host_or_container_is_neither_alive_nor_dead() -> None:
    me = ProcessMark.own()
    assert replace(me, host="another-host").lives() is None
    assert replace(me, namespace="pid:[1]").lives() is None
    assert not replace(me, namespace="pid:[1]").can_be_seen


def test_a_process_that_the_machine_hides_counts_as_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is somebody else's, on a machine with hidepid."""

    def not_permitted(pid: int, number: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", not_permitted)
    monkeypatch.setattr(process, "stat", lambda pid: None)
    assert replace(ProcessMark.own(), born="17").lives()


@pytest.mark.parametrize("values", [None, "x", {}, {"host": 1, "pid": 2}, {"host": "a", "pid": "2"}, {"host": "a"}])
def test_what_names_no_process_is_no_mark(values: object) -> None:
    assert ProcessMark.from_json(values) is None
