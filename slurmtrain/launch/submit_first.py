"""Submit one run to several clusters or partitions (cluster.choices): the first job that starts takes it.

What the run is on each of them lies in the run directory, so that its first job finds it there; see `runs/choices.py`.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from slurmtrain.choices import Backend, RequeueMode
from slurmtrain.config.compose import freeze, load_frozen
from slurmtrain.config.schema import Config
from slurmtrain.errors import ClusterError, ConfigError
from slurmtrain.launch import node_exclusion
from slurmtrain.launch.import_paths import interpreter_of
from slurmtrain.launch.named_paths import with_absolute_paths
from slurmtrain.launch.script import JobPaths, render_script
from slurmtrain.launch.snapshot import find_source
from slurmtrain.launch.submit import check_slurm_is_here, job_paths, slurm_conf_of
from slurmtrain.launch.submit_once import NotSubmittedError, export_option, submit_exactly_once
from slurmtrain.runs.choices import CHOICES_MAX, Choice, choices_of, claim_of
from slurmtrain.runs.events import Event
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.system import files
from slurmtrain.system.modes import folder_mode
from slurmtrain.system.node_copies import shared_interpreter

log = logging.getLogger(__name__)


def check_choices(configs: Mapping[str, Config], cwd: Path) -> dict[str, str | None]:
    """Check that a run can be submitted to each of these, and return the slurm.conf of each.

    Args:
        configs: the config of the run on each choice, by the choice's name.
        cwd: the folder of the command.

    Raises:
        ConfigError: it cannot.
        ClusterError: the sandbox of one is not running, or there is no SLURM here.
    """
    refuse_unsuitable(configs)
    confs = {name: slurm_conf_of(config) for name, config in configs.items()}
    for conf in set(confs.values()):
        check_slurm_is_here(conf)
    if len(set(confs.values())) > 1 and None in confs.values():
        own = [name for name, conf in confs.items() if conf is None]
        raise ConfigError(
            f"cluster.choices: {', '.join(own)} names no cluster.slurm_conf, and others do, so a job of theirs could not "
            "take its job back",
            hint="set cluster.slurm_conf in each of the files, to a path that all their nodes see",
        )
    _check_same_code(configs, cwd)
    return confs


def refuse_unsuitable(configs: Mapping[str, Config]) -> None:
    """Check what can be known without a look at any cluster, for a dry run, too.

    Raises:
        ConfigError: a run cannot be submitted to these.
    """
    if len(configs) > CHOICES_MAX:
        raise ConfigError(f"cluster.choices has {len(configs)} names, and {CHOICES_MAX} is the most")
    for name, config in configs.items():
        if name == "first":
            raise ConfigError(
                "cluster.choices: 'first' is no cluster: it stands for those that cluster.choices names",
                hint="name clusters or partitions of SLURM",
            )
        if config.cluster.backend == Backend.LOCAL:
            raise ConfigError(
                f"cluster.choices: {name} is this machine (cluster.backend=local), which has no queue",
                hint="name clusters or partitions of SLURM",
            )
        if config.requeue.mode == RequeueMode.CHAIN:
            raise ConfigError(
                "requeue.mode=chain with cluster.choices: a chain is a queue of its own on one cluster",
                hint="requeue=requeue, or requeue=resubmit where a cluster forbids that",
            )
        if config.job.singleton:
            raise ConfigError(
                "job.singleton=true with cluster.choices: the run's own jobs, of the same name, would wait for each other",
                hint="job.singleton=false",
            )


def _check_same_code(configs: Mapping[str, Config], cwd: Path) -> None:
    """Check that the interpreters of all choices import the code from the same folders: the run has one snapshot."""
    by_interpreter: dict[str | None, tuple[str, Config]] = {}
    for name, config in configs.items():
        by_interpreter.setdefault(interpreter_of(config.cluster), (name, config))
    found = {name: find_source(config.job, cwd, of) for of, (name, config) in by_interpreter.items()}
    first, *others = found
    for name in others:
        if (found[name].workdir, found[name].roots) != (found[first].workdir, found[first].roots):
            raise ConfigError(
                f"cluster.choices: the interpreters of {first} and {name} import the code from different folders",
                hint="install it in both of them in the same way, or not at all",
            )


def write_choices(run_dir: RunDir, configs: Mapping[str, Config], confs: Mapping[str, str | None], cwd: Path) -> None:
    """Write into a run directory that was prepared what the run is on each choice."""
    run_dir.choices.mkdir(mode=folder_mode(run_dir.path))
    info = run_dir.info()
    for place, (name, config) in enumerate(configs.items()):
        config = with_absolute_paths(config, cwd)
        choice = Choice(run_dir.choices / name, place, name, confs[name])
        choice.folder.mkdir(mode=folder_mode(run_dir.choices))
        paths = job_paths([run_dir.path], info)
        files.write_text(choice.config_file, freeze(config))
        files.write_text(choice.script, render_script(config, paths))
        files.write_text(choice.asking_script, render_script(config, dataclasses.replace(paths, choice=name)))
        choice.write()
    run_dir.update_info(slurm_conf=None)  # none of them yet


def submit_to_each(run_dir: RunDir) -> dict[str, str]:
    """Submit a run to each of its choices until one of its jobs has started, and return the jobs by name.

    A choice that cannot be reached, or refuses, is left out with a warning, unless all do.

    Raises:
        NotSubmittedError: no choice has accepted the job.
        ClusterError: it is not known whether one has.
    """
    submitted: dict[str, str] = {}
    problems: dict[str, NotSubmittedError] = {}
    number = sum(event["event"] == Event.SUBMITTING for event in run_dir.events())
    for choice in choices_of(run_dir):
        if claim_of(run_dir) is not None:
            break
        try:
            submitted[choice.name] = _submit(run_dir, choice, number)
        except NotSubmittedError as error:
            problems[choice.name] = error
    if not submitted and problems:
        raise next(iter(problems.values()))
    for name, problem in problems.items():
        log.warning("not submitted to %s: %s", name, problem.message)
    return submitted


def _submit(run_dir: RunDir, choice: Choice, number: int) -> str:
    conf, script = choice.slurm_conf(), choice.asking_script.read_text()
    config = load_frozen(choice.config_file, with_secrets=False)
    client = SlurmClient(conf)
    choice = dataclasses.replace(choice, token=f"{run_dir.id}:first{number}.{choice.name}", job_id=None)
    choice.write()  # before sbatch is called: who takes the run finds the job by its token
    exclusion = node_exclusion.for_new_job([run_dir], choice.asking_script, client, config)
    run_dir.event(Event.SUBMITTING, token=choice.token)
    job_id = submit_exactly_once(
        script,
        run_dir.path / "submitit",
        choice.token,
        client,
        options=[*export_option(config), *exclusion.options],
        finds_out=f"`status {run_dir.id}` shows its jobs",
    )
    dataclasses.replace(choice, job_id=job_id).write()
    run_dir.event(Event.SUBMITTED, job_id=job_id, choice=choice.name)
    if exclusion.blamed:
        exclusion.record(run_dir, job_id)
    exclusion.tell()
    claim = claim_of(run_dir)
    if claim is not None and claim.choice != choice.name:  # it has looked for this job when it was not there yet
        try:
            client.cancel(job_id)
        except ClusterError as error:
            log.warning("job %s is not taken back, and leaves when it starts: %s", job_id, error.message)
    return job_id


def dry_run_of_each(configs: Mapping[str, Config], cwd: Path, placeholder: str) -> str:
    """Return the scripts that `submit_to_each` would pass to sbatch, one below the other. Nothing is created.

    Raises:
        ConfigError: as `refuse_unsuitable`.
    """
    refuse_unsuitable(configs)
    texts = []
    for name, config in configs.items():
        config = with_absolute_paths(config, cwd)
        source = find_source(config.job, cwd, interpreter_of(config.cluster))
        run_dir = Path(config.job.runs_dir) / config.job.name / placeholder
        paths = JobPaths(
            [run_dir], source.workdir, shared_interpreter(), roots=source.roots, submit_dir=cwd, choice=os.fspath(name)
        )
        texts.append(f"### {name}\n{render_script(config, paths)}")
    return "\n".join(texts)
