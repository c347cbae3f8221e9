"""Submit one run to several clusters or partitions (cluster.choices): the first job that starts takes it.

What the run is on each of them lies in the run directory, so that its first job finds it there; see `runs/choices.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from slurmtrain.choices import Backend, RequeueMode
from slurmtrain.config.frozen import freeze, load_frozen
from slurmtrain.config.schema import Config
from slurmtrain.errors import ClusterError, ConfigError, SlurmtrainError
from slurmtrain.launch import node_exclusion
from slurmtrain.launch.import_paths import interpreter_of
from slurmtrain.launch.named_paths import with_absolute_paths
from slurmtrain.launch.script import render_script
from slurmtrain.launch.script_parts import JobPaths
from slurmtrain.launch.snapshot import find_source
from slurmtrain.launch.submit import job_paths
from slurmtrain.launch.submit_once import NotSubmittedError, export_option, submit_exactly_once
from slurmtrain.runs.choices import CHOICES_MAX, Choice, choices_of, claim_of, is_name_of_claim
from slurmtrain.runs.events import Event
from slurmtrain.runs.job_tokens import TOKEN_PREFIX
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.slurm.job_states import NOT_STARTED
from slurmtrain.system import files
from slurmtrain.system.modes import folder_mode
from slurmtrain.system.node_copies import shared_interpreter

log = logging.getLogger(__name__)


T = TypeVar("T")


class Suitable(Generic[T]):
    """The choices that suit, of those that a person named, and why each other one is left out."""

    def __init__(self) -> None:
        self.values: dict[str, T] = {}
        self.left_out: dict[str, SlurmtrainError] = {}

    @contextlib.contextmanager
    def leaving_out(self, name: str) -> Iterator[None]:
        """Leave a choice out if the block finds that its config, or its cluster, does not suit."""
        try:
            yield
        except (ConfigError, ClusterError) as error:
            self.values.pop(name, None)
            self.left_out[name] = error

    def require_some(self) -> None:
        """Raise what is wrong with the first choice if none suits, and else say with warnings which are left out."""
        if not self.values and self.left_out:
            error = next(iter(self.left_out.values()))
            if len({its.message for its in self.left_out.values()}) == 1:
                raise error
            kind = ClusterError if isinstance(error, ClusterError) else ConfigError
            said = "; ".join(f"{name}: {its.message}" for name, its in self.left_out.items())
            raise kind(f"none of cluster.choices suits: {said}", hint=error.hint)
        for name, error in self.left_out.items():
            log.warning("%s is left out: %s%s", name, error.message, f" ({error.hint})" if error.hint else "")


def check_choices(configs: Mapping[str, Config], confs: Mapping[str, str | None], cwd: Path) -> None:
    """Check that a run can be submitted to all of these together.

    Args:
        configs: the config of the run on each choice, by the choice's name.
        confs: the slurm.conf of each.
        cwd: the folder of the command.

    Raises:
        ConfigError: it cannot.
    """
    if len(set(confs.values())) > 1 and None in confs.values():
        own = [name for name, conf in confs.items() if conf is None]
        raise ConfigError(
            f"cluster.choices: {', '.join(own)} names no cluster.slurm_conf, and others do, so a job of theirs could not "
            "take its job back",
            hint="set cluster.slurm_conf in each of the files, to a path that all their nodes see",
        )
    _check_same_code(configs, cwd)


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
                "cluster.choices: 'first' is not a cluster: it stands for those in cluster.choices",
                hint="name clusters or partitions of SLURM",
            )
        if is_name_of_claim(name):
            raise ConfigError(
                f"cluster.choices: {name} is a name that the run directory needs for who takes the run",
                hint="give the cluster file another name",
            )
        if config.cluster.backend == Backend.LOCAL:
            raise ConfigError(
                f"cluster.choices: {name} is this machine (cluster.backend=local), which has no queue",
                hint="name clusters or partitions of SLURM",
            )
        if config.requeue.mode == RequeueMode.CHAIN:
            raise ConfigError(
                "requeue.mode=chain with cluster.choices: a chain belongs to one cluster",
                hint="requeue=requeue, or requeue=resubmit where a cluster forbids that",
            )
        if config.job.singleton:
            raise ConfigError(
                "job.singleton=true with cluster.choices: the run's own jobs would wait for each other",
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
                hint="install it in the same way in both, or in neither",
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


@dataclass(frozen=True)
class Submitted:
    """What has become of a run at its choices.

    Attributes:
        jobs: its jobs, by the name of the choice.
        left_out: why the other choices have none, in sentences.
        unknown: the choices that may have one; who takes the run looks for it, and so do `status` and `cancel`.
    """

    jobs: dict[str, str]
    left_out: dict[str, str]
    unknown: dict[str, str]


def submit_to_each(run_dir: RunDir) -> Submitted:
    """Submit a run to each of its choices until one of its jobs has started.

    A choice that cannot be reached, or refuses, is left out with a warning, unless all do. Before sbatch is called the
    choice's record has the token by which its job is found, so that no job is lost whatever comes then.

    Raises:
        NotSubmittedError: no choice has accepted the job.
        ClusterError: it is not known whether one has.
    """
    submitted: dict[str, str] = {}
    problems: dict[str, SlurmtrainError] = {}
    unknown: dict[str, SlurmtrainError] = {}
    number = sum(event["event"] == Event.SUBMITTING for event in run_dir.events())
    for choice in choices_of(run_dir):
        if claim_of(run_dir) is not None:
            break
        try:
            submitted[choice.name] = _submit(run_dir, choice, number)
        except _UnknownError as error:
            unknown[choice.name] = error
        except (ClusterError, ConfigError) as error:
            problems[choice.name] = error
        except (KeyboardInterrupt, OSError):
            log.warning(
                "run %s may be queued on some clusters: `status %s`, `cancel %s`", run_dir.id, run_dir.id, run_dir.id
            )
            raise
    if not submitted and unknown:
        raise next(iter(unknown.values()))
    if not submitted and problems:
        first = next(iter(problems.values()))
        raise first if isinstance(first, NotSubmittedError) else NotSubmittedError(first.message, hint=first.hint)
    for name, problem in problems.items():
        log.warning("not submitted to %s: %s", name, problem.message)
    for name, problem in unknown.items():
        log.warning("%s: %s; if its job exists, it exits when another job has the run", name, problem.message)
    return Submitted(
        submitted,
        {name: problem.message for name, problem in problems.items()},
        {name: problem.message for name, problem in unknown.items()},
    )


class _UnknownError(ClusterError):
    """It is not known whether a choice has the job."""


def _submit(run_dir: RunDir, choice: Choice, number: int) -> str:
    conf, script = choice.slurm_conf(), choice.asking_script.read_text()
    config = load_frozen(choice.config_file, with_secrets=False)
    client = SlurmClient(conf)
    choice = dataclasses.replace(choice, token=f"{run_dir.id}:first{number}.{choice.name}", job_id=None)
    choice.write()  # before sbatch is called: who takes the run finds the job by its token
    exclusion = node_exclusion.for_new_job([run_dir], choice.asking_script, client, config)
    options = [*export_option(config), *exclusion.options]
    run_dir.event(Event.SUBMITTING, token=choice.token)
    try:
        job_id = submit_exactly_once(
            script,
            run_dir.path / "submitit",
            choice.token,
            client,
            options=options,
            finds_out=f"`status {run_dir.id}` shows its jobs",
        )
    except NotSubmittedError:
        raise
    except ClusterError as error:
        raise _UnknownError(error.message, hint=error.hint) from None
    dataclasses.replace(choice, job_id=job_id).write()
    run_dir.event(Event.SUBMITTED, job_id=job_id, choice=choice.name)
    if exclusion.blamed:
        exclusion.record(run_dir, job_id)
    exclusion.tell()
    claim = claim_of(run_dir)
    if claim is not None and claim.choice != choice.name:  # it has looked for this job when it was not there yet
        try:
            # Only while it waits: one that has started leaves by itself, unless it takes the run from a job that has died.
            waiting = client.find_by_comment(TOKEN_PREFIX + choice.token, states=NOT_STARTED)
            if waiting:
                client.cancel(*waiting)
        except ClusterError as error:
            log.warning("job %s could not be cancelled, and will exit when it starts: %s", job_id, error.message)
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
