"""A TrainJob of Kubeflow's trainer (2.2 or newer), with a runtime of its own: it cannot itself say what a failure means.

The runtime holds the same JobSet as the target `jobset`. The trainer adds torchrun's variables, PET_*, to the pods.
"""

from __future__ import annotations

from typing import Any

from slurmtrain.config.schema import Config
from slurmtrain.launch.targets.jobset import jobset_spec, with_queue
from slurmtrain.launch.targets.pod import PodRun, metadata

API = "trainer.kubeflow.org/v1alpha1"


def objects(config: Config, run: PodRun) -> list[dict[str, Any]]:
    """Return the runtime, and the TrainJob that uses it."""
    nodes = config.cluster.node_range.most
    spec = jobset_spec(config, run)
    (replicated,) = spec["replicatedJobs"]
    replicated["template"]["metadata"] = {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}
    runtime: dict[str, Any] = {
        "apiVersion": API,
        "kind": "TrainingRuntime",
        "metadata": metadata(config, run),
        "spec": {"mlPolicy": {"numNodes": nodes, "torch": {}}, "template": {"spec": spec}},
    }
    # Without it, Kubeflow's SDK lists none of the namespace's jobs.
    runtime["metadata"]["labels"] |= {"trainer.kubeflow.org/framework": "torch"}
    job = {
        "apiVersion": API,
        "kind": "TrainJob",
        "metadata": metadata(config, run),
        "spec": {
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": "TrainingRuntime",
                "name": run.object_name(config),
            },
            # Without it, the trainer sets no variables.
            "trainer": {"numNodes": nodes, "numProcPerNode": config.cluster.tasks_per_node},
        },
    }
    with_queue(job, config)
    return [runtime, job]
