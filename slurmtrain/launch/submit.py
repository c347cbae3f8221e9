"""From a config to a job in the queue: prepare the run directory, pass the script to sbatch, record the id."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slurmtrain import __version__
from slurmtrain.choices import Backend, JobKind, RequeueMode
from slurmtrain.config.frozen import config_hash, freeze, load_frozen
from slurmtrain.config.schema import Config
from slurmtrain.errors import ClusterError, ConfigError
from slurmtrain.launch import node_exclusion
from slurmtrain.launch.directives import without_past
from slurmtrain.launch.import_paths import interpreter_of
from slurmtrain.launch.named_paths import with_absolute_paths
from slurmtrain.launch.program_check import check_in_snapshot
from slurmtrain.launch.script import explain_script, render_script
from slurmtrain.launch.script_parts import JobPaths, Line
from slurmtrain.launch.snapshot import CodeSource, Snapshot, find_source, take_snapshot
from slurmtrain.launch.submit_once import NotSubmittedError, export_option, submit_exactly_once
from slurmtrain.runs import ownership
from slurmtrain.runs.create import create_run_dir, folder_of
from slurmtrain.runs.events import Event
from slurmtrain.runs.job_tokens import TOKEN_PREFIX
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm.client import INSTALL_HINT, SlurmClient
from slurmtrain.slurm.command_environment import clean_environment
from slurmtrain.slurm.versions import Version
from slurmtrain.system import files
from slurmtrain.system.modes import inherit_group
from slurmtrain.system.node_copies import shared_interpreter
from slurmtrain.system.process_facts import fingerprint_of, login_facts
from slurmtrain.system.redaction import redacted
from slurmtrain.system.user import own_user

log = logging.getLogger(__name__)

PLACEHOLDER_ID = "RUN_ID"  # stands for the run's id in a dry run, which creates nothing


def dry_run(config: Config, cwd: Path, source: CodeSource | None = None) -> str:
    """Return the script that `submit` would pass to sbatch. Nothing is created. Arguments as of `preparing`."""
    config = with_absolute_paths(config, cwd)
    return render_script(config, _paths_of_a_dry_run(config, cwd, source))


def explained(config: Config, cwd: Path, version: Version | None, order: str | None = None) -> list[Line]:
    """Return the lines of `dry_run` with the reason of each.

    Args:
        version, order: as of `explain_script`.
    """
    config = with_absolute_paths(config, cwd)
    return explain_script(config, _paths_of_a_dry_run(config, cwd), version, order)


def _paths_of_a_dry_run(config: Config, cwd: Path, source: CodeSource | None = None) -> JobPaths:
    run_dir = folder_of(Path(config.job.runs_dir), config.job.name) / PLACEHOLDER_ID
    source = source or find_source(config.job, cwd, interpreter_of(config.cluster))
    return JobPaths([run_dir], source.workdir, shared_interpreter(), roots=source.roots, submit_dir=cwd)


@contextlib.contextmanager
def preparing(
    config: Config, overrides: Sequence[str], cwd: Path, source: CodeSource | None = None
) -> Iterator[RunDir]:
    """Make the run directory: frozen config, snapshot of the code, script.

    It is removed again if the block fails, unless a job that needs it may be in the queue.

    Args:
        source: the code; None: that of `cwd`, as job.snapshot says.
    """
    config = with_absolute_paths(config, cwd)
    source = source or find_source(config.job, cwd, interpreter_of(config.cluster))
    with _new_run_dir(config) as run_dir:
        snapshot = take_snapshot(config.job, source, run_dir.code)
        for warning in check_in_snapshot(config, run_dir.path / snapshot.workdir, source, cwd):
            log.warning(warning)
        _write(run_dir, config, overrides, snapshot, source, cwd)
        yield run_dir


@contextlib.contextmanager
def preparing_with_code_of(
    other: RunDir, config: Config, overrides: Sequence[str], cwd: Path, *, without: Collection[Path] = ()
) -> Iterator[RunDir]:
    """Make the run directory of a run with the code of another one, which stays as it is; else as `preparing`.

    Args:
        config: a config with absolute paths.
        without: files and folders of that code that are not copied, such as what its program has written there.

    Raises:
        ConfigError: the run directory cannot be made, or the code cannot be copied.
    """
    info, left_out = other.info(), {str(path) for path in without}
    workdir, roots = str(info.get("workdir") or cwd), tuple(info.get("import_roots", ()))
    code = info.get("code") or {}
    with _new_run_dir(config) as run_dir:
        try:
            shutil.copytree(
                other.code,
                run_dir.code,
                symlinks=True,
                ignore=lambda folder, names: [name for name in names if os.path.join(folder, name) in left_out],
            )
        except OSError as error:  # also a shutil.Error, which has no words of its own
            why = error.strerror or "not all of its files can be read"
            raise ConfigError(f"the code of run {other.id} cannot be copied from {other.code}: {why}") from None
        inherit_group(run_dir.code)
        dirty = code.get("dirty")
        git = code.get("revision"), None if dirty is None else bool(dirty)
        snapshot = Snapshot(workdir, *git, roots, code.get("branch"), code.get("remote"))
        source = CodeSource(None if snapshot.in_place else other.code, workdir, roots=roots)
        _write(run_dir, config, overrides, snapshot, source, cwd)
        yield run_dir


@contextlib.contextmanager
def _new_run_dir(config: Config) -> Iterator[RunDir]:
    """Create a run directory, which is removed again if the block fails, unless a job that needs it may be in the queue."""
    run_dir = create_run_dir(Path(config.job.runs_dir), config.job.name)
    try:
        yield run_dir
    except BaseException as error:
        if not isinstance(error, NotSubmittedError) and _submitting(run_dir):
            raise
        shutil.rmtree(run_dir.path, ignore_errors=True)
        for parent in (run_dir.path.parent, run_dir.path.parent.parent):
            with contextlib.suppress(OSError):
                parent.rmdir()  # only if nothing else is in it
        raise


def submit(run_dirs: Sequence[RunDir], config: Config) -> str:
    """Pass the script of these runs to sbatch: one job, or an array with one task per run.

    Returns:
        SLURM's job id; for an array, that of the array.

    Raises:
        ClusterError: sbatch is missing or refused; its own words are in the message.
    """
    slurm_conf = slurm_conf_of(config)
    check_slurm_is_here(slurm_conf)
    if len(run_dirs) > 1 and config.requeue.mode == RequeueMode.CHAIN:
        raise no_chain(f"for {len(run_dirs)} runs at once")
    first = run_dirs[0]
    if len(run_dirs) > 1:
        script = render_script(config, job_paths([run_dir.path for run_dir in run_dirs], first.info()))
        for run_dir in run_dirs:
            files.write_text(run_dir.script, script)
    shared = len(run_dirs) > 1
    exclusion = node_exclusion.for_new_job(run_dirs, first.script, SlurmClient(slurm_conf), config)
    options = [*export_option(config), *exclusion.options]
    job_id = _hand_over(first.script.read_text(), first, slurm_conf, options, shared=shared)
    for index, run_dir in enumerate(run_dirs):
        element = f"{job_id}_{index}" if len(run_dirs) > 1 else job_id
        with _told_if_not_noted(run_dir, element):
            run_dir.add_job(element, slurm_conf=slurm_conf)
            run_dir.event(Event.SUBMITTED, job_id=element)
            if exclusion.blamed:
                exclusion.record(run_dir, element)
    exclusion.tell()
    return job_id


def interrupted(run_dir: RunDir, client: SlurmClient) -> str:
    """Describe the state of a run whose submission a person has interrupted, and record its job if there is one."""
    tokens = _submitting(run_dir)
    if not tokens:
        return "nothing was submitted"
    steers = f"status {run_dir.id}   cancel {run_dir.id}"
    try:
        job_id = next(iter(client.find_by_comment(TOKEN_PREFIX + tokens[-1], ended=True)), None)
    except ClusterError as error:
        return f"it is not known whether run {run_dir.id} was submitted: {error.message}; {steers}   {run_dir.path}"
    if job_id is not None:
        note(run_dir, job_id, found_by=TOKEN_PREFIX + tokens[-1])
        return f"run {run_dir.id} was submitted all the same, as job {job_id}, and goes on; {steers}   {run_dir.path}"
    return (
        f"no job of run {run_dir.id} is in the queue yet; sbatch was at work, so look again: {steers}   resume {run_dir.id} "
        f"submits it if it has no job   {run_dir.path}"
    )


def no_chain(what: str) -> ConfigError:
    """Return the error for a chain that is asked for an array."""
    return ConfigError(
        f"requeue.mode=chain {what}: the tasks of an array cannot wait for different jobs",
        hint="requeue=resubmit, or requeue=requeue where the cluster allows it",
    )


def submit_existing_script(
    run_dir: RunDir,
    options: Callable[[str], Sequence[str]] = lambda script: (),
    *,
    token: str | None = None,
    **facts: object,
) -> str:
    """Submit an existing run again, as one job, with the script it was first submitted with, but without its dependencies.

    Args:
        options: returns further options for sbatch, given the script.
        token: the job's own, if the caller may ask for this job more than once; None: a new one.
        facts: facts for the record.

    Raises:
        UsageError: the run belongs to somebody else, who may have put it in the place of this user's.
    """
    ownership.require_own(run_dir)
    slurm_conf = run_dir.slurm_conf()
    check_slurm_is_here(slurm_conf)
    script = without_past(_alone(run_dir, run_dir.script.read_text()))
    config = load_frozen(run_dir.config_file, with_secrets=False)
    exclusion = node_exclusion.for_new_job([run_dir], run_dir.script, SlurmClient(slurm_conf), config)
    words = [*options(script), *exclusion.options, *export_option(config)]
    job_id = _hand_over(script, run_dir, slurm_conf, options=words, token=token)
    note(run_dir, job_id, **facts)
    if exclusion.blamed:
        with _told_if_not_noted(run_dir, job_id):
            exclusion.record(run_dir, job_id)
    exclusion.tell()
    return job_id


def note(run_dir: RunDir, job_id: str, **facts: object) -> None:
    """Record that this job is the run's latest, and that no other run shares it."""
    with _told_if_not_noted(run_dir, job_id):
        run_dir.add_job(job_id, packed=False)
        run_dir.event(Event.SUBMITTED, job_id=job_id, **facts)


@contextlib.contextmanager
def _told_if_not_noted(run_dir: RunDir, job_id: str) -> Iterator[None]:
    """Go on with a warning if a job that SLURM has taken cannot be noted: an error would say that there is none."""
    try:
        yield
    except OSError as error:  # a full disk
        log.warning(
            "job %s is submitted, but cannot be noted in %s: %s; `resume %s` looks for it, and `cancel %s` ends it",
            *(job_id, run_dir.path, error.strerror or error, run_dir.id, run_dir.id),
        )


def check_slurm_is_here(slurm_conf: str | None) -> None:
    """Raise ClusterError if a command that submitting or the job needs is missing."""
    path = clean_environment(os.environ, slurm_conf).get("PATH")
    for program in ("sbatch", "srun"):
        if shutil.which(program, path=path) is None:
            raise ClusterError(f"there is no `{program}` on this machine", hint=INSTALL_HINT)


def slurm_conf_of(config: Config) -> str | None:
    """Return the slurm.conf by which every verb has to ask for this config's jobs; None for the machine's own SLURM.

    That of the shell does not count unless it is a sandbox's: inside a job of a cluster without configuration files on
    its nodes, slurmd sets SLURM_CONF to a copy in its spool folder, which exists nowhere else.

    Raises:
        ConfigError: cluster.slurm_conf is not a file.
        ClusterError: the sandbox that it names is not running.
    """
    if config.cluster.slurm_conf:
        path = Path(config.cluster.slurm_conf)
        if not path.is_file():
            raise ConfigError(f"cluster.slurm_conf={path} is not a file", hint="null: this machine's own SLURM")
        return str(path)
    from slurmtrain import sandbox

    if config.cluster.sandbox is None:
        in_shell = os.environ.get("SLURM_CONF")
        here = sandbox.find(Path(in_shell).parent) if in_shell else None
        return in_shell if here is not None else None
    found = sandbox.find(config.cluster.sandbox)
    if found is None:
        raise ClusterError(
            f"the sandbox {config.cluster.sandbox!r} is not running", hint="start it: python -m slurmtrain sandbox up"
        )
    return str(found.slurm_conf)


def _hand_over(
    script: str,
    run_dir: RunDir,
    slurm_conf: str | None,
    options: Sequence[str] = (),
    *,
    shared: bool = False,
    token: str | None = None,
) -> str:
    """Submit a run for the first time, or once more. `options` override the script's own.

    Args:
        shared: the job is an array with tasks of other runs, too, so its token does not name this run alone.
        token: as for `submit_existing_script`.
    """
    token = token or f"{run_dir.id}{'-array-' if shared else ':'}s{len(run_dir.info()['job_ids'])}"
    before = token in _submitting(run_dir)
    run_dir.event(Event.SUBMITTING, token=token)
    return submit_exactly_once(
        script,
        run_dir.path / "submitit",
        token,
        SlurmClient(slurm_conf),
        options=options,
        looked_for_before=before,
        even_ended=shared,  # a run by itself is submitted once more only when it has ended, whatever job had it
        finds_out=f"`resume {run_dir.id}` looks for it first",
    )


def _submitting(run_dir: RunDir) -> list[str]:
    """Return the tokens of the submissions that were begun."""
    return [str(event.get("token")) for event in run_dir.events() if event["event"] == Event.SUBMITTING]


def _write(
    run_dir: RunDir, config: Config, overrides: Sequence[str], snapshot: Snapshot, source: CodeSource, cwd: Path
) -> None:
    info = run_info(config, overrides, snapshot, source, cwd)
    files.write_json(run_dir.info_file, {"id": run_dir.id, **info})
    files.write_text(run_dir.config_file, freeze(config))
    files.write_text(run_dir.script, render_script(config, job_paths([run_dir.path], info)))


def job_paths(run_dirs: Sequence[Path], info: Mapping[str, Any]) -> JobPaths:
    """Return the paths that a script needs, from the contents of run.json or sweep.json."""
    submit_dir = Path(info["submit_dir"]) if info.get("submit_dir") else None
    roots = info.get("import_roots", ())
    return JobPaths(run_dirs, info["workdir"], shared_interpreter(), roots=roots, submit_dir=submit_dir)


def run_info(
    config: Config, overrides: Sequence[str], snapshot: Snapshot, source: CodeSource, cwd: Path
) -> dict[str, Any]:
    """Return the contents of run.json for a run before it is submitted, without its id.

    Raises:
        ConfigError: a path of the run contains a secret.
    """
    info = {
        "name": config.job.name,
        "overrides": list(overrides),
        "config_hash": config_hash(config),
        "backend": config.cluster.backend,
        "steps": steps_of(config),
        **own_checkpoints_of(config),
        "code": {**code_facts(snapshot), "from": str(source.bundle["file"] if source.bundle else source.root or cwd)},
        **({"bundle": dict(source.bundle)} if source.bundle else {}),
        "workdir": snapshot.workdir,
        "import_roots": list(snapshot.roots),
        "user": own_user(),
        "host": socket.gethostname(),
        "submit_dir": str(cwd),
        "created": time.time(),
        "version": __version__,
        "submitted_with": login_facts(),
        **_image_of(config),
        "slurm_conf": _slurm_conf_if_known(config),
        "job_ids": [],
    }
    for key in ("name", "user", "host", "submit_dir", "workdir", "slurm_conf"):  # read again, so as they are
        if redacted(info[key]) != info[key]:
            raise ConfigError(
                f"the value of a secret is a part of this run's {key}, {redacted(info[key])}, which is stored on disk",
                hint="remove values that are not secret, such as a user's name, from `secrets`",
            )
    return info


def code_facts(snapshot: Snapshot) -> dict[str, Any]:
    """Return what run.json says of a snapshot."""
    return {
        "revision": snapshot.revision,
        "dirty": snapshot.dirty,
        "branch": snapshot.branch,
        "remote": snapshot.remote,
    }


def _image_of(config: Config) -> dict[str, Any]:
    """Return the field of run.json for the image of the job's container, with a digest if it is a file that can be read."""
    container = config.cluster.container
    if not container.kind or not container.image:
        return {}
    facts: dict[str, Any] = {"image": container.image}
    path = Path(container.image)
    if path.is_absolute():
        with contextlib.suppress(OSError):  # the compute nodes alone may see it
            facts |= {"bytes": path.stat().st_size, "digest": fingerprint_of(path)}
    return {"image": facts}


def steps_of(config: Config) -> int | None:
    """Return the number of steps that the trainer is to do; None for a program of the user's own."""
    return config.train.steps if config.job.kind == JobKind.TRAIN else None


def own_checkpoints_of(config: Config) -> dict[str, Any]:
    """Return the field of run.json by which `status` finds the checkpoints of a program of the user's own."""
    job = config.job
    if job.checkpoints is None:
        return {}
    return {"own_checkpoints": {"pattern": job.checkpoints, "complete": job.checkpoint_complete}}


def _slurm_conf_if_known(config: Config) -> str | None:
    """Return the slurm.conf for a run that is passed to sbatch by hand.

    `status`, `cancel` and `resume` must ask the same SLURM.
    """
    if config.cluster.backend == Backend.LOCAL:
        return None
    try:
        return slurm_conf_of(config)
    except ClusterError:  # its sandbox is not running yet, in which case `submit` has already refused
        return None


def _alone(run_dir: RunDir, script: str) -> str:
    """Return the script, for one run by itself, of a run that was one of several of an array or a pack."""
    if "\nrun_dirs=(" not in script:
        return script
    config = load_frozen(run_dir.config_file, with_secrets=False)  # a script on disk
    return render_script(config, job_paths([run_dir.path], run_dir.info()))
