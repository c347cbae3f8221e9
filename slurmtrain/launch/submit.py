"""From a config to a run directory with all that its job needs."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slurmtrain import __version__
from slurmtrain.choices import Backend, JobKind
from slurmtrain.config.frozen import config_hash, freeze
from slurmtrain.config.schema import Config
from slurmtrain.errors import ClusterError, ConfigError
from slurmtrain.launch.code_source import CodeSource, find_source
from slurmtrain.launch.named_paths import check_in_snapshot, with_absolute_paths
from slurmtrain.launch.script import JobPaths, render_script
from slurmtrain.launch.snapshot import take_snapshot
from slurmtrain.runs.create import create_run_dir
from slurmtrain.runs.run_dir import RunDir, made_at
from slurmtrain.runs.software import CodeRecord
from slurmtrain.system import files
from slurmtrain.system.files import own_user
from slurmtrain.system.node_copies import shared_interpreter
from slurmtrain.system.process_facts import fingerprint_of, login_facts
from slurmtrain.system.redaction import redacted

log = logging.getLogger(__name__)


@contextlib.contextmanager
def preparing(
    config: Config, overrides: Sequence[str], cwd: Path, source: CodeSource | None = None
) -> Iterator[RunDir]:
    """Make the run directory: frozen config, snapshot of the code, and script or manifest.

    It is removed again if the block fails, unless a job that needs it may be in the queue.

    Args:
        source: the code; None: that of `cwd`, as job.snapshot says.
    """
    config = with_absolute_paths(config, cwd)
    source = source or find_source(config.job, cwd, config.cluster)
    run_dir = create_run_dir(Path(config.job.runs_dir), config.job.name)
    try:
        record = take_snapshot(config.job, source, run_dir.code)
        for warning in check_in_snapshot(config, run_dir.path / source.workdir, source, cwd):
            log.warning(warning)
        info = run_info(config, overrides, record, source, cwd)
        files.write_json(run_dir.info_file, {"id": run_dir.id, **info, "made_at": made_at(run_dir.path)})
        files.write_text(run_dir.config_file, freeze(config))
        if config.cluster.backend == Backend.KUBERNETES:
            from slurmtrain.launch.targets import manifest, warn_of_settings
            from slurmtrain.launch.targets.pod import PodRun

            warn_of_settings(config)
            files.write_text(run_dir.manifest, manifest(config, PodRun(run_dir.path)))
        else:
            files.write_text(run_dir.script, render_script(config, job_paths([run_dir.path], info)))
        yield run_dir
    except BaseException as error:
        from slurmtrain.launch.job import begun_submissions
        from slurmtrain.launch.submit_once import NotSubmittedError

        if not isinstance(error, NotSubmittedError) and begun_submissions(run_dir):
            raise
        shutil.rmtree(run_dir.path, ignore_errors=True)
        for parent in (run_dir.path.parent, run_dir.path.parent.parent):
            with contextlib.suppress(OSError):
                parent.rmdir()  # only if nothing else is in it
        raise


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
    in_shell = os.environ.get("SLURM_CONF")
    if config.cluster.sandbox is None and not in_shell:
        return None
    from slurmtrain import sandbox

    if config.cluster.sandbox is None:
        return in_shell if sandbox.find(Path(str(in_shell)).parent) is not None else None
    found = sandbox.find(config.cluster.sandbox)
    if found is None:
        name = config.cluster.sandbox
        named = "NAME" if "/" in name else name
        raise ClusterError(
            f"the sandbox {name!r} is not running",
            hint=f"start it: python -m slurmtrain sandbox up --name {named}; cluster.sandbox=NAME uses another one",
        )
    return str(found.slurm_conf)


def job_paths(run_dirs: Sequence[Path], info: Mapping[str, Any]) -> JobPaths:
    """Return the paths that a script needs, from the contents of run.json or sweep.json."""
    submit_dir = Path(info["submit_dir"]) if info.get("submit_dir") else None
    roots = info.get("import_roots", ())
    return JobPaths(run_dirs, info["workdir"], shared_interpreter(), roots=roots, submit_dir=submit_dir)


def run_info(
    config: Config, overrides: Sequence[str], record: CodeRecord, source: CodeSource, cwd: Path
) -> dict[str, Any]:
    """Return the contents of run.json for a run before it is submitted, without its id.

    Raises:
        ConfigError: a path of the run contains a secret.
    """
    slurm_conf = None
    if config.cluster.backend == Backend.SLURM:
        with contextlib.suppress(
            ClusterError
        ):  # its sandbox is not running yet: the script is passed to sbatch by hand
            slurm_conf = slurm_conf_of(config)
    info = {
        "name": config.job.name,
        "overrides": list(overrides),
        **facts_of_config(config),
        "backend": config.cluster.backend,
        "code": {**record.git, "from": str(source.root or cwd)},
        "workdir": source.workdir,
        "import_roots": list(source.roots),
        "user": own_user(),
        "host": socket.gethostname(),
        "submit_dir": str(cwd),
        "created": time.time(),
        "version": __version__,
        "submitted_with": login_facts(),
        **_image_of(config),
        "slurm_conf": slurm_conf,
        "job_ids": [],
    }
    for key in ("name", "user", "host", "submit_dir", "workdir", "slurm_conf"):  # read again, so as they are
        if redacted(info[key]) != info[key]:
            raise ConfigError(
                f"the value of a secret is a part of this run's {key}, {redacted(info[key])}, which is stored on disk",
                hint="remove values that are not secret, such as a user's name, from `secrets`",
            )
    return info


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


def facts_of_config(config: Config) -> dict[str, Any]:
    """Return the fields of run.json that follow from the config; `status` finds a program's own checkpoints by the last one."""
    job = config.job
    own = {"pattern": job.checkpoints, "complete": job.checkpoint_complete} if job.checkpoints is not None else None
    facts = {"config_hash": config_hash(config), "steps": config.train.steps if job.kind == JobKind.TRAIN else None}
    return {**facts, "own_checkpoints": own} if own is not None else facts
