"""A run on Kubernetes: its manifest lies in its directory, and kubectl hands it over.

Each submission is an object with a name of its own, so one that was interrupted can be repeated: what exists stays.
"""

from __future__ import annotations

import logging

from slurmtrain.config.frozen import load_frozen
from slurmtrain.config.schema import Config
from slurmtrain.errors import ClusterError
from slurmtrain.launch.job import note
from slurmtrain.launch.submit_once import NotSubmittedError
from slurmtrain.launch.targets import manifest
from slurmtrain.launch.targets.pod import PodRun, labels
from slurmtrain.runs import ownership
from slurmtrain.runs.attempts import all_attempts
from slurmtrain.runs.events import Event
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system import files, kubectl

log = logging.getLogger(__name__)


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
