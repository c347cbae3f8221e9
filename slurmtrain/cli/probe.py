"""probe: what this cluster is, as a commented conf/cluster/NAME.yaml."""

from __future__ import annotations

import argparse
import functools
from pathlib import Path

from slurmtrain import __version__
from slurmtrain.cli.arguments import PROGRAM
from slurmtrain.cli.columns import one_line
from slurmtrain.cli.json_output import emit, fields_of
from slurmtrain.config.compose import Composer
from slurmtrain.config.folders import OWN_CLUSTERS, search_folders, shipped
from slurmtrain.config.rules import validate
from slurmtrain.config.schema import Config
from slurmtrain.control.submitting import client_of
from slurmtrain.errors import EXIT_CONFIG, ClusterError, ConfigError, UsageError
from slurmtrain.launch.cluster_file import describe
from slurmtrain.launch.submit import slurm_conf_of
from slurmtrain.launch.submit_once import RefusedError
from slurmtrain.slurm.client import CONFIG_MISSING, INSTALL_HINT, SlurmClient
from slurmtrain.slurm.facts import ClusterFacts
from slurmtrain.slurm.read_facts import read_facts
from slurmtrain.system.files import write_where_named

ANSWERS_S = 15  # for each of SLURM's answers: a busy controller is slow, and a file without its facts is of no use


def _facts(slurm_conf: str | None) -> ClusterFacts:
    """Return the facts of a cluster.

    Raises:
        ClusterError: SLURM is not there, or does not answer.
    """
    client = SlurmClient(slurm_conf)
    if not client.available:
        raise ClusterError("there is no `scontrol` on this machine", hint=INSTALL_HINT)
    facts = read_facts(functools.partial(client.glance, within_s=ANSWERS_S))
    if not facts.config:
        said = client.complaint(["scontrol", "show", "config"]) or f"no answer within {ANSWERS_S} s"
        hint = INSTALL_HINT if CONFIG_MISSING in said else "`scontrol ping` says more"
        raise ClusterError(f"`scontrol show config` failed: {said}", hint=hint)
    return facts


def main(options: argparse.Namespace) -> int:
    """Write or print the file, and return the exit code: 78 if SLURM would refuse a job of it."""
    if options.json and options.out == "-":
        raise UsageError("--out - and --json both print on standard output", hint="give --out a file")
    slurm_conf = slurm_conf_of(Config())
    facts = _facts(slurm_conf)
    described = describe(
        facts,
        partition=options.partition,
        name=Path(options.out).stem if options.out not in (None, "-") else None,
        account=options.account,
        qos=options.qos,
        slurm_conf=slurm_conf,
        taken=[path.stem for path in (shipped("conf") / "cluster").glob("*.yaml")],
        version=__version__,
    )
    if options.out == "-":
        print(described.text(), end="")
        return 0
    path = Path(options.out) if options.out else Path(OWN_CLUSTERS) / f"{described.name}.yaml"
    if path.is_dir() or (path.exists() and not options.force):
        raise UsageError(
            f"{path} already exists",
            hint=f"probe --out - | diff - {path} compares it with the cluster; --force replaces it",
        )
    folder = _folder_of(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_where_named(path, described.text().encode())
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}", hint="--out FILE; --out - prints it") from None
    refused, version = _refused(_composed(path)), facts.config.get("SLURM_VERSION")
    partitions = ", ".join(f"{each.name}{' (default)' if each.default else ''}" for each in facts.partitions)
    chosen = f"+cluster={path.stem}"
    if folder not in search_folders():
        chosen = f"--config-dir {folder} {chosen}"
    lines = [
        f"cluster {facts.name}, SLURM {version}, with the partitions {partitions}",
        f"wrote {path} for partition {described.partition}",
        f"SLURM would {'accept a job of it' if refused is None else f'not accept a job of it: {refused}'}",
        *(["not known; please answer in the file:"] if described.questions else []),
        *(f"  - {question}" for question in described.questions),
        f"  {PROGRAM} {chosen} submit --dry-run",
    ]
    about = {
        "file": path,
        "cluster": facts.name,
        "slurm": version,
        **fields_of(described, "partition values questions"),
    }
    emit(about | {"refused": refused}, "\n".join(map(one_line, lines)), as_json=options.json)
    return EXIT_CONFIG if refused is not None else 0


def _folder_of(path: Path) -> Path:
    """Return the folder of configs that a cluster's file lies in.

    Raises:
        UsageError: no +cluster=NAME could mean it.
    """
    folder = path.resolve().parent
    if folder.name != "cluster" or path.suffix != ".yaml":
        raise UsageError(
            f"{path}: +cluster=NAME finds files called NAME.yaml in a folder called cluster",
            hint=f"{OWN_CLUSTERS}/{path.stem}.yaml",
        )
    return folder.parent


def _composed(path: Path) -> Config:
    """Return the config that a cluster's file makes with those that its defaults list names, as +cluster=NAME would.

    Raises:
        UsageError, ConfigError: it cannot be read or composed.
    """
    folders = [_folder_of(path), *search_folders()]  # its own first: a shipped one may have its name
    return Composer(folders).compose([f"cluster={path.stem}"])


def _refused(config: Config) -> str | None:
    """Return why `submit` would not submit a job of this config; None if it would."""
    try:
        validate(config)
        client_of(config)
    except (ConfigError, RefusedError) as error:
        return str(error)
    return None
