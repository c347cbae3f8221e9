"""A job of Ray, from `ray job submit -- python -m slurmtrain supervise RUN` or the RayJob of `render --target rayjob`.

Ray has the nodes. This process, the job's driver, asks it for as many as the run has, and starts on each what a pod starts
(`pods`): the first of them decides how an attempt has ended. If nodes were lost, or the ranks crashed, the driver asks for
nodes again, within the same job; so Ray counts none of it. It leaves with the exit codes of a pod.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from slurmtrain.config.frozen import load_frozen
from slurmtrain.errors import EXIT_CONFIG, EXIT_REQUEUE
from slurmtrain.launch.targets.objects import stop_files
from slurmtrain.launch.targets.pod import command
from slurmtrain.runs.ownership import require_own
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system.process import end_with_parent

log = logging.getLogger(__name__)

POLL_S = 0.5
LEFT_ALONE_S = 120.0  # beside srun_wait_s, for nodes to leave once another has
IN_RAY_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # has the driver of a job that was submitted to Ray


@contextlib.contextmanager
def _stop_file(run_dir: RunDir) -> Iterator[Callable[[], bool]]:
    """Hold the file by which this process is asked for a stop; yields what returns whether it was."""
    file = Path(f"{stop_files(run_dir.path)}.{os.getpid()}")
    file.touch()
    try:
        yield lambda: file.exists() and file.stat().st_size > 0  # the system may clean up its /tmp
    finally:
        file.unlink(missing_ok=True)


def supervise_ray_job(run_dir: RunDir) -> int:
    """Run attempts on nodes of Ray until the run has ended, or is told to stop; return the exit code of the job."""
    import ray

    require_own(run_dir)
    ray.init()
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))  # from `ray job stop`
    with _stop_file(run_dir) as asked:
        while True:
            before = run_dir.attempt_numbers()
            code = _run_once(run_dir, lambda: bool(told) or asked())
            # Without a new attempt, the run would not begin the next time either.
            if code in (0, EXIT_CONFIG) or told or asked() or run_dir.attempt_numbers() == before:
                return code


def _run_once(run_dir: RunDir, wants_stop: Callable[[], bool]) -> int:
    """Wait for nodes, supervise the run on them, and return the exit code of the first, or another's if that is lost."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    config = load_frozen(run_dir.config_file, with_secrets=False)
    cluster, count, gpus = config.cluster, config.cluster.node_range.most, config.cluster.gpus_per_node
    cpus = cluster.tasks_per_node * cluster.cpus_per_task
    group = placement_group([{"CPU": cpus} | ({"GPU": gpus} if gpus else {})] * count, strategy="STRICT_SPREAD")
    try:
        while not group.wait(POLL_S):
            if wants_stop():
                return EXIT_REQUEUE
        on_node = ray.remote(num_cpus=cpus, num_gpus=gpus, max_concurrency=2)(Node)
        places = [PlacementGroupSchedulingStrategy(group, index) for index in range(count)]
        nodes = [on_node.options(scheduling_strategy=place).remote(str(run_dir.path)) for place in places]
        codes: dict[int, int] = {}
        try:
            first = ray.get(nodes[0].address.remote())
        except ray.exceptions.RayActorError as error:
            log.warning("a node of Ray has failed: %s", str(error).splitlines()[0])
            return 1
        waiting = {node.run.remote(index, count, first): index for index, node in enumerate(nodes)}
        stopping, left_alone_at = False, math.inf
        while waiting and time.monotonic() < left_alone_at:
            for done in ray.wait(list(waiting), timeout=POLL_S)[0]:
                index = waiting.pop(done)
                try:
                    codes[index] = ray.get(done)
                except ray.exceptions.RayActorError as error:
                    log.warning("node %d of Ray has failed: %s", index, str(error).splitlines()[0])
                # The others leave by themselves, unless they wait for a node that never came to them.
                left_alone_at = min(left_alone_at, time.monotonic() + cluster.srun_wait_s + LEFT_ALONE_S)
            if wants_stop() and not stopping:
                stopping = True
                for node in nodes:
                    node.stop.remote()
        return codes.get(0, max(codes.values(), default=1) or 1)
    finally:
        remove_placement_group(group)


class Node:
    """The supervisor of the run on one node of Ray, an actor."""

    def __init__(self, run_dir: str) -> None:
        self._run_dir, self._told = RunDir(Path(run_dir)), False

    def address(self) -> str:
        """Return how other nodes reach this one."""
        import ray

        return str(ray.util.get_node_ip_address())

    def run(self, index: int, count: int, first: str) -> int:
        """Supervise the run as one of its pods, and return the exit code."""
        # Ray sets the threads of an actor to the CPUs of all ranks.
        variables = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", IN_RAY_JOB)}
        variables |= {"PET_NODE_RANK": str(index), "PET_NNODES": str(count), "PET_MASTER_ADDR": first}
        config = load_frozen(self._run_dir.config_file, with_secrets=False)
        words = command(config, self._run_dir.path, python=sys.executable)
        with _stop_file(self._run_dir) as asked:
            # If Ray ends this actor, the ranks save and leave.
            process = subprocess.Popen(words, env=variables, preexec_fn=lambda: end_with_parent(signal.SIGTERM))
            told = False
            while process.poll() is None:
                if not told and (self._told or asked()):
                    process.terminate()
                    told = True
                time.sleep(POLL_S)
        return process.returncode if process.returncode >= 0 else 128 - process.returncode

    def stop(self) -> None:
        """Ask for a stop."""
        self._told = True
