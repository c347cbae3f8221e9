"""A JobSet (jobset.x-k8s.io, 0.11 or newer): one Indexed Job, whose pods start again together once all of them have left.

A pod says by its exit code what is to happen. The Job fails at once with the first of the codes below, its message names that
code, and the JobSet goes by the message. The messages are those of Kubernetes' pod failure policy (GA in 1.31).
"""

from __future__ import annotations

from typing import Any

from slurmtrain.config.schema import Config
from slurmtrain.errors import EXIT_CONFIG, EXIT_REQUEUE
from slurmtrain.launch.targets.pod import CONTAINER, PodRun, metadata, pod_template

REPLICATED_JOB = "node"  # by the name that Kubeflow's trainer wants
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"


def objects(config: Config, run: PodRun) -> list[dict[str, Any]]:
    """Return the JobSet, which brings the headless Service by which its pods find each other."""
    found: dict[str, Any] = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata(config, run),
        "spec": jobset_spec(config, run),
    }
    with_queue(found, config)
    if config.cluster.pods.ttl_s is not None:
        found["spec"]["ttlSecondsAfterFinished"] = config.cluster.pods.ttl_s
    return [found]


def with_queue(found: dict[str, Any], config: Config) -> None:
    """Hand an object to Kueue, which starts it when all of its pods have room, if the config names a queue."""
    queue = config.cluster.pods.queue
    if queue is not None:
        found["metadata"]["labels"] = found["metadata"]["labels"] | {QUEUE_LABEL: queue}
        found["spec"]["suspend"] = True


def jobset_spec(config: Config, run: PodRun) -> dict[str, Any]:
    """Return the spec of the JobSet."""
    nodes = config.cluster.node_range.most
    job: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        "backoffLimit": 0,  # one pod without the others is of no use
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {
                        "containerName": CONTAINER,
                        "operator": "In",
                        "values": [EXIT_REQUEUE, EXIT_CONFIG],
                    },
                },
                {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": pod_template(config, run),
    }
    (container,) = job["template"]["spec"]["containers"]
    # The name that the headless Service gives the first pod.
    name = run.object_name(config)
    container["env"].insert(0, {"name": "MASTER_ADDR", "value": f"{name}-{REPLICATED_JOB}-0-0.{name}"})
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {
            "maxRestarts": config.cluster.pods.max_restarts,
            "restartStrategy": "BlockingRecreate",
            "rules": [
                _rule("startAgain", "RestartJobSetAndIgnoreMaxRestarts", f"exit code {EXIT_REQUEUE} "),
                _rule("neverAgain", "FailJobSet", f"exit code {EXIT_CONFIG} "),
                _rule("disrupted", "RestartJobSetAndIgnoreMaxRestarts", "condition DisruptionTarget "),
            ],  # all else: RestartJobSet, which counts
        },
        "replicatedJobs": [{"name": REPLICATED_JOB, "replicas": 1, "template": {"spec": job}}],
    }


def _rule(name: str, action: str, pattern: str) -> dict[str, Any]:
    reasons = ["PodFailurePolicy"]
    return {
        "name": name,
        "action": action,
        "onJobFailureReasons": reasons,
        "onJobFailureMessagePatterns": [pattern],
    }
