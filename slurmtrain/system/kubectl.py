"""kubectl, by which the objects of a run on Kubernetes are created, looked at and deleted: those of one manifest."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from slurmtrain.errors import ClusterError
from slurmtrain.system.records import read_text

WITHOUT_OBJECT = "pods"  # instead of an object's name, in a pod of an engine that no manifest of ours started
ANSWER_S = 60.0
EXISTS = "already exists"
ENDS = {"Completed": "completed", "Complete": "completed", "Failed": "failed"}  # by the words of their controllers


def create(manifest: Path) -> None:
    """Create the objects of a manifest that do not exist yet: their names are those of one submission, so none is made twice.

    Raises:
        ClusterError: Kubernetes refuses one, or cannot be reached.
    """
    done = _run("create", *_of(manifest))
    refused = [line for line in done.stderr.splitlines() if line.strip() and EXISTS not in line]
    if done.returncode and (refused or EXISTS not in done.stderr):
        raise _error("kubectl create", done)


def delete(manifest: Path) -> None:
    """Delete the objects of a manifest; their pods get SIGTERM and their grace time, for which nobody waits here.

    An object is there until its pods have left, so that no other of the same run is created before.

    Raises:
        ClusterError: Kubernetes refuses, or cannot be reached.
    """
    _checked("delete", *_of(manifest), "--ignore-not-found", "--wait=false", "--cascade=foreground")


def delete_pods(labels: str, namespace: str | None) -> None:
    """Delete all pods with these labels, which lets their object start new ones; else as `delete`."""
    where = [f"--namespace={namespace}"] if namespace is not None else []
    _checked("delete", "pods", f"--selector={labels}", "--wait=false", *where)


def state_of(manifest: Path) -> tuple[str | None, str]:
    """Return the state of the object of a run, which is the last one of its manifest.

    Returns:
        "suspended", "active", "completed" or "failed", or None if there is none; and the words of Kubernetes on that.

    Raises:
        ClusterError: Kubernetes cannot be asked.
    """
    answer = _checked("get", *_of(manifest), "--ignore-not-found", "-o", "json")
    if not answer.strip():
        return None, ""
    found: dict[str, Any] = json.loads(answer)
    items = found["items"] if found.get("kind") == "List" else [found]
    found = items[-1]
    if found["kind"] == "TrainingRuntime":  # it runs nothing by itself
        return None, ""
    status = found.get("status", {})
    held = [each for each in status.get("conditions", ()) if each.get("status") == "True"]
    said = {each["type"]: each.get("message", "") for each in held}
    if status.get("jobDeploymentStatus"):  # of a RayJob
        said[status["jobDeploymentStatus"]] = status.get("message", "")
    ended = next((name for name in ENDS if name in said), None)
    if ended is not None:
        return ENDS[ended], said[ended]
    suspended = found.get("spec", {}).get("suspend") is True
    return ("suspended", said.get("Suspended", "")) if suspended else ("active", "")


def _of(manifest: Path) -> list[str]:
    """Return the option for the objects of a manifest."""
    try:
        text = read_text(manifest)
    except (FileNotFoundError, NotADirectoryError):
        raise ClusterError(f"there is no {manifest}", hint="it is written by submit and by render") from None
    if "kind: " not in text:
        raise ClusterError(
            "kubectl does not know SkyPilot's tasks",
            hint="`render --target skypilot -o FILE` writes one; then `sky jobs launch FILE`, `queue` and `cancel`",
        )
    return ["-f", str(manifest)]


def _checked(*words: str) -> str:
    done = _run(*words)
    if done.returncode:
        raise _error(f"kubectl {words[0]}", done)
    return done.stdout


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            ["kubectl", *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ANSWER_S, check=False
        )
    except FileNotFoundError:
        raise ClusterError(
            "there is no `kubectl` on this machine",
            hint="`render --target jobset -o FILE` writes the manifest, which `kubectl create -f FILE` takes elsewhere",
        ) from None
    except subprocess.TimeoutExpired:
        raise ClusterError(f"kubectl has not answered within {ANSWER_S:.0f} s", hint="kubectl cluster-info") from None


def _error(what: str, done: subprocess.CompletedProcess[str]) -> ClusterError:
    said = "; ".join(line.strip() for line in done.stderr.splitlines() if line.strip() and EXISTS not in line)
    return ClusterError(
        f"{what} has failed: {said or f'exit code {done.returncode}'}",
        hint="install JobSet, Kubeflow's trainer or KubeRay: help kubernetes"
        if "no matches for kind" in said
        else "kubectl config current-context",
    )
