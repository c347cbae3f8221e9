"""probe: what this cluster is, as a commented conf/cluster/NAME.yaml; or whether such a file still suits it."""

from __future__ import annotations

import argparse
import functools
import os
import re
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from slurmtrain import __version__, sandbox
from slurmtrain.choices import Backend
from slurmtrain.cli.arguments import PROGRAM, Parser
from slurmtrain.cli.columns import one_line, print_table
from slurmtrain.cli.json_output import print_json
from slurmtrain.config.compose import compose, compose_from, from_program
from slurmtrain.config.folders import OWN_CLUSTERS, Primary, config_groups, search_folders
from slurmtrain.config.frozen import to_values
from slurmtrain.config.schema import ClusterConfig, Config
from slurmtrain.config.validate import validate
from slurmtrain.errors import EXIT_CONFIG, ClusterError, ConfigError, UsageError
from slurmtrain.launch.cluster_file.content import ClusterFile
from slurmtrain.launch.cluster_file.describe import describe
from slurmtrain.launch.cluster_file.words import group_words
from slurmtrain.launch.login_node import LoginNode, look_at_login_node
from slurmtrain.launch.queue_check.finding import Finding
from slurmtrain.launch.queue_check.request import check_request
from slurmtrain.launch.submit import dry_run, slurm_conf_of
from slurmtrain.launch.submit_once import RefusedError
from slurmtrain.launch.submit_once import check as ask_slurm
from slurmtrain.resources import shipped
from slurmtrain.runs.lookup import runs_root
from slurmtrain.slurm.client import CONFIG_MISSING, INSTALL_HINT, SlurmClient, run_command
from slurmtrain.slurm.facts import ClusterFacts
from slurmtrain.slurm.preemption import preemption_of
from slurmtrain.slurm.read_facts import read_facts
from slurmtrain.system.file_systems import WRITTEN_MB
from slurmtrain.system.files import write_where_named
from slurmtrain.system.paths import absolute, current_folder
from slurmtrain.system.user import own_groups

ANSWERS_S = 15  # for each of SLURM's answers: a busy controller is slow, and a file without its facts is of no use
ACCEPTS_S = 15.0  # for SLURM's word on a job of the file
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")  # what +cluster=NAME can have
HEADER = ("partition", "time limit", "preempted", "nodes")


def main(verb: str, words: list[str]) -> int:
    """Run the verb and return its exit code."""
    options = _parser(verb).parse_args(words)
    if options.check is not None:
        return _check(options)
    return _write(options)


def _parser(verb: str) -> Parser:
    parser = Parser.of(verb)
    parser.add_argument(
        "--partition", metavar="NAME", help="the partition to describe (default: the cluster's default)"
    )
    parser.add_argument("--account", metavar="NAME", help="the account of the jobs (default: your default account)")
    parser.add_argument("--qos", metavar="NAME", help="the QOS of the jobs (default: your default QOS)")
    parser.add_argument(
        "--name", metavar="NAME", help="name of the file without .yaml (default: SLURM's name of the cluster)"
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help=f"the file to write (default: {OWN_CLUSTERS}/NAME.yaml here); - for standard output",
    )
    parser.add_argument("--force", action="store_true", help="replace an existing file")
    parser.add_argument(
        "--check", metavar="FILE", help="instead, compare this file, or the cluster file of this name, with the cluster"
    )
    parser.add_argument("--slurm-conf", metavar="FILE", help="a slurm.conf to use instead of the machine's own")
    parser.add_argument(
        "--no-speed", action="store_true", help=f"do not write {WRITTEN_MB} MB to see how fast the file system is"
    )
    parser.add_argument("--json", action="store_true", help="print the answer as JSON, for a program")
    return parser


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
        said = client.complaint(["scontrol", "show", "config"])
        if said is not None:
            hint = INSTALL_HINT if CONFIG_MISSING in said else "`scontrol ping` says more"
            raise ClusterError(f"`scontrol show config` failed: {said}", hint=hint)
        raise ClusterError(
            f"SLURM's controller did not answer `scontrol show config` within {ANSWERS_S} s",
            hint="`scontrol ping` says more",
        )
    return facts


def _named_conf(options: argparse.Namespace) -> str | None:
    """Return the slurm.conf that a file has to name: the option's, or that of a sandbox that this shell means."""
    if options.slurm_conf is not None:
        path = absolute(options.slurm_conf)
        if not path.is_file():
            raise UsageError(f"--slurm-conf {path} is not a file", hint="leave it out for the machine's own SLURM")
        return str(path)
    in_shell = os.environ.get("SLURM_CONF")
    return in_shell if in_shell and sandbox.find(Path(in_shell).parent) is not None else None


def _write(options: argparse.Namespace) -> int:
    if options.json and options.out == "-":
        raise UsageError("--out - and --json both print on standard output", hint="give --out a file")
    if options.name is not None and not NAME.fullmatch(options.name):
        raise UsageError(f"--name {options.name}: letters, digits and . _ - are allowed", hint="--name mine")
    began = time.monotonic()
    slurm_conf = _named_conf(options)
    with ThreadPoolExecutor(max_workers=1) as pool:
        looking = pool.submit(look_at_login_node, absolute(runs_root()), measure=not options.no_speed)
        facts = _facts(slurm_conf)
        login = looking.result()
    described = describe(
        facts,
        login,
        partition=options.partition,
        name=options.name,
        account=options.account,
        qos=options.qos,
        slurm_conf=slurm_conf,
        taken=[path.stem for path in (shipped("conf") / "cluster").glob("*.yaml")],
        version=__version__,
    )
    took_s = time.monotonic() - began
    text = described.text()
    if options.out == "-":
        print(text, end="")
        return 0
    path = Path(options.out) if options.out else Path(OWN_CLUSTERS) / f"{described.name}.yaml"
    if path.is_dir() or (path.exists() and not options.force):
        raise UsageError(
            f"{path} already exists",
            hint=f"probe --check {path} compares it with the cluster; --force replaces it; --out - prints",
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_where_named(path, text.encode())
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}", hint="--out FILE; --out - prints it") from None
    refused = _refused(described, path, slurm_conf)
    if options.json:
        print_json(_object(facts, described, path, refused, took_s))
    else:
        _print(facts, described, path, refused, took_s)
    return 0 if refused is None else EXIT_CONFIG


def _print(facts: ClusterFacts, described: ClusterFile, path: Path, refused: str | None, took_s: float) -> None:
    print(
        f"cluster {one_line(facts.name)}, SLURM {one_line(facts.config['SLURM_VERSION'])}; looked at in {took_s:.1f} s"
    )
    print_table(HEADER, [_row(facts, each.name, each.default) for each in facts.partitions])
    print(f"wrote {path} for partition {one_line(described.partition)}")
    if refused is None:
        print("SLURM would accept a job of it")
    else:
        print(f"SLURM would not accept a job of it: {one_line(refused)}")
    if described.questions:
        print("not known; please answer in the file:")
    for question in described.questions:
        print(f"  - {one_line(question)}")
    own = path.resolve().parent.parent
    found = path.suffix == ".yaml" and path.parent.name == "cluster" and own in search_folders("config", None, None)
    chosen = f"+cluster={path.stem}" if found else f"--config-dir {own} +cluster={path.stem}"
    print(f"  {PROGRAM} {chosen} submit --dry-run\n  {PROGRAM} probe --check {path}")


def _row(facts: ClusterFacts, name: str, default: bool) -> list[str]:
    partition = facts.partition(name)
    assert partition is not None
    found = preemption_of(facts, partition)
    preempted = found.mode.lower() or "?"
    if found.mode not in ("", "OFF") and found.grace_s is not None:
        preempted += f" after {found.grace_s:.0f} s"
    limit = "none" if partition.max_time_min is None else f"{partition.max_time_min} min"
    nodes = "; ".join(map(group_words, facts.nodes_of(name)))
    return [name + (" (default)" if default else ""), limit, preempted, nodes]


def _refused(described: ClusterFile, path: Path, slurm_conf: str | None) -> str | None:
    """Return why SLURM would not accept a job of this file; None if it would, or cannot be asked."""
    try:
        config = _config_of(described.values)
        validate(config)
        script = dry_run(config, current_folder())
    except ConfigError as error:
        return str(error)
    with tempfile.TemporaryDirectory(prefix="slurmtrain-probe-") as folder:
        file = Path(folder) / "job.sbatch"
        # What it has to do with this machine's folders is not SLURM's concern now.
        kept = [line for line in script.splitlines() if not line.startswith(("#SBATCH --output=", "#SBATCH --chdir="))]
        file.write_text("\n".join(kept) + "\n")
        try:
            ask_slurm(file, SlurmClient(slurm_conf, run=functools.partial(run_command, timeout_s=ACCEPTS_S)))
        except RefusedError as error:
            return str(error)
    return None


def _config_of(values: dict[str, Any]) -> Config:
    """Return the config that the fields of a cluster's file make with all defaults beside them."""
    from omegaconf import OmegaConf

    return from_program(OmegaConf.create({**to_values(compose([])), "cluster": values}))


def _composed(path: Path, text: str) -> Config:
    """Return the config that a cluster's file makes with those that its defaults list names, as +cluster=NAME would.

    Raises:
        UsageError, ConfigError: it cannot be composed.
    """
    folders = search_folders("config", None, None)
    beside = path.resolve().parent.parent
    if path.resolve().parent.name == "cluster" and beside not in folders:
        folders.append(beside)
    with tempfile.TemporaryDirectory(prefix="slurmtrain-probe-") as folder:
        # Under a name that no other file has: a shipped cluster of the same name would be taken instead.
        copy = Path(folder) / "cluster" / f"{path.stem}-checked.yaml"
        copy.parent.mkdir()
        copy.write_text(text)
        return compose_from(Primary("config", [*folders, Path(folder)]), [f"cluster={copy.stem}"])


def _object(
    facts: ClusterFacts, described: ClusterFile, path: Path, refused: str | None, took_s: float
) -> dict[str, Any]:
    """Return what `probe --json` prints.

    file, cluster, partition, slurm  the file; SLURM's names of the cluster and of the partition; SLURM's version
    values     the fields that the file sets
    questions  what is not known, as sentences; each begins with the field
    refused    why SLURM would not accept a job of the file; null: it would, or cannot be asked
    seconds    how long it took to look
    """
    return {
        "file": str(path),
        "cluster": facts.name,
        "partition": described.partition,
        "slurm": facts.config.get("SLURM_VERSION"),
        "values": described.values,
        "questions": list(described.questions),
        "refused": refused,
        "seconds": round(took_s, 3),
    }


def _check(options: argparse.Namespace) -> int:
    path = _file_named(options.check)
    try:
        text = path.read_text(errors="replace")
        values = yaml.safe_load(text)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} has no fields", hint=f"see {OWN_CLUSTERS}/*.yaml of the package for examples")
    config = _composed(path, text) if "defaults" in values else _config_of(values)
    cluster = config.cluster
    if cluster.backend != Backend.SLURM:
        raise UsageError(f"{path} is not a SLURM cluster (backend: {cluster.backend})", hint="name another file")
    facts = _facts(slurm_conf_of(config))
    findings, now = _compare(facts, cluster, path)
    fields = [name for name in now if getattr(cluster, name) != now[name]]
    if options.json:
        print_json(
            {
                "file": str(path),
                "findings": [
                    {"fatal": each.fatal, "field": each.field, "message": each.message, "hint": each.hint}
                    for each in findings
                ],
                "changed": {name: {"file": getattr(cluster, name), "probe": now[name]} for name in fields},
            }
        )
    elif not findings and not fields:
        print(f"{path} fits cluster {one_line(facts.name)}")
    else:
        for each in sorted(findings, key=lambda each: not each.fatal):
            hint = f"; {each.hint}" if each.hint else ""
            print(f"{'cannot run' if each.fatal else 'doubt'}: {one_line(each.message)}{one_line(hint)}")
        if fields:
            print(f"--- {path}\n+++ what probe would write today")
        for name in fields:
            print(f"-{name}: {one_line(str(getattr(cluster, name)))}\n+{name}: {one_line(str(now[name]))}")
    if any(each.fatal for each in findings):
        return EXIT_CONFIG
    return 1 if findings or fields else 0


def _compare(facts: ClusterFacts, cluster: ClusterConfig, path: Path) -> tuple[list[Finding], dict[str, object]]:
    """Return what a job of a file would meet on the cluster, and the values that `probe` would write today."""
    name = cluster.partition.partition(",")[0] if cluster.partition else None
    try:
        fresh = describe(facts, LoginNode(), partition=name, account=cluster.account, qos=cluster.qos, name=path.stem)
    except ConfigError as error:
        return [Finding("cluster.partition", error.message, error.hint or "", fatal=True)], {}
    return check_request(facts, cluster, groups=own_groups(), user_id=os.getuid()), fresh.values


def _file_named(word: str) -> Path:
    """Return a file by its path, or by the name that +cluster=NAME would find.

    Raises:
        UsageError: there is none.
    """
    path = Path(word)
    if path.is_file():
        return path
    folders = search_folders("config", None, None)
    for folder in folders:
        found = folder / "cluster" / f"{word}.yaml"
        if "/" not in word and found.is_file():
            return found
    known = ", ".join(config_groups(folders)["cluster"])
    raise UsageError(f"--check {word}: there is no such file, and no such cluster", hint=f"known are: {known}")
