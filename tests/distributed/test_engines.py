"""Engines besides SLURM that start our runs, each with the real package."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from slurmtrain.checkpoint.format.directory import committed, step_of
from slurmtrain.config.folders import PACKAGE
from tests.support.gloo import wait_until
from tests.support.local_runs import SMALL, LocalRun, Project, assert_same_run, assert_same_tensors, clean_environment
from tests.support.reading import checkpoint_tensors

JOBS = PACKAGE.parent / "jobs"


def needs(package: str, extra: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(package) is None, reason=f"needs {package}: pip install 'slurmtrain[{extra}]'")


class Script:
    """A program in the project's folder, and what it says. It ends with all that it has started."""

    def __init__(self, folder: Path, *words: str, **variables: str):
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".txt", delete=False) as log:
            self.log = Path(log.name)
            self.process = subprocess.Popen(
                [sys.executable, *words],
                cwd=folder,
                env={**clean_environment(), **variables},
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )

    def wait_for(self, condition: Callable[[], Any], what: str) -> None:
        wait_until(lambda: condition() or self.process.poll() is not None, what, 300)
        assert condition(), self.said

    def wait(self, timeout_s: float = 300) -> int:
        return self.process.wait(timeout_s)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    @property
    def said(self) -> str:
        return self.log.read_text()


@pytest.fixture
def scripts() -> Iterator[list[Script]]:
    started: list[Script] = []
    yield started
    for script in started:
        script.end()


# NVIDIA FLARE: two sites in its simulator.

SITES = ("site-1", "site-2")
STEPS = 16  # of a round; a power of two, so that the mean of two equal sites has the same bits


@pytest.fixture
def federated(project: Project) -> Path:
    shutil.copy(JOBS / "flare_rounds.py", project.path)
    return project.path / "federated"


@pytest.mark.slow
@needs("nvflare", "flare")
def test_rounds_of_two_equal_sites_are_one_run_although_one_is_preempted_within_a_round(
    project: Project, federated: Path, scripts: list[Script]
) -> None:
    words = ["flare_rounds.py", "--rounds=2", f"--steps={STEPS}", f"--folder={federated}", *SMALL]
    scripts.append(flare := Script(project.path, *words))
    sites = [LocalRun(federated / name, flare.process) for name in SITES]
    flare.wait_for(lambda: all((federated / name / "runs").exists() for name in SITES), "at both sites")
    flare.wait_for(lambda: all(site.step() == STEPS for site in sites), "at the end of the first round")
    (project.path / "pause").touch()
    flare.wait_for(lambda: sites[0].step() >= STEPS + 2, "in the second round")
    preempted = project.cli("preempt", str(sites[0].run_dir.path))
    (project.path / "pause").unlink()
    assert flare.wait() == 0, flare.said
    assert preempted.returncode == 0, preempted.stdout
    assert [attempt.reason for attempt in sites[0].attempts()] == ["finished", "asked", "finished"]
    assert sites[0].attempts()[1].last_step in range(STEPS + 2, 2 * STEPS)

    undisturbed = project.submit(f"train.steps={STEPS}").finish()
    project.resume(f"train.steps=+{STEPS}").finish()
    for site in sites:
        assert_same_run(site.run_dir.path, undisturbed.run_dir.path)
    assert_same_tensors(load_file(federated / "global.safetensors"), exported(project))


def test_a_round_begins_with_the_weights_that_flare_has_sent(project: Project, federated: Path) -> None:
    hook = f"train.hooks=[{{_target_: flare_rounds.GlobalWeights, file: '{project.path}/global.safetensors'}}]"
    project.submit("train.steps=2").finish()
    zeros = {name: tensor.zero_() for name, tensor in exported(project).items()}
    save_file(zeros, project.path / "global.safetensors", metadata={"step": "2"})
    run = project.resume("train.steps=+2", hook).finish()
    assert run.losses()[2]["loss"] == pytest.approx(math.log(256))  # all bytes are equally likely


def exported(project: Project) -> Any:
    file = project.path / "weights.safetensors"
    said = project.cli("checkpoints", "last", "export", str(file))
    assert said.returncode == 0, said.stdout
    return load_file(file)


# Ray: a head and another node on this machine, with ports of their own.


class RayCluster:
    """A Ray of two "nodes" with a CPU each."""

    def __init__(self, folder: Path):
        self._folder, ports = folder, free_ports(3)
        self.address, self.jobs = f"127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[1]}"
        self.variables = {
            "RAY_TMPDIR": str(folder),
            "RAY_ADDRESS": self.address,
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        self.head = self._start(
            "--head", f"--port={ports[0]}", f"--dashboard-port={ports[1]}", f"--ray-client-server-port={ports[2]}"
        )
        self.head.wait_for(lambda: "Ray runtime started" in self.head.said, "started")
        self.start_node()

    def start_node(self) -> None:
        self.node = self._start(f"--address={self.address}")
        self.node.wait_for(lambda: "Ray runtime started" in self.node.said, "started")

    def _start(self, *words: str) -> Script:
        own = ["--block", "--num-cpus=1", "--node-ip-address=127.0.0.1", "--object-store-memory=80000000"]
        own += ["--min-worker-port=0", "--max-worker-port=0", f"--dashboard-agent-listen-port={free_ports(1)[0]}"]
        without = {name: value for name, value in self.variables.items() if name != "RAY_ADDRESS"}
        return Script(self._folder, *RAY, "start", *words, *own, **without)

    def submit(self, *words: str) -> Script:
        """`ray job submit`, which shows the output of the program and waits for its end."""
        return Script(self._folder, *RAY, "job", "submit", "--address", self.jobs, "--", *words, **self.variables)

    def drain_node(self) -> None:
        """Announce that the node which is not the head is reclaimed in a while."""
        find = "import ray; ray.init(); print('ID', *(n['NodeID'] for n in ray.nodes() if n['Alive'] and "
        find += "'node:__internal_head__' not in n['Resources']))"
        (found := Script(self._folder, "-c", find, **self.variables)).wait()
        words = ["--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=spot", "--deadline-remaining-seconds=120"]
        node = found.said.rpartition("ID ")[2].strip()
        drain = Script(self._folder, *RAY, "drain-node", "--node-id", node, *words, **self.variables)
        assert drain.wait() == 0, found.said + drain.said


RAY = ["-m", "ray.scripts.scripts"]


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[RayCluster]:
    # Sockets lie in it, whose paths may have 107 letters.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        cluster = RayCluster(Path(folder))
        yield cluster
        cluster.node.end()
        cluster.head.end()


@pytest.mark.slow
@needs("ray", "ray")
def test_ray_train_goes_on_with_the_same_bits_after_a_kill_a_drained_node_and_a_stop(
    ray_cluster: RayCluster, tmp_path: Path, scripts: list[Script]
) -> None:
    def train(name: str, *options: str, submitted: bool = False) -> Script:
        words = [str(JOBS / "ray_train.py"), f"--folder={tmp_path / name}", "--steps=80", "--every=10", *options]
        by_hand = Script(tmp_path, *words, **ray_cluster.variables) if not submitted else None
        scripts.append(by_hand or ray_cluster.submit(sys.executable, *words))
        return scripts[-1]

    def steps() -> list[int]:
        return [step_of(path) for path in committed(tmp_path / "disturbed" / "checkpoints")]

    def node_fails(script: Script, resumed: str) -> None:
        ray_cluster.node.end()
        ray_cluster.start_node()
        script.wait_for(lambda: resumed in script.said, resumed)

    undisturbed = train("undisturbed", submitted=True)
    assert undisturbed.wait() == 0, undisturbed.said

    first = train("disturbed", "--pause=1")
    first.wait_for(lambda: 10 in steps(), "at step 10")
    node_fails(first, "resuming at step 10")
    ray_cluster.drain_node()
    first.wait_for(lambda: any(step % 10 for step in steps()), "saved when the node was drained")
    saved = next(step for step in steps() if step % 10)
    node_fails(first, f"resuming at step {saved}")
    first.process.terminate()
    assert first.wait() == 75, first.said
    stopped = steps()[-1]
    assert saved < stopped < 80

    second = train("disturbed", submitted=True)
    assert second.wait() == 0, second.said
    assert f"resuming at step {stopped}" in second.said
    assert_same_tensors(*(checkpoint_tensors(tmp_path / each / "checkpoints") for each in ("undisturbed", "disturbed")))


# SkyPilot: what it makes of the task, wherever its `sky` is installed.

PARSE = """
import json, sys, sky
task = sky.Task.from_yaml(sys.argv[1])
(wanted,) = task.resources
print(json.dumps([task.num_nodes, task.volumes, wanted.accelerators, wanted.cpus, wanted.memory, wanted.job_recovery]))
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("sky") is None, reason="needs `sky` on PATH: pip install 'slurmtrain[skypilot]'")
def test_skypilot_takes_the_task(project: Project, tmp_path: Path) -> None:
    pods = "{image: me/train:1, volumes: {/data: claim}}"
    words = ["+cluster=a100x4", "cluster.nodes=2", f"+cluster.pods={pods}"]
    rendered = project.cli(*words, "render", "--target", "skypilot")
    assert rendered.returncode == 0, rendered.stdout
    (tmp_path / "task.yaml").write_text(rendered.stdout)
    python = Path(shutil.which("sky") or "").parent / "python"
    environment = {**clean_environment(), "HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    said = subprocess.check_output([python, "-c", PARSE, tmp_path / "task.yaml"], env=environment, text=True)
    recovery = {"recover_on_exit_codes": [75], "max_restarts_on_errors": 0, "strategy": None}
    assert json.loads(said.splitlines()[-1]) == [2, {"/data": "claim"}, {"a100": 4}, "64+", "480+", recovery]
