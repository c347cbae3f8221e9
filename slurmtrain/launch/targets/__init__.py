"""The same run on other engines than SLURM: the manifests of `render --target`, and of `submit` on Kubernetes.

An engine starts pods, stops them and starts them again; what it starts in each is `python -m slurmtrain supervise RUN`
(supervise/platforms/pods.py). `pod` has what all of them share. The texts are
pure functions of a config and of where its run lies.
"""

from __future__ import annotations

import dataclasses
import logging

from slurmtrain.choices import Backend, Target
from slurmtrain.config.fields import merge
from slurmtrain.config.schema import Config
from slurmtrain.config.validate import given_fields
from slurmtrain.launch.targets import objects, skypilot
from slurmtrain.launch.targets.pod import PodRun, check

log = logging.getLogger(__name__)

STR = "tag:yaml.org,2002:str"
# Each returns the documents of its manifest.
TARGETS = {
    Target.JOBSET: objects.jobset,
    Target.TRAINJOB: objects.trainjob,
    Target.RAYJOB: objects.rayjob,
    Target.SKYPILOT: skypilot.task,
}
# Fields that nothing in a manifest stands for: those of SLURM everywhere, and others of some targets.
WITHOUT_EFFECT = (
    "cluster.time_limit_min cluster.partition cluster.account cluster.qos cluster.constraint cluster.reservation "
    "cluster.exclude cluster.exclusive cluster.sbatch "
    "cluster.srun_args cluster.slurm_conf cluster.sandbox job.singleton requeue.in_place requeue.restart_delay_s "
    "requeue.blame_threshold requeue.blame_expiry_h"
)
ALSO_WITHOUT_EFFECT = {
    Target.TRAINJOB: "cluster.pods.ttl_s",
    Target.SKYPILOT: "cluster.pods.pull_policy cluster.pods.namespace cluster.pods.queue cluster.pods.shm_gb "
    "cluster.pods.host_network cluster.pods.node_selector cluster.pods.tolerations cluster.pods.annotations "
    "cluster.pods.fs_group cluster.pods.grace_s cluster.pods.ttl_s cluster.pods.spec cluster.pods.container",
}


def on_engine(config: Config, target: Target) -> Config:
    """Return the config of the same run on another engine, as its supervisor needs it."""
    pods = dataclasses.replace(config.cluster.pods, target=target)
    return dataclasses.replace(
        config, cluster=dataclasses.replace(config.cluster, backend=Backend.KUBERNETES, pods=pods)
    )


def warn_of_settings(config: Config) -> None:
    """Log which settings of a config its target cannot express."""
    target = config.cluster.pods.target
    given = given_fields(config, f"{WITHOUT_EFFECT} {ALSO_WITHOUT_EFFECT.get(target, '')}")
    if given:
        log.warning("without effect with the target %s: %s", target, ", ".join(given))


def manifest(config: Config, run: PodRun, *, placeholders: bool = False) -> str:
    """Return the manifest of a run for the engine that cluster.pods.target names, as YAML.

    Args:
        placeholders: it is only shown, and words stand for the image and the volume if the config has none.

    Raises:
        ConfigError: something that pods need is missing.
    """
    import yaml

    class Dumper(yaml.SafeDumper):
        """Writes text of several lines, such as a script, as it is."""

    Dumper.add_representer(
        str, lambda dumper, text: dumper.represent_scalar(STR, text, style="|" if "\n" in text else None)
    )
    check(config, run, placeholders=placeholders)
    found = TARGETS[config.cluster.pods.target](config, run)
    merge(found[-1], config.cluster.pods.object)
    return "---\n".join(
        yaml.dump(each, Dumper=Dumper, sort_keys=False, default_flow_style=False, width=120) for each in found
    )
