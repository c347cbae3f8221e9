"""Engines besides SLURM that start our runs, each with the real package."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file, save_file

from slurmtrain.checkpoint.format.directory import committed, step_of
from slurmtrain.config.folders import PACKAGE
from slurmtrain.runs.lookup import all_runs
from slurmtrain.runs.run_dir import RunDir
from tests.support.children import children
from tests.support.local_runs import SMALL, LocalRun, Project, assert_same_run, assert_same_tensors, clean_environment
from tests.support.reading import checkpoint_tensors
from tests.support.scripts import Program

JOBS = PACKAGE.parent / "jobs"


def needs(package: str, extra: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(package) is None, reason=f"needs {package}: pip install 'slurmtrain[{extra}]'")


@pytest.fixture
def scripts() -> Iterator[list[Program]]:
    started: list[Program] = []
    yield started
    for script in started:
        script.end()


def prepared(project: Project, target: str, *overrides: str) -> tuple[RunDir, Any]:
    """A run for two nodes of an engine, and what the engine is given."""
    pods = ["cluster.backend=kubernetes", "cluster.nodes=2", "cluster.pods.image=none", "train.device=cpu"]
    pods += [f"+cluster.pods.volumes={{{project.path}: claim}}"]
    own = [word for word in SMALL if word != "+cluster=local"]
    rendered = project.cli(*own, *pods, *overrides, "render", "--target", target, "-o", "manifest.yaml")
    assert rendered.returncode == 0, rendered.stdout
    return all_runs(project.path / "runs")[-1], yaml.safe_load((project.path / "manifest.yaml").read_text())


@pytest.mark.parametrize(("example", "package"), [("ray_train", "ray"), ("flare_rounds", "nvflare")])
def test_an_example_without_its_package_says_what_to_install(example: str, package: str) -> None:
    program = f"import runpy, sys; sys.modules[{package!r}] = None; sys.argv[1:] = ['--folder=none']; "
    program += f"runpy.run_path({str(JOBS / example)!r} + '.py', run_name='__main__')"
    said = subprocess.run([sys.executable, "-c", program], env=clean_environment(), capture_output=True, text=True)
    assert (said.returncode, f"pip install 'slurmtrain[{example.partition('_')[0]}]'" in said.stderr) == (78, True)


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
    project: Project, federated: Path, scripts: list[Program]
) -> None:
    words = ["flare_rounds.py", "--rounds=2", f"--steps={STEPS}", f"--folder={federated}", *SMALL]
    scripts.append(flare := Program(project.path, *words))
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


@pytest.mark.slow
def test_a_round_begins_with_the_weights_that_flare_has_sent(project: Project, federated: Path) -> None:
    hook = f"train.hooks=[{{_target_: flare_rounds.GlobalWeights, file: '{project.path}/global.safetensors'}}]"
    project.submit("train.steps=2").finish()
    zeros = {name: tensor.zero_() for name, tensor in exported(project).items()}
    save_file(zeros, project.path / "global.safetensors", metadata={"step": "2"})
    run = project.resume("train.steps=+2", hook).finish()
    loss = next(record["loss"] for record in run.losses() if record["step"] == 3 and "loss" in record)
    assert loss == pytest.approx(math.log(256))  # all bytes are equally likely


def exported(project: Project) -> Any:
    file = project.path / "weights.safetensors"
    said = project.cli("checkpoints", "last", "export", str(file))
    assert said.returncode == 0, said.stdout
    return load_file(file)


# Ray: a head and another node on this machine, with ports of their own.


class RayCluster:
    """A Ray of two "nodes" with a CPU each."""

    def __init__(self, folder: Path):
        self._folder, self._ports, self._started = folder, free_ports(3), list[Program]()
        self.address, self.jobs = f"127.0.0.1:{self._ports[0]}", f"http://127.0.0.1:{self._ports[1]}"
        self.variables = {
            "RAY_TMPDIR": str(folder),
            "RAY_ADDRESS": self.address,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "disabled",  # whether or not this user has a token
        }

    def start(self) -> None:
        ports = [f"--port={self._ports[0]}", f"--dashboard-port={self._ports[1]}"]
        head = self._start("--head", *ports, f"--ray-client-server-port={self._ports[2]}")
        head.wait_for(self._takes_jobs, "ready for jobs")
        self.start_node()

    def end(self) -> None:
        for script in reversed(self._started):
            script.end()

    def _takes_jobs(self) -> bool:
        kind = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.jobs}/api/jobs/", data=b'{"entrypoint": "true"}', headers=kind)
        try:
            urllib.request.urlopen(request, timeout=60).close()
        except OSError:
            return False
        return True

    def start_node(self) -> None:
        self.node = self._start(f"--address={self.address}")
        self.node.wait_for(lambda: "Ray runtime started" in self.node.said, "started")

    def _start(self, *words: str) -> Program:
        own = ["--block", "--num-cpus=1", "--node-ip-address=127.0.0.1", "--object-store-memory=80000000"]
        own += ["--min-worker-port=0", "--max-worker-port=0", f"--dashboard-agent-listen-port={free_ports(1)[0]}"]
        without = {name: value for name, value in self.variables.items() if name != "RAY_ADDRESS"}
        self._started.append(Program(self._folder, *RAY, "start", *words, *own, **without))
        return self._started[-1]

    def submit(self, *words: str) -> Program:
        """`ray job submit`, which shows the output of the program and waits for its end."""
        return Program(self._folder, *RAY, "job", "submit", "--address", self.jobs, "--", *words, **self.variables)

    def drain_node(self) -> None:
        """Announce that the node which is not the head is reclaimed in a while."""
        find = "import ray; ray.init(); print('ID', *(n['NodeID'] for n in ray.nodes() if n['Alive'] and "
        find += "'node:__internal_head__' not in n['Resources']))"
        (found := Program(self._folder, "-c", find, **self.variables)).wait()
        words = ["--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=spot", "--deadline-remaining-seconds=120"]
        node = found.said.rpartition("ID ")[2].strip()
        drain = Program(self._folder, *RAY, "drain-node", "--node-id", node, *words, **self.variables)
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
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.end()


@pytest.mark.slow
@needs("ray", "ray")
def test_ray_train_goes_on_with_the_same_bits_after_a_kill_a_drained_node_and_a_stop(
    ray_cluster: RayCluster, tmp_path: Path, scripts: list[Program]
) -> None:
    def train(name: str, *options: str, submitted: bool = False) -> Program:
        words = [str(JOBS / "ray_train.py"), f"--folder={tmp_path / name}", "--steps=80", "--every=10", *options]
        by_hand = Program(tmp_path, *words, **ray_cluster.variables) if not submitted else None
        scripts.append(by_hand or ray_cluster.submit(sys.executable, *words))
        return scripts[-1]

    def steps() -> list[int]:
        return [step_of(path) for path in committed(tmp_path / "disturbed" / "checkpoints")]

    def node_fails(script: Program, resumed: str) -> None:
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


def hook_of(rayjob: Any) -> list[str]:
    """The command of the hook that a pod with ranks has for its end."""
    workers = rayjob["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"]
    command: list[str] = workers[0]["lifecycle"]["preStop"]["exec"]["command"]
    return command


@pytest.mark.slow
@needs("ray", "ray")
def test_a_job_of_ray_trains_on_when_a_node_is_lost_and_stops_by_the_hook_of_a_pod(
    ray_cluster: RayCluster, project: Project, scripts: list[Program]
) -> None:
    def submit() -> Program:
        scripts.append(ray_cluster.submit(sys.executable, "-m", "slurmtrain", "supervise", str(run.path)))
        return scripts[-1]

    changes = ["train.steps=30", "checkpoint.every_steps=5"]
    run, rayjob = prepared(project, "rayjob", *changes)
    seen = LocalRun(project.path, submit().process)
    (project.path / "pause").touch()
    scripts[0].wait_for(lambda: seen.step() >= 7, "beyond a checkpoint")
    ray_cluster.node.end()
    ray_cluster.start_node()
    scripts[0].wait_for(lambda: len(seen.attempts()) == 2 and seen.step() >= 12, "training again")
    subprocess.run(hook_of(rayjob), check=True, timeout=120)
    assert scripts[0].wait() != 0
    assert "failed with exit code 75" in scripts[0].said
    (project.path / "pause").unlink()

    for _ in range(2):  # the second time nothing is left to do
        again = submit()
        assert again.wait() == 0, again.said
    assert [attempt.reason for attempt in seen.attempts()] == ["crash", "asked", "finished"]

    undisturbed = project.submit("cluster.tasks_per_node=2", *changes).finish()
    assert_same_run(run.path, undisturbed.run_dir.path)


# SkyPilot: what it makes of the task, wherever its `sky` is installed.


@pytest.mark.slow
def test_nodes_of_skypilot_crash_start_again_stop_and_finish_together(project: Project, scripts: list[Program]) -> None:
    """What the task runs, as SkyPilot would, which is not there."""
    run, task = prepared(project, "skypilot", "train.steps=12", "checkpoint.every_steps=4")

    def nodes() -> list[Program]:
        own = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1", **task["envs"]}
        program = task["run"].replace("python -m", f"{sys.executable} -m")
        shell = f"import os; os.execvp('bash', ['bash', '-c', {program!r}])"
        started = [Program(project.path, "-c", shell, **own, SKYPILOT_NODE_RANK=str(rank)) for rank in range(2)]
        scripts.extend(started)
        return started

    (project.path / "hold").touch()
    first = nodes()
    seen = LocalRun(project.path, first[0].process)
    first[0].wait_for(lambda: run.attempt_numbers() and len(seen.rank_pids()) == 2, "started")
    os.kill(seen.rank_pid(1), signal.SIGKILL)
    first[0].wait_for(lambda: len(run.attempt_numbers()) == 2, "started again")
    (project.path / "pause").touch()
    (project.path / "hold").unlink()
    first[0].wait_for(lambda: seen.step() >= 5, "beyond a checkpoint")
    for pid in children(first[1].process.pid):
        os.kill(pid, signal.SIGTERM)
    assert [node.wait() for node in first] == [75, 75], first[0].said + first[1].said
    (project.path / "pause").unlink()
    assert [node.wait() for node in nodes()] == [0, 0]
    assert [attempt.reason for attempt in seen.attempts()] == ["crash", "asked", "finished"]
