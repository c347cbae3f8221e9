"""A pod: an engine such as Kubernetes has started this process on each of several nodes, and starts all of them again.

The pods of a run meet in its directory, which all of them see. The first one does what the supervisor of a batch job does: it
claims an attempt, decides at its end, and records that. The others wait until they are part of an attempt, run their ranks, and
leave with the exit code that the first one has decided on, by which the engine knows what to do:

    0   the run has finished
    75  start all pods again; this does not count
    78  never again: the run has ended
    1   start all pods again, and count it: an attempt has crashed, or has made no progress

A run that has ended leaves with the same code again whenever an engine starts it once more: the run directory remembers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import secrets as random_words
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from slurmtrain.choices import Backend
from slurmtrain.config import secrets
from slurmtrain.config.frozen import load_frozen
from slurmtrain.errors import EXIT_CONFIG, EXIT_REQUEUE, EnvironmentMismatchError
from slurmtrain.runs import attempts, requests
from slurmtrain.runs.attempt_dir import AttemptDir
from slurmtrain.runs.attempts import Attempt, came_to_an_end, read_attempt, read_claim
from slurmtrain.runs.decide import AttemptOutcome
from slurmtrain.runs.failures import RankFailure
from slurmtrain.runs.reasons import Verdict
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.environment import (
    JOB_VARIABLE,
    NODE_VARIABLE,
    NODES_VARIABLE,
    RESTART_VARIABLE,
    own_job_id,
    own_node_name,
)
from slurmtrain.supervise.loop import supervise
from slurmtrain.supervise.platforms.local import LocalRanks, Place
from slurmtrain.system import kubectl
from slurmtrain.system.files import write_json
from slurmtrain.system.patience import may_pass
from slurmtrain.system.records import read_json
from slurmtrain.system.signals import StopCause

log = logging.getLogger(__name__)

# Where an engine says which pod of how many this is, and how the first one is reached; None: it does not.
TRIPLES: tuple[tuple[str, str | None, str | None], ...] = (
    ("PET_NODE_RANK", "PET_NNODES", "PET_MASTER_ADDR"),  # a TrainJob of Kubeflow's trainer; Ray and SkyPilot by ours
    ("JOB_COMPLETION_INDEX", None, "MASTER_ADDR"),  # an Indexed Job, or one of a JobSet, whose manifest names the first
)
LOOK_EVERY_S = 1.0  # between two looks into the shared folder
ANSWER_POLL_S = 0.2  # the same, when an answer is due
DECISION_S = 60.0  # how long the first pod may take to decide, once its ranks have left


@dataclasses.dataclass(frozen=True)
class Pod:
    """Which of the pods of a run this is.

    Attributes:
        index, count: its number, and how many there are; None: the engine does not say.
        first: how the first one is reached; None: the engine does not say.
    """

    index: int
    count: int | None = None
    first: str | None = None


def own_pod(variables: Mapping[str, str] = os.environ) -> Pod | None:
    """Return which pod this process is; None outside of pods.

    Raises:
        EnvironmentMismatchError: a variable is not a number.
    """
    for index, count, first in TRIPLES:
        if index not in variables:
            continue
        numbers = [variables.get(name, "") for name in (index, count) if name is not None]
        if not all(number.isdecimal() for number in numbers):
            names = " and ".join(filter(None, (index, count)))
            raise EnvironmentMismatchError(f"{names} should be numbers, not {' and '.join(map(repr, numbers))}")
        addresses = variables.get(first or "", "").split()
        return Pod(int(numbers[0]), int(numbers[1]) if count else None, addresses[0] if addresses else None)
    return None


def supervise_pod(run_dir: RunDir, pod: Pod) -> int:
    """Do the work of this pod for its run, and return its exit code."""
    here = PodRanks(run_dir, pod)
    return supervise(run_dir, FirstPod(here)) if pod.index == 0 else follow(here)


class PodRanks:
    """The ranks of this pod, and what all pods of the run know of each other."""

    def __init__(self, run_dir: RunDir, pod: Pod) -> None:
        self.run_dir, self.pod = run_dir, pod
        self.told: list[int] = []  # signals that the ranks have not got yet
        # The first process of a container gets no signal that it has no handler for.
        signal.signal(signal.SIGTERM, lambda number, _: self.told.append(number))
        os.environ.setdefault(JOB_VARIABLE, kubectl.WITHOUT_OBJECT)
        config = load_frozen(run_dir.config_file)
        secrets.take(config.secrets)
        cluster = replace(config.cluster, backend=Backend.KUBERNETES)
        self.config = replace(config, cluster=cluster)
        self.count = cluster.node_range.most
        if pod.count not in (None, self.count) or pod.index >= self.count:
            raise EnvironmentMismatchError(
                f"this is pod {pod.index} of {pod.count or 'more'}, but the config says cluster.nodes={self.count}",
                hint="let the manifest have as many pods: `render --target` writes it",
            )
        self.me = {"process": random_words.token_hex(8), "node": own_node_name() or socket.gethostname()}

    def run(self, number: int, members: Sequence[Mapping[str, Any]]) -> int:
        """Run the ranks of this pod, until all have left; return their highest exit code.

        Args:
            members: all pods of the attempt, in order.
        """
        nodes = [str(member["node"]) for member in members]
        if len(set(nodes)) < len(nodes):  # several pods on a node
            nodes = [f"pod-{index}" for index in range(len(nodes))]
        variables = {name: os.environ[name] for name in (JOB_VARIABLE, RESTART_VARIABLE) if name in os.environ}
        variables |= {NODES_VARIABLE: ",".join(nodes), NODE_VARIABLE: nodes[self.pod.index]}
        if self.pod.first is not None:
            variables["MASTER_ADDR"] = self.pod.first
        place = Place("pods", self.pod.index, self.count, variables)
        next_look, kill_at, folder = 0.0, 0.0, self.run_dir.attempt(number)

        def next_signal() -> int | None:
            """Pass on signals to stop; where ranks of another pod have failed, end those of this one, as srun does."""
            nonlocal next_look, kill_at
            now = time.monotonic()
            if self.told:
                return self.told.pop(0)
            if kill_at and now > kill_at:
                kill_at = now + self.config.cluster.srun_wait_s
                return signal.SIGKILL
            if kill_at or now < next_look:
                return None
            next_look = now + LOOK_EVERY_S
            if not any(code for code in left_with(folder).values()):
                return None
            kill_at = now + self.config.cluster.srun_wait_s
            return signal.SIGTERM

        code = LocalRanks(self.run_dir, self.config, number, place).run(next_signal)
        with contextlib.suppress(OSError):  # a full disk: the first pod waits a while, and takes it for lost
            write_json(folder.pod_left_file(self.pod.index), {"code": code})
        return code


def left_with(folder: AttemptDir) -> dict[int, int]:
    """Return the highest exit code of the ranks of each pod that has left an attempt."""
    found = {int(name.split("-")[1]): look(folder, name) for name in names(folder) if name.startswith("left-")}
    return {index: record["code"] for index, record in found.items() if record is not None}


def names(folder: AttemptDir) -> list[str]:
    """Return the names of what the pods have told each other in an attempt. Listing a folder makes NFS ask its server."""
    try:
        return [name.removesuffix(".json") for name in os.listdir(folder.pods) if name.endswith(".json")]
    except FileNotFoundError:
        return []
    except OSError as error:
        if not may_pass(error):
            raise
        return []


def look(folder: AttemptDir, name: str) -> dict[str, Any] | None:
    """Return what a pod has told the others under a name; None while it has not."""
    return read_json(folder.pods / f"{name}.json") if name in names(folder) else None


class FirstPod:
    """The run as the first of its pods sees it, which claims attempts, and decides."""

    client = None
    can_start_again = False

    def __init__(self, here: PodRanks) -> None:
        self._here, self._run_dir, self.config = here, here.run_dir, here.config

    def begin(self) -> int | None:
        """Return the exit code where nothing is left to do for the run, else None."""
        run_dir = self._run_dir
        tries = [read_claim(run_dir.attempt(number))[0] for number in run_dir.attempt_numbers()]
        os.environ[RESTART_VARIABLE] = str(tries.count(own_job_id()))
        last = _last_attempt(run_dir)
        if last is not None and last.reason is None:  # whoever was to judge it is gone
            from slurmtrain.supervise.end_of_attempt import close_abandoned
            from slurmtrain.supervise.hooks import run_hook_of

            closed = close_abandoned(run_dir, last.number + 1, self.config, None)
            if last.number in closed and (ended := exit_code_at_start(run_dir)) is not None:
                run_hook_of(run_dir, last.number, self.config)
                return ended
        return exit_code_at_start(run_dir)

    def claim(self) -> int:
        """Claim the next attempt, for the object of the engine that this pod belongs to."""
        number = self._run_dir.new_attempt()
        folder = self._run_dir.attempt(number)
        folder.pods.mkdir()
        folder.claim_file.write_text(f"{own_job_id()} {os.environ[RESTART_VARIABLE]} {time.time()}\n")
        return number

    def run(self, number: int, nodes: Sequence[str]) -> int:
        """Wait for the other pods, run the ranks of this one, and wait until all ranks have left; return the highest code."""
        here, folder = self._here, self._run_dir.attempt(number)
        wanted = {f"here-{index}" for index in range(1, here.count)}
        missing = wanted
        while missing := missing - set(names(folder)):  # the engine starts them as nodes get free
            if here.told:
                attempts.record_stop(
                    folder, cause=StopCause.SIGTERM, cause_time=time.time(), seconds_left=None, facts=None
                )
                return EXIT_REQUEUE
            time.sleep(ANSWER_POLL_S)
        members = [here.me, *(look(folder, f"here-{index}") or {} for index in range(1, here.count))]
        write_json(folder.pods / "members.json", {"members": members})
        code = here.run(number, members)
        give_up = time.monotonic() + self.config.cluster.srun_wait_s + LOOK_EVERY_S
        while len(left := left_with(folder)) < here.count and time.monotonic() < give_up:
            time.sleep(ANSWER_POLL_S)
        for index in sorted(set(range(here.count)) - set(left)):
            tasks = self.config.cluster.tasks_per_node
            sentence = f"pod {index} on {members[index]['node']} has left no word: its node failed, or it was killed"
            lost = RankFailure(1, sentence, rank=index * tasks, time=time.time())
            folder.write_record(folder.failure_file(lost.rank), dataclasses.asdict(lost))
            code = max(code, 1)
        return max(code, *left.values()) if left else code

    def carry_out(self, number: int, outcome: AttemptOutcome, code: int) -> int:
        """Tell all pods with which exit code to leave, by what was decided; the engine does the rest."""
        counts = outcome.stalled or outcome.unseen
        codes = {Verdict.DONE: 0, Verdict.END: EXIT_CONFIG}
        own = codes.get(outcome.verdict, 1 if counts else EXIT_REQUEUE)
        print(f"slurmtrain: {outcome.sentence} (exit code {own})", flush=True)
        with contextlib.suppress(OSError):  # a full disk: the others go by their own codes
            write_json(self._run_dir.attempt(number).pods / "decided.json", {"code": own})
        return own


def follow(here: PodRanks) -> int:
    """Wait until this pod is part of an attempt, run its ranks, and return the exit code that the first pod has decided on."""
    run_dir, pod, joined, pause_s = here.run_dir, here.pod, 0, 0.05
    while True:
        ended = exit_code_at_start(run_dir)
        if ended is not None or here.told:
            return EXIT_REQUEUE if ended is None else ended
        number = (run_dir.attempt_numbers() or [0])[-1]
        folder = run_dir.attempt(number)
        # An attempt that has its members began before this pod, and belongs to pods that are gone.
        found = look(folder, "members")
        members = found["members"] if found is not None else []
        if any(member == here.me for member in members):
            break
        if found is None and number != joined and folder.pods.is_dir():
            write_json(folder.pods / f"here-{pod.index}.json", here.me)
            joined = number
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, LOOK_EVERY_S)
    code = here.run(number, members)
    # The first pod may wait for one that is lost, before it decides.
    give_up, left = time.monotonic() + here.config.cluster.srun_wait_s + LOOK_EVERY_S + DECISION_S, False
    while (decided := look(folder, "decided")) is None:
        if not left and 0 in left_with(folder):
            give_up, left = time.monotonic() + DECISION_S, True
        if time.monotonic() > give_up:
            log.warning("the first pod has not said how attempt %d has ended", number)
            return EXIT_REQUEUE if code == EXIT_REQUEUE else 1
        time.sleep(ANSWER_POLL_S)
    return int(decided["code"])


def exit_code_at_start(run_dir: RunDir) -> int | None:
    """Return the exit code of a run that has nothing left to do when an engine starts it (again), else None.

    What has ended for good stays so until a person resumes it, as another object of the engine.
    """
    last = _last_attempt(run_dir)
    if last is not None and last.verdict == Verdict.DONE:
        return 0
    submitted = run_dir.info()["job_ids"]
    superseded = own_job_id() in submitted[:-1]
    if superseded or requests.ended_after(run_dir, last) is not None:
        return EXIT_CONFIG
    if last is None or not came_to_an_end(run_dir, last):
        return None
    job = last.job_id or read_claim(run_dir.attempt(last.number))[0]
    return EXIT_CONFIG if job in (own_job_id(), None) else None


def _last_attempt(run_dir: RunDir) -> Attempt | None:
    numbers = run_dir.attempt_numbers()
    return read_attempt(run_dir, numbers[-1]) if numbers else None
