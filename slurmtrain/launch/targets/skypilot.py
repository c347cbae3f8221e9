"""A task of SkyPilot, for `sky jobs launch`, which starts it on a cloud, on Kubernetes, or on machines that it reaches by ssh.

All nodes leave with the exit code that the first has decided on (supervise/platforms/pods.py). After 75, and when a node was
lost, SkyPilot makes a new cluster; after a crash (1) the same nodes start again; 78 ends the job.
"""

from __future__ import annotations

import shlex
from typing import Any

from slurmtrain.config.schema import Config
from slurmtrain.errors import EXIT_REQUEUE, ConfigError
from slurmtrain.launch.targets.pod import IMAGE, PodRun, command, resources
from slurmtrain.slurm.environment import JOB_VARIABLE

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


def task(config: Config, run: PodRun) -> list[dict[str, Any]]:
    """Return the task."""
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
