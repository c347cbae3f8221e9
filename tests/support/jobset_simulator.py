"""A simulator of the rules by which a JobSet starts its pods again, read from a manifest that we render. It is no Kubernetes.

Pods are processes of this machine: the command and the variables of the template, JOB_COMPLETION_INDEX, SIGTERM and the grace
time, exit codes. The rules are those of the sources of Kubernetes 1.31 (pod failure policy, with its messages) and of JobSet
0.11 (failure policy; BlockingRecreate starts all pods when the last one has left). Nothing else is here: no scheduler, no
images, no network, no volumes.
"""

from __future__ import annotations

import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from tests.support.local_runs import clean_environment

STEP_S = 0.05


class JobSetSimulator:
    """One JobSet, with one Indexed Job.

    Attributes:
        restarts, counted: how often its pods were started again, and how many of these count.
        messages: why the Job has failed, each time.
    """

    def __init__(self, manifest: dict[str, Any], folder: Path):
        (replicated,) = manifest["spec"]["replicatedJobs"]
        self._job = replicated["template"]["spec"]
        self._policy = manifest["spec"]["failurePolicy"]
        self._folder = folder
        self.pods: list[subprocess.Popen[bytes]] = []
        self._evicted: set[int] = set()
        self.restarts = self.counted = 0
        self.messages: list[str] = []

    def start(self) -> None:
        """Start all pods."""
        self._evicted.clear()
        self.pods = [self._start_pod(index) for index in range(self._job["completions"])]

    def _start_pod(self, index: int) -> subprocess.Popen[bytes]:
        (container,) = self._job["template"]["spec"]["containers"]
        given = {each["name"]: each["value"] for each in container["env"] if "value" in each}
        with (self._folder / f"pod-{index}.log").open("ab") as output:
            return subprocess.Popen(
                container["command"],
                env={**clean_environment(), **given, "JOB_COMPLETION_INDEX": str(index)},
                cwd=self._folder,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def evict(self, index: int) -> None:
        """Stop a pod as the drain of its node does."""
        self._evicted.add(index)
        self.pods[index].send_signal(signal.SIGTERM)

    def run(self, timeout_s: float = 240) -> str:
        """Go by the rules until the JobSet has ended: "Completed" or "Failed"."""
        if not self.pods:
            self.start()
        give_up = time.monotonic() + timeout_s
        while (ended := self.look()) is None:
            assert time.monotonic() < give_up, f"not over within {timeout_s} s: {self.logs()}"
            time.sleep(STEP_S)
        return ended

    def look(self) -> str | None:
        """Do what the rules ask for now; return how the JobSet has ended, or None."""
        codes = [pod.poll() for pod in self.pods]
        if all(code == 0 for code in codes):
            return "Completed"
        failed = next((index for index, code in enumerate(codes) if code), None)
        if failed is None:
            return None
        self._end_pods()
        reason, message = self._failure(failed)
        self.messages.append(message)
        action = self._action(reason, message)
        if action == "FailJobSet":
            return "Failed"
        if action == "RestartJobSet":
            if self.counted >= self._policy["maxRestarts"]:
                return "Failed"
            self.counted += 1
        self.restarts += 1
        self.start()
        return None

    def _end_pods(self) -> None:
        """End the other pods of a Job that has failed, each after its grace time, and wait until all have left."""
        for pod in self.pods:
            if pod.poll() is None:
                pod.send_signal(signal.SIGTERM)
        give_up = time.monotonic() + self._job["template"]["spec"]["terminationGracePeriodSeconds"]
        for pod in self.pods:
            try:
                pod.wait(max(0.0, give_up - time.monotonic()))
            except subprocess.TimeoutExpired:
                pod.kill()
                pod.wait()

    def _failure(self, index: int) -> tuple[str, str]:
        """The reason and the message with which the Job fails when a pod has."""
        code = self.pods[index].returncode
        code = code if code >= 0 else 128 - code
        (container,) = self._job["template"]["spec"]["containers"]
        for number, rule in enumerate(self._job["podFailurePolicy"]["rules"]):
            exits = rule.get("onExitCodes")
            if exits is not None and (code in exits["values"]) == (exits["operator"] == "In"):
                what = f"Container {container['name']} for pod default/pod-{index} failed with exit code {code}"
            elif "onPodConditions" in rule and index in self._evicted:
                what = f"Pod default/pod-{index} has condition DisruptionTarget"
            else:
                continue
            assert rule["action"] == "FailJob"
            return "PodFailurePolicy", f"{what} matching FailJob rule at index {number}"
        assert self._job["backoffLimit"] == 0
        return "BackoffLimitExceeded", "Job has reached the specified backoff limit"

    def _action(self, reason: str, message: str) -> str:
        assert self._policy["restartStrategy"] == "BlockingRecreate"
        for rule in self._policy["rules"]:
            patterns = rule["onJobFailureMessagePatterns"]
            if reason in rule["onJobFailureReasons"] and any(re.search(each, message) for each in patterns):
                return str(rule["action"])
        return "RestartJobSet"

    def logs(self) -> str:
        return "\n".join(path.read_text()[-3000:] for path in sorted(self._folder.glob("pod-*.log")))

    def reap(self) -> None:
        for pod in self.pods:
            if pod.poll() is None:
                pod.kill()  # its ranks get SIGTERM then
            pod.wait()
