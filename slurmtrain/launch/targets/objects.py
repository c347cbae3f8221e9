"""What starts the pods of a run: a JobSet, a TrainJob of Kubeflow's trainer, a RayJob of KubeRay, or a task of SkyPilot.

A JobSet (jobset.x-k8s.io, 0.11 or newer) is one Indexed Job, whose pods start again together once all of them have left. A pod
says by its exit code what is to happen. The Job fails at once with the first of the codes below, its message names that code,
and the JobSet goes by the message. The messages are those of Kubernetes' pod failure policy (GA in 1.31).
"""

from __future__ import annotations

import copy
import shlex
from pathlib import Path
from typing import Any

from slurmtrain.config.schema import Config
from slurmtrain.errors import EXIT_CONFIG, EXIT_REQUEUE, ConfigError
from slurmtrain.launch.targets.pod import CONTAINER, IMAGE, PodRun, command, grace_s, metadata, pod_template, resources
from slurmtrain.slurm.environment import JOB_VARIABLE

REPLICATED_JOB = "node"  # by the name that Kubeflow's trainer wants
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
TRAINER = "trainer.kubeflow.org"
# What Ray's own processes on the head need.
HEAD = {"cpu": "2", "memory": "8Gi"}
CLUSTERS = 3  # more of Ray's clusters at most, one after the other, each with all GPUs of the run
PORTS = {"gcs-server": 6379, "dashboard": 8265, "client": 10001}


def _object(
    config: Config, run: PodRun, api: str, kind: str, spec: dict[str, Any], *, ttl: bool = True
) -> dict[str, Any]:
    """Return an object, which Kueue starts when all of its pods have room, if the config names a queue.

    Args:
        ttl: it can be deleted some time after its end.
    """
    pods = config.cluster.pods
    found: dict[str, Any] = {"apiVersion": api, "kind": kind, "metadata": metadata(config, run), "spec": spec}
    if pods.queue is not None:
        found["metadata"]["labels"] |= {QUEUE_LABEL: pods.queue}
        spec["suspend"] = True
    if ttl and pods.ttl_s is not None:
        spec["ttlSecondsAfterFinished"] = pods.ttl_s
    return found


def jobset(config: Config, run: PodRun) -> list[dict[str, Any]]:
    """Return the JobSet, which brings the headless Service by which its pods find each other."""
    return [_object(config, run, "jobset.x-k8s.io/v1alpha2", "JobSet", _jobset_spec(config, run))]


def _jobset_spec(config: Config, run: PodRun) -> dict[str, Any]:
    nodes, template = config.cluster.node_range.most, pod_template(config, run)
    # The name that the headless Service gives the first pod.
    name = run.object_name(config)
    address = {"name": "MASTER_ADDR", "value": f"{name}-{REPLICATED_JOB}-0-0.{name}"}
    template["spec"]["containers"][0]["env"].insert(0, address)
    codes = {"containerName": CONTAINER, "operator": "In", "values": [EXIT_REQUEUE, EXIT_CONFIG]}
    job = {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        "backoffLimit": 0,  # one pod without the others is of no use
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": codes},
                {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": template,
    }
    rules = {  # all else: RestartJobSet, which counts
        "startAgain": ("RestartJobSetAndIgnoreMaxRestarts", f"exit code {EXIT_REQUEUE} "),
        "neverAgain": ("FailJobSet", f"exit code {EXIT_CONFIG} "),
        "disrupted": ("RestartJobSetAndIgnoreMaxRestarts", "condition DisruptionTarget "),
    }
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {
            "maxRestarts": config.cluster.pods.max_restarts,
            "restartStrategy": "BlockingRecreate",
            "rules": [
                {
                    "name": rule,
                    "action": action,
                    "onJobFailureReasons": ["PodFailurePolicy"],
                    "onJobFailureMessagePatterns": [pattern],
                }
                for rule, (action, pattern) in rules.items()
            ],
        },
        "replicatedJobs": [{"name": REPLICATED_JOB, "replicas": 1, "template": {"spec": job}}],
    }


def trainjob(config: Config, run: PodRun) -> list[dict[str, Any]]:
    """Return a TrainJob of Kubeflow's trainer (2.2 or newer), after a runtime: it cannot itself say what a failure means.

    The runtime holds the same JobSet as the target `jobset`. The trainer adds torchrun's variables, PET_*, to the pods.
    """
    api, name, nodes = f"{TRAINER}/v1alpha1", run.object_name(config), config.cluster.node_range.most
    jobset_spec = _jobset_spec(config, run)
    step = {"labels": {f"{TRAINER}/trainjob-ancestor-step": "trainer"}}
    jobset_spec["replicatedJobs"][0]["template"]["metadata"] = step
    runtime: dict[str, Any] = {
        "apiVersion": api,
        "kind": "TrainingRuntime",
        "metadata": metadata(config, run),
        "spec": {"mlPolicy": {"numNodes": nodes, "torch": {}}, "template": {"spec": jobset_spec}},
    }
    # Without it, Kubeflow's SDK lists none of the namespace's jobs.
    runtime["metadata"]["labels"] |= {f"{TRAINER}/framework": "torch"}
    spec = {
        "runtimeRef": {"apiGroup": TRAINER, "kind": "TrainingRuntime", "name": name},
        # Without it, the trainer sets no variables.
        "trainer": {"numNodes": nodes, "numProcPerNode": config.cluster.tasks_per_node},
    }
    return [runtime, _object(config, run, api, "TrainJob", spec, ttl=False)]


def rayjob(config: Config, run: PodRun) -> list[dict[str, Any]]:
    """Return a RayJob: a Ray cluster with a worker for each node of the run, and a head that has no ranks.

    Its entrypoint is the driver of supervise/platforms/ray.py, which starts the ranks on the workers, and again when some are
    lost: KubeRay makes new ones. A retry, after a failure of the head, is a new cluster. KubeRay knows no exit codes, so one is
    also made for a run that has ended for good; it leaves at once, since the run directory remembers that.

    The operator itself hands the entrypoint to Ray (HTTPMode). By default a further pod does, whose eviction would fail the
    run.
    """
    nodes = config.cluster.node_range.most
    head, worker = _ray_template(config, run), _ray_template(config, run)
    container = head["spec"]["containers"][0]
    container["resources"] = {"requests": dict(HEAD), "limits": dict(HEAD)}
    # From a deleted or suspended RayJob, the driver gets TERM, and 3 s otherwise.
    container["env"] += [{"name": "RAY_JOB_STOP_WAIT_TIME_S", "value": str(grace_s(config))}]
    container["ports"] = [{"name": name, "containerPort": port} for name, port in PORTS.items()]
    replicas = dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), nodes)
    spec: dict[str, Any] = {
        "submissionMode": "HTTPMode",
        # Where Ray runs, slurmtrain is there. Set-up lines are for the ranks, and run on their nodes.
        "entrypoint": shlex.join(["python", "-m", "slurmtrain", "supervise", str(run.run_dir)]),
        "backoffLimit": min(config.cluster.pods.max_restarts, CLUSTERS),
        "shutdownAfterJobFinishes": True,
        "rayClusterSpec": {
            # No CPUs of Ray: it places no ranks there.
            "headGroupSpec": {"rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0"}, "template": head},
            "workerGroupSpecs": [{"groupName": "nodes", **replicas, "rayStartParams": {}, "template": worker}],
        },
    }
    return [_object(config, run, "ray.io/v1", "RayJob", spec)]


def stop_files(run_dir: Path) -> Path:
    """Return the beginning of the paths of the files by which the hook of a pod that is to end asks for a stop.

    KubeRay does not pass a pod's TERM on to what runs in Ray (kuberay#5004). So each of our processes that Ray has started in
    the pod has such a file, whose name ends in its number. It is empty until the hook writes into it, and gone when the
    process has left, for which the hook waits.
    """
    return Path("/tmp", f"slurmtrain-{run_dir.name}")


def _ray_template(config: Config, run: PodRun) -> dict[str, Any]:
    """Return the template of a pod of the cluster, in which KubeRay starts Ray."""
    template = copy.deepcopy(pod_template(config, run))  # YAML would have links where two pods share a part
    container = template["spec"]["containers"][0]
    del container["command"]
    files = shlex.quote(str(stop_files(run.run_dir))) + ".*"
    lives = '[ -e "$file" ] && kill -0 "${file##*.}" 2>/dev/null'
    hook = f'for file in {files}; do {lives} && echo stop >"$file"; while {lives}; do sleep 1; done; done; true'
    container["lifecycle"] = container.get("lifecycle", {}) | {"preStop": {"exec": {"command": ["sh", "-c", hook]}}}
    return template


# SkyPilot starts its task on a cloud, on Kubernetes, or on machines that it reaches by ssh (`sky jobs launch`). All nodes leave
# with the exit code that the first has decided on (supervise/platforms/pods.py). After 75, and when a node was lost, SkyPilot
# makes a new cluster; after a crash (1) the same nodes start again; 78 ends the job.

RUN = """\
export PET_NODE_RANK=$SKYPILOT_NODE_RANK PET_NNODES=$SKYPILOT_NUM_NODES
export PET_MASTER_ADDR=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)
for restart in $(seq 0 {restarts}); do
  code=0
  {command} || code=$?
  [ $code = 1 ] || exit $code
  sleep 5
done
exit 1
"""


def sky_task(config: Config, run: PodRun) -> list[dict[str, Any]]:
    """Return the task of SkyPilot."""
    pods, cluster = config.cluster.pods, config.cluster
    others = pods.resources.keys() - {"cpu", "memory"}
    if others:
        raise ConfigError(
            f"cluster.pods.resources has {min(others)}, and SkyPilot asks for CPUs, memory and accelerators alone",
            hint="a machine type has its devices: +cluster.pods.object.resources.instance_type=TYPE",
        )
    needs = resources(config)["requests"]
    wants: dict[str, Any] = {"cpus": f"{needs['cpu']}+"}
    if "memory" in needs:
        wants["memory"] = f"{needs['memory'].removesuffix('Gi')}+"
    if cluster.gpus_per_node:
        wants["accelerators"] = {cluster.gpu_type or "GPU": cluster.gpus_per_node}
    wants |= {
        "image_id": f"docker:{pods.image or IMAGE}",
        "labels": {"slurmtrain-run": run.run_dir.name}
        | pods.labels,  # of cloud machines, with a cloud's rules for names
        "job_recovery": {"recover_on_exit_codes": [EXIT_REQUEUE], "max_restarts_on_errors": 0},
    }
    found: dict[str, Any] = {
        "name": run.object_name(config),
        "num_nodes": cluster.node_range.most,
        "resources": wants,
        "envs": {JOB_VARIABLE: run.object_name(config), "PYTHONUNBUFFERED": "1"},
        "run": RUN.format(restarts=pods.max_restarts, command=shlex.join(command(config, run.run_dir))),
    }
    if pods.volumes:
        names = (each if isinstance(each, str) else each["claim"] for each in pods.volumes.values())
        found["volumes"] = dict(zip(pods.volumes, names, strict=True))
    if pods.secrets:
        found["secrets"] = dict.fromkeys(pods.secrets)  # null: `sky jobs launch --secret NAME` gives the value
    return [found]
