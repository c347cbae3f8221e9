"""What `python -m slurmtrain sandbox` promises."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurmtrain.cli import main
from slurmtrain.errors import ClusterError
from slurmtrain.report.status.state import is_over
from slurmtrain.runs import lookup
from slurmtrain.sandbox import Sandbox, SandboxSpec, default_directory, find, up
from slurmtrain.sandbox.directory import claim_directory
from slurmtrain.sandbox.files import find_programs
from slurmtrain.system import process
from slurmtrain.system.process import ProcessMark, below, wait_until
from tests.support.slurm_cluster import Cluster, kill_node, start_node
from tests.support.stranger import Stranger

SMALL = SandboxSpec(nodes=1, cpus=2, kill_wait_s=10)

# Names the first signal that its task gets, and ends with it.
TELL_SIGNALS = """
srun bash -c 'trap "echo got TERM; exit" TERM; trap "echo got USR2; exit" USR2; echo ready; while :; do sleep .1; done' &
trap : TERM USR2
wait; wait; wait
"""


def everybody_in(sandbox: Sandbox) -> set[ProcessMark]:
    """Supervisor, daemons, steps and tasks."""
    supervisor = ProcessMark(**json.loads((sandbox.directory / "processes.json").read_text())["supervisor"])
    return {supervisor, *below([supervisor])}


def test_each_job_sees_the_gpus_it_asked_for(sandbox: Cluster) -> None:
    done = sandbox.run(["srun", "-N2", "-n2", "--gpus-per-node=2", "printenv", "CUDA_VISIBLE_DEVICES"])
    assert done.stdout.split() == ["0,1", "0,1"]
    one_each = sandbox.run(["srun", "-n4", "-N1", "--gpus-per-task=1", "printenv", "CUDA_VISIBLE_DEVICES"])
    assert sorted(one_each.stdout.split()) == ["0", "1", "2", "3"]


def test_another_user_cannot_run_anything_in_somebodys_sandbox(sandbox: Cluster, stranger: Stranger) -> None:
    """With munge's socket and slurm.conf `srun` would run it as the owner of the sandbox."""
    conf, socket = sandbox.sandbox.slurm_conf, sandbox.directory / "munge.sock"
    assert sandbox.directory.stat().st_mode & 0o077 == 0
    assert socket.exists() and sandbox.run(["munge", "-n", f"--socket={socket}"]).stdout
    for words in (["cat", str(conf)], ["munge", "-n", f"--socket={socket}"]):
        refused = stranger.run(words)
        assert refused.returncode != 0 and "Permission denied" in refused.stderr, refused


@pytest.mark.parametrize(("settings", "told"), [(None, "TERM"), ("user_signal", "USR2")])
def test_preemption_sends_term_or_the_jobs_own_signal_where_so_configured(
    settings: str | None, told: str, sandbox: Cluster, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if settings is not None:
        request.getfixturevalue(settings)
    cluster, out = sandbox, tmp_path / "out"
    job = cluster.sbatch("-w", "n0", "-o", str(out), "--signal=USR2@60", script=TELL_SIGNALS, cwd=tmp_path)
    cluster.wait_for_text(out, "ready")
    cluster.submit_high(nodes=["n0"], seconds=0.1)
    lines = cluster.wait_for_text(out, "got ").splitlines()
    assert next(line for line in lines if line.startswith("got ")) == f"got {told}"
    cluster.run(["scancel", job])


def test_no_process_of_a_job_outlives_it(sandbox: Cluster, tmp_path: Path) -> None:
    """As where SLURM keeps track of processes by cgroups, so that a drill does not hide what is killed elsewhere."""
    left = tmp_path / "left"
    script = f"setsid bash -c 'echo $$ >{left}; exec sleep 3000' >/dev/null 2>&1 &\nuntil [ -s {left} ]; do sleep 0.1; done\n"
    job_id = sandbox.sbatch("-o", "/dev/null", script=script, cwd=tmp_path)
    sandbox.wait_for(job_id, "COMPLETED")
    assert not process.lives(int(left.read_text()))


def test_two_side_by_side_have_their_own_jobs_and_down_leaves_no_process_and_no_directory(
    sandbox: Cluster, tmp_path: Path
) -> None:
    """Also where a controller had died, and of a badly behaved job: detached, and deaf to TERM."""
    other = up(SMALL, default_directory(f"other-{os.getpid()}"), ends_with=os.getpid())
    try:
        mine = sandbox.sbatch(script="sleep 60", cwd=tmp_path)
        assert other.run(["srun", "printenv", "SLURMD_NODENAME"]).stdout == "n0\n"
        assert "JobName=sbatch" not in other.run(["scontrol", "show", "job"]).stdout
        assert other.slurm_conf != sandbox.sandbox.slurm_conf
        kill_node(other, "slurmctld", only_daemon=True)
        assert other.node_states() == {}
        start_node(other, "slurmctld")
        assert wait_until(lambda: set(other.node_states()) == {*other.nodes}, timeout_s=60)
        stubborn = "trap '' TERM; setsid sleep 1234 & sleep 1234"
        other.run(["sbatch", "-D", str(tmp_path), "-o", "/dev/null", "--wrap", f'bash -c "{stubborn}"'])
        assert wait_until(lambda: any(b"1234" in cmdline(p) for p in everybody_in(other)), timeout_s=60)
        everybody = everybody_in(other)
    finally:
        other.down()
    assert not [p for p in everybody if p.lives()]
    assert not other.directory.exists() and find(other.directory) is None
    assert sandbox.wait_for(mine, {"RUNNING"})
    sandbox.run(["scancel", mine])


def cmdline(process: ProcessMark) -> bytes:
    try:
        return Path(f"/proc/{process.pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_down_works_after_the_supervisor_was_killed() -> None:
    sandbox = up(SMALL, default_directory(f"orphan-{os.getpid()}"), ends_with=os.getpid())
    everybody = everybody_in(sandbox)
    supervisor = min(everybody, key=lambda p: float(p.born or 0))
    os.kill(supervisor.pid, signal.SIGKILL)
    with pytest.raises(ClusterError, match="already") as caught:
        up(SMALL, sandbox.directory)
    assert "sandbox down" in str(caught.value.hint)
    found = find(sandbox.directory)
    assert found == sandbox
    found.down()
    assert not [p for p in everybody if p.lives()]
    assert not sandbox.directory.exists()


def test_without_slurm_one_sentence_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    assert main(["sandbox", "up", "--name", "nothing"]) == 1
    error, hint = capsys.readouterr().err.splitlines()
    assert error.startswith("slurmtrain: error: ") and hint == "  hint: apt-get install slurm-wlm munge"
    assert not default_directory("nothing").exists()


FAILING = {
    "it ends": (
        "echo the disk is on fire >&2; exit 3",
        r"slurmctld of the sandbox ended at once(?s:.*)the disk is on fire",
        "",
    ),
    # What slurmctld says when it was built without --enable-multiple-slurmd, and so plays one node a machine.
    "one node": (
        "echo 'slurmctld: error: Duplicated NodeHostName here in the config file' >&2; exec sleep 600",
        "built without --enable-multiple-slurmd",
        "--nodes 1",
    ),
}


@pytest.mark.parametrize("name", FAILING)
def test_a_controller_that_fails_is_said_and_nothing_is_left(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    does, said, hint = FAILING[name]
    failing = tmp_path / "slurmctld"
    failing.write_text(f"#!/bin/sh\n[ $1 = -V ] && echo slurm-wlm 22.05.8 && exit\n{does}\n")
    failing.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    directory = default_directory(f"failing-{os.getpid()}")
    with pytest.raises(ClusterError, match=said) as caught:
        up(SandboxSpec(nodes=2), directory)
    assert hint in str(caught.value.hint) and not directory.exists()


def test_it_runs_the_slurm_of_a_prefix_and_every_verb_asks_it_with_that_ones_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A prefix whose commands note that they were called stands for a SLURM that is on the PATH of one shell only."""
    prefix, called, programs = tmp_path / "slurm", tmp_path / "called", find_programs()
    for name in set(programs) - {"munged"}:
        program = prefix / ("sbin" if name in ("slurmctld", "slurmd") else "bin") / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(f'#!/bin/sh\necho {name} >>{called}\nexec {programs[name]} "$@"\n')
        program.chmod(0o755)
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "sh", "env", "timeout", "git", "munged", "hostname", "basename", "mkdir", "true"):
        (tools / name).symlink_to(shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") or name)
    monkeypatch.setenv("PATH", f"{prefix}/bin:{tools}")
    monkeypatch.setenv("SBATCH_EXPORT", "NONE")  # so that the job has a PATH of its own
    monkeypatch.delenv("SLURM_CONF", raising=False)
    monkeypatch.chdir(tmp_path)
    name = f"prefix-{os.getpid()}"
    words = ["--name", name, "--nodes", "1", "--cpus", "2"]
    try:
        assert main(["sandbox", "up", *words]) == 0
        monkeypatch.setenv("PATH", str(tools))
        assert f'eval "$(python -m slurmtrain sandbox env --name {name})"' in capsys.readouterr().out
        assert main(["sandbox", "status", "--name", name]) == 0
        assert "n0 idle" in capsys.readouterr().out
        assert {"slurmctld", "slurmd", "sinfo"} <= set(called.read_text().split())
        called.write_text("")
        job = ["cluster.nodes=1", "cluster.tasks_per_node=1", "job=command", "job.command='true'", "requeue=off"]
        assert main(["+cluster=sandbox", f"cluster.sandbox={name}", *job, "submit"]) == 0
        (run,) = lookup.all_runs(tmp_path / "runs")
        assert wait_until(lambda: is_over(run), timeout_s=120)
        assert main(["status", run.id]) == 0
        assert "finished" in capsys.readouterr().out
        assert {"sbatch", "squeue", "srun"} <= set(called.read_text().split())  # srun: in the job
        assert main(["sandbox", "env", "--name", name]) == 0
        path, conf = capsys.readouterr().out.splitlines()
        assert path == f'export PATH={prefix}/bin:"$PATH"'
        assert conf == f"export SLURM_CONF={default_directory(name)}/slurm.conf"
    finally:
        assert main(["sandbox", "down", "--name", name]) == 0
    assert main(["sandbox", "status", "--name", name]) == 1
    assert "no sandbox runs" in capsys.readouterr().err


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Sockets have short names; pytest's folders are long ones."""
    with tempfile.TemporaryDirectory(prefix="st-", dir="/tmp") as folder:
        yield Path(folder)


def test_a_directory_that_is_not_ours_alone_is_refused(short_path: Path) -> None:
    full = short_path / "full"
    full.mkdir()
    (full / "thesis.tex").touch()
    with pytest.raises(ClusterError, match="not empty"):
        up(SMALL, full)
    link = short_path / "link"
    link.symlink_to(short_path / "elsewhere")
    (short_path / "elsewhere").mkdir()
    with pytest.raises(ClusterError, match="not a directory of yours"):
        up(SMALL, link)
    with pytest.raises(ClusterError, match="too long a path"):
        up(SMALL, short_path / ("x" * 100))
    assert (full / "thesis.tex").exists()


def test_a_directory_of_somebody_else_is_refused(stranger: Stranger) -> None:
    theirs = stranger.folder / "sandbox"
    assert stranger.run(["mkdir", "--mode=777", str(theirs)]).returncode == 0
    with pytest.raises(ClusterError, match="not a directory of yours"):
        up(SMALL, theirs)


def test_the_folders_of_sandboxes_are_closed_to_others_even_where_they_were_open(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(short_path))
    directory = default_directory("x")
    directory.mkdir(parents=True)
    for path in (directory, directory.parent):
        path.chmod(0o711)
    os.close(claim_directory(directory))
    assert [path.stat().st_mode & 0o777 for path in (directory, directory.parent)] == [0o700, 0o700]
