"""The pod of a run, which all manifests share: what it starts, with which resources, volumes and time to stop.

Each node of the run is one pod with one container, which starts all ranks of that node.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurmtrain.choices import Target
from slurmtrain.config.fields import merge, wrong
from slurmtrain.config.frozen import SECRET_REFERENCE, to_values
from slurmtrain.config.schema import KUBERNETES_NAME, Config
from slurmtrain.config.secrets import ENV, scalars
from slurmtrain.errors import ConfigError
from slurmtrain.launch.script import setup_lines
from slurmtrain.runs.run_dir import RUN_DIR_VARIABLE
from slurmtrain.slurm.command_environment import is_of_ranks
from slurmtrain.slurm.environment import JOB_VARIABLE, NODE_VARIABLE

CONTAINER = "node"  # the one container of a pod, by the name that Kubeflow's trainer wants
LEFT_OVER_S = 30  # of the grace time, for what follows the last save
NAME_MAX = 44  # of the object: the names of its pods are longer, NAME-node-0-12345-abcde, and may have 63 letters
IMAGE, CLAIM = "IMAGE", "CLAIM"  # stand in a manifest that is only shown for what the config does not say
# What cluster.pods.spec and cluster.pods.container cannot replace: lists, and what a run needs as it is.
OWN = {
    "spec": {"containers", "volumes", "tolerations", "restartPolicy", "terminationGracePeriodSeconds", "hostNetwork"},
    "container": {"name", "image", "command", "args", "resources", "volumeMounts"},
}
# What they have must be of these types, since more is added to it.
TYPES = {
    **dict.fromkeys(("spec.securityContext", "container.securityContext", "container.lifecycle"), dict),
    "container.securityContext.capabilities": dict,
    **dict.fromkeys(("container.securityContext.capabilities.add", "container.env"), list),
}
OF_MOUNT = ("subPath", "subPathExpr", "readOnly", "mountPropagation")  # of a volume's source: how the container has it
# Run before the ranks. What fails in it may work the next time (a download), and is counted by the engine. A stop has its say
# when the line at work has ended.
SET_UP = """\
trap 'echo "slurmtrain: the set-up has ended with exit code $? at: $BASH_COMMAND" >&2; exit 1' EXIT
trap 'trap - EXIT; exit 75' TERM; set -e
export {variable}={run_dir}
{lines}
trap - EXIT TERM
exec {command}"""


@dataclass(frozen=True)
class PodRun:
    """The run that a manifest starts.

    Attributes:
        run_dir: its directory; the pods see it under the same path.
        submission: how many objects it had before, each of which has a name of its own.
        user, group: whom the pods run as: the owner of the run directory.
    """

    run_dir: Path
    submission: int = 0
    user: int = field(default_factory=os.getuid)
    group: int = field(default_factory=os.getgid)

    def object_name(self, config: Config) -> str:
        """Return the name of its object: no other submission of any run has it, so the object cannot be made twice."""
        end = f"-{self.run_dir.name}-{self.submission}".replace("_", "-").lower()
        start = re.sub("[^a-z0-9]+", "-", config.job.name.lower()).strip("-")
        start = start if start[:1].isalpha() else f"run-{start}"  # of a Service, which may not begin with a digit
        return start[: NAME_MAX - len(end)].rstrip("-") + end


def check(config: Config, run: PodRun, *, placeholders: bool = False) -> None:
    """Raise ConfigError where something is missing without which the pods could not run.

    Args:
        placeholders: an image and volumes may be missing.
    """
    pods = config.cluster.pods
    if pods.image is None and not placeholders:
        raise ConfigError(
            "cluster.pods.image is not set",
            hint="cluster.pods.image=REGISTRY/NAME:TAG, an image with Python and slurmtrain in it",
        )
    if not (placeholders or any(run.run_dir.is_relative_to(path) for path in pods.volumes)):
        raise ConfigError(
            f"no volume of the pods contains the run directory, {run.run_dir}: cluster.pods.volumes has "
            f"{', '.join(pods.volumes) or 'none'}",
            hint=f"+cluster.pods.volumes='{{{run.run_dir.parents[1]}: CLAIM}}', or job.runs_dir below one of them",
        )
    for path, source in pods.volumes.items():
        if not isinstance(source, dict) or "claim" in source:
            KUBERNETES_NAME.check(
                f"cluster.pods.volumes.{path}", str(source["claim"] if isinstance(source, dict) else source)
            )
        elif pods.target == Target.SKYPILOT:
            raise ConfigError(
                f"cluster.pods.volumes.{path} is not the name of one of SkyPilot's volumes, and it mounts nothing else",
                hint="`sky volumes ls` shows their names",
            )
    _check_names(config)
    for group, own in OWN.items():
        if taken := sorted(own & getattr(pods, group).keys()):
            raise ConfigError(
                f"cluster.pods.{group}.{taken[0]} would take the place of the run's own {taken[0]}",
                hint="cluster.pods has a field for it, such as volumes, resources, tolerations, grace_s and host_network",
            )
    given: dict[str, Any] = {"spec": pods.spec, "container": pods.container}
    for key, kind in TYPES.items():
        value = functools.reduce(lambda inside, name: inside.get(name, {}), key.split("."), given)
        if not isinstance(value, kind) and value != {}:
            name = "mapping of keys to values" if kind is dict else "list"
            raise wrong(f"cluster.pods.{key}", value, f"a {name}", "leave it out, or write it as in the spec of a pod")
    contexts = [group.get("securityContext", {}) for group in given.values()]
    security = {"runAsUser": run.user} | contexts[0] | contexts[1]
    if security.get("runAsNonRoot") is True and security["runAsUser"] == 0:
        raise ConfigError(
            "the pods would run as root, as the owner of the run directory, and runAsNonRoot forbids that",
            hint="submit as a user, or set runAsUser and runAsGroup in cluster.pods.spec.securityContext",
        )
    if pods.grace_s is not None and pods.grace_s < config.cluster.signal_lead_s:
        raise ConfigError(
            f"cluster.pods.grace_s={pods.grace_s} is less than cluster.signal_lead_s={config.cluster.signal_lead_s}, the time "
            "that a step and a save may take",
            hint="leave cluster.pods.grace_s out: it follows cluster.signal_lead_s",
        )
    inherited = [name for name, source in config.secrets.items() if source == ENV]
    inherited += [name for _, text in scalars(to_values(config)) for name in SECRET_REFERENCE.findall(text)]
    missing = next((name for name in inherited if name not in pods.secrets), None)
    if missing is not None:
        raise ConfigError(
            f"the config takes {missing} from the environment, and pods do not inherit that of this shell",
            hint=f"+cluster.pods.secrets.{missing}=SECRET/KEY takes it from a Secret of Kubernetes",
        )


def _check_names(config: Config) -> None:
    """Raise ConfigError where the config names a variable, label, resource or folder that pods have from elsewhere."""
    pods, gpus = config.cluster.pods, config.cluster.gpus_per_node
    taken = {
        "secrets": [name for name in pods.secrets if is_of_ranks(name) or name in ("HOME", "USER")],
        "labels": [name for name in pods.labels if name.startswith(("slurmtrain/", "kueue.x-k8s.io/queue"))],
        "resources": [name for name in pods.resources if gpus and name == pods.gpu_resource],
        "volumes": [path for path in pods.volumes if pods.shm_gb and path == "/dev/shm"],
    }
    for name, found in taken.items():
        if found:
            raise ConfigError(
                f"cluster.pods.{name} has {found[0]}, which the run sets itself",
                hint="GPUs: cluster.gpus_per_node; /dev/shm: cluster.pods.shm_gb; Kueue: cluster.pods.queue",
            )


def metadata(config: Config, run: PodRun) -> dict[str, Any]:
    """Return the metadata of an object."""
    pods = config.cluster.pods
    found: dict[str, Any] = {"name": run.object_name(config)}
    if pods.namespace is not None:
        found["namespace"] = pods.namespace
    return (
        found | {"labels": labels(config, run)} | ({"annotations": dict(pods.annotations)} if pods.annotations else {})
    )


def labels(config: Config, run: PodRun) -> dict[str, str]:
    """Return the labels of an object or a pod, by which `kubectl get -l` finds them."""
    own = {
        "app.kubernetes.io/name": "slurmtrain",
        "app.kubernetes.io/managed-by": "slurmtrain",
        "slurmtrain/name": config.job.name.replace("+", "-")[:63].rstrip("._-"),
        "slurmtrain/run": run.run_dir.name,
    }
    return own | config.cluster.pods.labels


def command(config: Config, run_dir: Path, python: str = "python") -> list[str]:
    """Return the words that start the ranks of a pod; after the set-up lines of the config, if it has some.

    Args:
        python: starts them if the config names no interpreter, and has no set-up lines that may bring one.
    """
    lines = setup_lines(config.cluster)
    words = [config.cluster.python or ("python" if lines else python), "-m", "slurmtrain", "supervise", str(run_dir)]
    if not lines:
        return words
    named = {"variable": RUN_DIR_VARIABLE, "run_dir": shlex.quote(str(run_dir))}
    return ["bash", "-c", SET_UP.format(**named, lines="\n".join(lines), command=shlex.join(words))]


def environment(config: Config, run: PodRun) -> list[dict[str, Any]]:
    """Return the variables of the supervisor, which the ranks inherit."""
    # A user without a name in the image has no home either.
    known = {JOB_VARIABLE: run.object_name(config), "HOME": "/tmp", "USER": f"user-{run.user}", "PYTHONUNBUFFERED": "1"}
    node = {"name": NODE_VARIABLE, "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
    secrets = [
        {"name": name, "valueFrom": {"secretKeyRef": dict(zip(("name", "key"), source.split("/", 1), strict=True))}}
        for name, source in config.cluster.pods.secrets.items()
    ]
    return [*({"name": name, "value": value} for name, value in known.items()), node, *secrets]


def resources(config: Config) -> dict[str, Any]:
    """Return the resources of a pod: of GPUs and devices, requests and limits have to be the same."""
    cluster = config.cluster
    cpus = cluster.tasks_per_node * cluster.cpus_per_task
    gb = cluster.mem_per_node_gb or (cluster.mem_per_gpu_gb or 0) * cluster.gpus_per_node
    gb = gb or (cluster.mem_per_cpu_gb or 0) * cpus
    found: dict[str, Any] = {"cpu": str(cpus)}
    if gb:
        found["memory"] = f"{gb}Gi"
    exact = dict(cluster.pods.resources)
    if cluster.gpus_per_node:
        exact = {cluster.pods.gpu_resource: str(cluster.gpus_per_node)} | exact
    return {"requests": found | exact, "limits": ({"memory": found["memory"]} if gb else {}) | exact}


def volumes(config: Config) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the volumes of a pod, and where its container has them."""
    pods = config.cluster.pods
    sources = dict(pods.volumes) or {config.job.runs_dir: CLAIM}
    found, mounts = [], []
    for number, (path, source) in enumerate(sources.items()):
        name = f"volume-{number}"
        source = {"claim": source} if isinstance(source, str) else dict(source)
        mount = {key: source.pop(key) for key in OF_MOUNT if key in source}
        if "claim" in source:
            source["persistentVolumeClaim"] = {"claimName": source.pop("claim")}
        found.append({"name": name} | source | {"name": name})
        mounts.append({"name": name, "mountPath": path} | mount)
    if pods.shm_gb:
        found.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{pods.shm_gb}Gi"}})
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    return found, mounts


def container(config: Config, run: PodRun, mounts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the container of a pod."""
    pods = config.cluster.pods
    found: dict[str, Any] = {
        "name": CONTAINER,
        "image": pods.image or IMAGE,
        "imagePullPolicy": str(pods.pull_policy),
        "command": command(config, run.run_dir),
        "env": environment(config, run),
        "resources": resources(config),
        "volumeMounts": mounts,
    }
    merge(found, {key: value for key, value in pods.container.items() if key != "env"})
    found["env"] += pods.container.get("env", [])
    if any("/" in name for name in pods.resources):  # a device such as that of RDMA, which pins memory
        added = found.setdefault("securityContext", {}).setdefault("capabilities", {}).setdefault("add", [])
        if "IPC_LOCK" not in added:
            added.append("IPC_LOCK")
    return found


def grace_s(config: Config) -> int:
    """Return how many seconds a pod has between SIGTERM and SIGKILL."""
    return config.cluster.pods.grace_s or config.cluster.signal_lead_s + LEFT_OVER_S


def pod_template(config: Config, run: PodRun) -> dict[str, Any]:
    """Return the template of the pods of a run, which the objects of all engines on Kubernetes contain."""
    pods, (found_volumes, mounts) = config.cluster.pods, volumes(config)
    security: dict[str, Any] = {"runAsUser": run.user, "runAsGroup": run.group}
    if pods.fs_group is not None:
        security |= {"fsGroup": pods.fs_group, "fsGroupChangePolicy": "OnRootMismatch"}
    spec: dict[str, Any] = {
        "restartPolicy": "Never",  # a pod that leaves is judged by its exit code, and all start again together
        "enableServiceLinks": False,  # else each Service of the namespace adds variables
        "terminationGracePeriodSeconds": grace_s(config),
        "securityContext": security,
        "containers": [container(config, run, mounts)],
        "volumes": found_volumes,
    }
    if pods.host_network:
        spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    if pods.node_selector:
        spec["nodeSelector"] = dict(pods.node_selector)
    if pods.tolerations:
        spec["tolerations"] = [dict(each) for each in pods.tolerations]
    merge(spec, pods.spec)
    found = {key: each for key, each in metadata(config, run).items() if key in ("labels", "annotations")}
    return {"metadata": found, "spec": spec}
