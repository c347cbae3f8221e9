"""probe: what this cluster is, as a commented conf/cluster/NAME.yaml; or whether such a file still suits it."""

from __future__ import annotations

import argparse
import functools
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from slurmtrain import __version__, sandbox
from slurmtrain.choices import Backend
from slurmtrain.cli.arguments import PROGRAM
from slurmtrain.cli.columns import one_line
from slurmtrain.cli.json_output import print_json
from slurmtrain.config.folders import OWN_CLUSTERS, Primary, config_groups, search_folders, shipped
from slurmtrain.config.schema import Config
from slurmtrain.config.validate import validate
from slurmtrain.errors import EXIT_CONFIG, ClusterError, ConfigError, UsageError
from slurmtrain.launch.cluster_file import ClusterFile, LoginNode, describe, look_at_login_node
from slurmtrain.launch.queue_check import Finding, check_request
from slurmtrain.launch.submit import dry_run, slurm_conf_of
from slurmtrain.launch.submit_once import RefusedError
from slurmtrain.launch.submit_once import check as ask_slurm
from slurmtrain.slurm.client import CONFIG_MISSING, INSTALL_HINT, SlurmClient, run_command
from slurmtrain.slurm.facts import ClusterFacts
from slurmtrain.slurm.read_facts import read_facts
from slurmtrain.system.files import write_where_named
from slurmtrain.system.paths import absolute, current_folder, runs_root

ANSWERS_S = 15  # for each of SLURM's answers: a busy controller is slow, and a file without its facts is of no use


def main(options: argparse.Namespace) -> int:
    """Run the verb and return its exit code."""
    return _write(options) if options.check is None else _check(options)


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


def _write(options: argparse.Namespace) -> int:
    if options.json and options.out == "-":
        raise UsageError("--out - and --json both print on standard output", hint="give --out a file")
    began, in_shell = time.monotonic(), os.environ.get("SLURM_CONF")
    # Jobs of a sandbox need its slurm.conf; any other that the shell names is that of the machine.
    slurm_conf = in_shell if in_shell and sandbox.find(Path(in_shell).parent) is not None else None
    with ThreadPoolExecutor(max_workers=1) as pool:
        looking = pool.submit(look_at_login_node, absolute(runs_root()))
        facts = _facts(slurm_conf)
        login = looking.result()
    described = describe(
        facts,
        login,
        partition=options.partition,
        name=Path(options.out).stem if options.out not in (None, "-") else None,
        account=options.account,
        qos=options.qos,
        slurm_conf=slurm_conf,
        taken=[path.stem for path in (shipped("conf") / "cluster").glob("*.yaml")],
        version=__version__,
    )
    took_s, text = time.monotonic() - began, described.text()
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
    refused = _refused(path, slurm_conf)
    if options.json:
        print_json(
            {
                "file": str(path),
                "cluster": facts.name,
                "partition": described.partition,
                "slurm": facts.config.get("SLURM_VERSION"),
                "values": described.values,
                "questions": described.questions,
                "refused": refused,
                "seconds": round(took_s, 3),
            }
        )
    else:
        _print(facts, described, path, refused)
    return 0 if refused is None else EXIT_CONFIG


def _print(facts: ClusterFacts, described: ClusterFile, path: Path, refused: str | None) -> None:
    names = ", ".join(f"{each.name}{' (default)' if each.default else ''}" for each in facts.partitions)
    print(one_line(f"cluster {facts.name}, SLURM {facts.config['SLURM_VERSION']}, with the partitions {names}"))
    print(one_line(f"wrote {path} for partition {described.partition}"))
    accepted = "would accept a job of it" if refused is None else f"would not accept a job of it: {refused}"
    print(one_line(f"SLURM {accepted}"))
    if described.questions:
        print("not known; please answer in the file:")
    for question in described.questions:
        print(f"  - {one_line(question)}")
    own = path.resolve().parent.parent
    found = path.suffix == ".yaml" and path.parent.name == "cluster" and own in search_folders("config", None, None)
    chosen = f"+cluster={path.stem}" if found else f"--config-dir {own} +cluster={path.stem}"
    print(f"  {PROGRAM} {chosen} submit --dry-run\n  {PROGRAM} probe --check {path}")


def _refused(path: Path, slurm_conf: str | None) -> str | None:
    """Return why SLURM would not accept a job of this file; None if it would, or cannot be asked."""
    try:
        config = _composed(path)
        validate(config)
        script = dry_run(config, current_folder())
        with tempfile.NamedTemporaryFile("w", suffix=".sbatch") as file:
            # What it has to do with this machine's folders is not SLURM's concern now.
            folders = ("#SBATCH --output=", "#SBATCH --chdir=")
            file.writelines(line for line in script.splitlines(keepends=True) if not line.startswith(folders))
            file.flush()
            ask_slurm(Path(file.name), SlurmClient(slurm_conf, run=functools.partial(run_command, timeout_s=ANSWERS_S)))
    except (ConfigError, RefusedError) as error:
        return str(error)
    return None


def _composed(path: Path) -> Config:
    """Return the config that a cluster's file makes with those that its defaults list names, as +cluster=NAME would.

    Raises:
        UsageError, ConfigError: it cannot be read or composed.
    """
    from slurmtrain.config.compose import Composer

    folders, beside = search_folders("config", None, None), path.resolve().parent.parent
    if path.resolve().parent.name == "cluster" and beside not in folders:
        folders.append(beside)
    with tempfile.TemporaryDirectory(prefix="slurmtrain-probe-") as folder:
        # Under a name that no other file has: a shipped cluster of the same name would be taken instead.
        copy = Path(folder) / "cluster" / f"{path.stem}-checked.yaml"
        copy.parent.mkdir()
        try:
            copy.write_bytes(path.read_bytes())
            return Composer(Primary("config", [*folders, Path(folder)])).compose([f"cluster={copy.stem}"])
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}") from None
        except ConfigError as error:
            raise ConfigError(error.message.replace(str(copy), str(path)), hint=error.hint) from None


def _check(options: argparse.Namespace) -> int:
    """Describe the partition of a file once more, and print what is different: exit code 1, or 78 if no job can run."""
    folders = search_folders("config", None, None)
    named = [Path(options.check), *(folder / "cluster" / f"{options.check}.yaml" for folder in folders)]
    path = next((each for each in named if each.is_file()), None)
    if path is None:
        known = ", ".join(config_groups(folders)["cluster"])
        raise UsageError(
            f"--check {options.check}: there is no such file, and no such cluster", hint=f"known are: {known}"
        )
    config = _composed(path)
    cluster = config.cluster
    if cluster.backend != Backend.SLURM:
        raise UsageError(f"{path} is not a SLURM cluster (backend: {cluster.backend})", hint="name another file")
    facts = _facts(slurm_conf_of(config))
    name = cluster.partition.partition(",")[0] if cluster.partition else None
    now: dict[str, object] = {}
    try:
        now = describe(
            facts, LoginNode(), partition=name, account=cluster.account, qos=cluster.qos, name=path.stem
        ).values
        fatal = [each for each in check_request(facts, cluster) if each.fatal]
        refused = None if fatal else _refused(path, slurm_conf_of(config))
        if refused is not None:
            fatal = [Finding("cluster", f"SLURM would not accept a job of it: {refused}", "")]
    except ConfigError as error:
        fatal = [Finding("cluster.partition", error.message, error.hint or "")]
    changed = {name: (getattr(cluster, name), now[name]) for name in now if getattr(cluster, name) != now[name]}
    if options.json:
        values = {name: {"file": before, "probe": after} for name, (before, after) in changed.items()}
        print_json({"file": str(path), "cannot_run": [asdict(each) for each in fatal], "changed": values})
    elif not fatal and not changed:
        print(f"{path} fits cluster {one_line(facts.name)}")
    else:
        for each in fatal:
            print(f"cannot run: {one_line(each.message)}{one_line(f'; {each.hint}' if each.hint else '')}")
        if changed:
            print(f"--- {path}\n+++ what probe would write today")
        for name, (before, after) in changed.items():
            print(f"-{name}: {one_line(str(before))}\n+{name}: {one_line(str(after))}")
    return EXIT_CONFIG if fatal else int(bool(changed))
