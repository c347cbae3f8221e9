"""The same run on other engines than SLURM: the manifests of `render --target`, and of `submit` on Kubernetes.

An engine starts pods, stops them and starts them again; what it starts in each is `python -m slurmtrain supervise RUN`
(supervise/platforms/pods.py). `pod` has what all of them share. The texts are
pure functions of a config and of where its run lies.
"""

from __future__ import annotations

import logging

from msgspec.structs import replace

from slurmtrain.choices import Backend, Target
from slurmtrain.config.fields import merge
from slurmtrain.config.frozen import load_frozen
from slurmtrain.config.rules import given_fields
from slurmtrain.config.schema import Config
from slurmtrain.errors import ClusterError
from slurmtrain.launch.job import note
from slurmtrain.launch.submit_once import NotSubmittedError
from slurmtrain.launch.targets import objects
from slurmtrain.launch.targets.pod import PodRun, check, labels
from slurmtrain.runs import ownership
from slurmtrain.runs.attempts import all_attempts
from slurmtrain.runs.reasons import Event
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system import files, kubectl

log = logging.getLogger(__name__)

STR = "tag:yaml.org,2002:str"
# Each returns the documents of its manifest.
TARGETS = {
    Target.JOBSET: objects.jobset,
    Target.TRAINJOB: objects.trainjob,
    Target.RAYJOB: objects.rayjob,
    Target.SKYPILOT: objects.sky_task,
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
    pods = replace(config.cluster.pods, target=target)
    return replace(config, cluster=replace(config.cluster, backend=Backend.KUBERNETES, pods=pods))


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


# A run on Kubernetes: its manifest lies in its directory, and kubectl hands it over. Each submission is an object with a
# name of its own, so one that was interrupted can be repeated: what exists stays.


def submit(run_dir: RunDir) -> str:
    """Create the next object of a run, and return its name.

    Raises:
        ClusterError: Kubernetes refuses it, or cannot be reached.
        UsageError: the run belongs to somebody else.
    """
    ownership.require_own(run_dir)
    config = load_frozen(run_dir.config_file, with_secrets=False)
    run = pod_run(run_dir)
    if run.object_name(config) in [attempt.job_id for attempt in all_attempts(run_dir)]:  # it was created by hand
        note(run_dir, run.object_name(config))
        run = pod_run(run_dir)
    name = run.object_name(config)
    if run.submission:  # the objects before it have ended
        kubectl.delete(run_dir.manifest)
    files.write_text(run_dir.manifest, manifest(config, run))  # the config may have been changed
    run_dir.event(Event.SUBMITTING, token=name)
    try:
        kubectl.create(run_dir.manifest)
    except ClusterError as error:
        raise NotSubmittedError(error.message, hint=error.hint) from None
    note(run_dir, name)
    return name


def pod_run(run_dir: RunDir) -> PodRun:
    """Return what the next object of a run starts."""
    return PodRun(run_dir.path, len(run_dir.info()["job_ids"]))


def stop_pods(run_dir: RunDir, config: Config) -> None:
    """Let all pods of a run stop, after which their object starts new ones. Raises as `submit`."""
    own = labels(config, pod_run(run_dir))
    selector = ",".join(f"{name}={own[name]}" for name in ("slurmtrain/name", "slurmtrain/run"))
    kubectl.delete_pods(selector, config.cluster.pods.namespace)
