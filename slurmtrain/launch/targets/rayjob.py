"""A RayJob (ray.io/v1) of KubeRay: a Ray cluster with a worker for each node of the run, and a head that has no ranks.

Its entrypoint is the driver of supervise/platforms/ray.py, which starts the ranks on the workers, and again when some are lost:
KubeRay makes new ones. A retry, after a failure of the head, is a new cluster. KubeRay knows no exit codes, so one is also made
for a run that has ended for good; it leaves at once, since the run directory remembers that. Nor is a pod's TERM passed on to
what runs in Ray (kuberay#5004): a hook asks for the stop by a file, and waits until the ranks have left.

The operator itself hands the entrypoint to Ray (HTTPMode). By default a further pod does, whose eviction would fail the run.
"""

from __future__ import annotations

import copy
import shlex
from pathlib import Path
from typing import Any

from slurmtrain.config.schema import Config
from slurmtrain.launch.targets.jobset import with_queue
from slurmtrain.launch.targets.pod import PodRun, grace_s, metadata, pod_template

# What Ray's own processes on the head need.
HEAD = {"cpu": "2", "memory": "8Gi"}
CLUSTERS = 3  # more of them at most, one after the other, each with all GPUs of the run
PORTS = {"gcs-server": 6379, "dashboard": 8265, "client": 10001}


def objects(config: Config, run: PodRun) -> list[dict[str, Any]]:
    """Return the RayJob."""
    nodes = config.cluster.node_range.most
    head, worker = _template(config, run), _template(config, run)
    container = head["spec"]["containers"][0]
    container["resources"] = {"requests": dict(HEAD), "limits": dict(HEAD)}
    # From a deleted or suspended RayJob, the driver gets TERM, and 3 s otherwise.
    container["env"] += [{"name": "RAY_JOB_STOP_WAIT_TIME_S", "value": str(grace_s(config))}]
    container["ports"] = [{"name": name, "containerPort": port} for name, port in PORTS.items()]
    spec: dict[str, Any] = {
        "submissionMode": "HTTPMode",
        # Where Ray runs, slurmtrain is there. Set-up lines are for the ranks, and run on their nodes.
        "entrypoint": shlex.join(["python", "-m", "slurmtrain", "supervise", str(run.run_dir)]),
        "backoffLimit": min(config.cluster.pods.max_restarts, CLUSTERS),
        "shutdownAfterJobFinishes": True,
        "rayClusterSpec": {
            # No CPUs of Ray: it places no ranks there.
            "headGroupSpec": {"rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0"}, "template": head},
            "workerGroupSpecs": [
                {
                    "groupName": "nodes",
                    "replicas": nodes,
                    "minReplicas": nodes,
                    "maxReplicas": nodes,
                    "rayStartParams": {},
                    "template": worker,
                }
            ],
        },
    }
    if config.cluster.pods.ttl_s is not None:
        spec["ttlSecondsAfterFinished"] = config.cluster.pods.ttl_s
    found = {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": metadata(config, run), "spec": spec}
    with_queue(found, config)
    return [found]


def stop_files(run_dir: Path) -> Path:
    """Return the beginning of the paths of the files by which the hook of a pod that is to end asks for a stop.

    Each of our processes that Ray has started in the pod has such a file, whose name ends in its number. It is empty until the
    hook writes into it, and gone when the process has left.
    """
    return Path("/tmp", f"slurmtrain-{run_dir.name}")


def _template(config: Config, run: PodRun) -> dict[str, Any]:
    """Return the template of a pod of the cluster, in which KubeRay starts Ray."""
    template = copy.deepcopy(pod_template(config, run))  # YAML would have links where two pods share a part
    container = template["spec"]["containers"][0]
    del container["command"]
    files = shlex.quote(str(stop_files(run.run_dir))) + ".*"
    lives = '[ -e "$file" ] && kill -0 "${file##*.}" 2>/dev/null'
    hook = f'for file in {files}; do {lives} && echo stop >"$file"; while {lives}; do sleep 1; done; done; true'
    container["lifecycle"] = container.get("lifecycle", {}) | {"preStop": {"exec": {"command": ["sh", "-c", hook]}}}
    return template
