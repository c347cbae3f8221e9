"""The files that a sandbox needs before its first process: SLURM's programs, the configuration, munge's key, the plan."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import socket
import stat
import subprocess
from pathlib import Path

import msgspec

from slurmtrain.errors import ClusterError
from slurmtrain.sandbox.directory import PLAN, Daemon, Plan
from slurmtrain.sandbox.spec import CLUSTER_NAME, EPILOG, GPU_DEVICES, SandboxSpec, Site, epilog, gres_conf, slurm_conf
from slurmtrain.slurm.command_environment import PREFIX_FILE, path_with
from slurmtrain.slurm.parse_values import CGROUP_PLUGIN_DISABLED, Version, parse_version
from slurmtrain.system.trust import name_of

ACCOUNT = "sandbox"  # the account of whoever starts the sandbox, and the default one
LOW, HIGH = "low", "high"  # QOS: the default one, and the one that preempts it
PROGRAMS_OF_SLURM = ("slurmdbd", "sacctmgr", "sacct")
PROGRAMS_OF_MARIADB = ("mariadbd", "mariadb-install-db", "my_print_defaults")
INSTALL = "apt-get install slurmdbd mariadb-server-core mariadb-client-core"
_CLIENTS = ("sinfo", "squeue", "scontrol", "scancel", "sbatch", "srun")


def find_programs(prefix: Path | None = None, *, accounting: bool = False) -> dict[str, str]:
    """Return the full paths of SLURM's programs. An ordinary user's PATH often lacks the directories of the daemons.

    Args:
        prefix: prefix of the SLURM to use, instead of PATH; munge and MariaDB come from PATH all the same.
        accounting: also find those of slurmdbd and of MariaDB.

    Raises:
        ClusterError: some are missing.
    """
    on_path = os.environ.get("PATH", "")
    with_daemons = f"{on_path}:/usr/sbin:/sbin:/usr/local/sbin"
    of_slurm = f"{prefix}/bin:{prefix}/sbin" if prefix is not None else None
    found = {name: shutil.which(name, path=of_slurm or on_path) for name in _CLIENTS}
    found |= {name: shutil.which(name, path=of_slurm or with_daemons) for name in ("slurmctld", "slurmd")}
    found["munged"] = shutil.which("munged", path=with_daemons)
    missing = [name for name, where in found.items() if where is None]
    if prefix is not None and missing and missing != ["munged"]:
        raise ClusterError(
            f"there is no SLURM in {prefix}: no {', '.join(missing)} in its bin or sbin.",
            hint="give the folder that SLURM was configured with as --prefix",
        )
    if missing:
        raise ClusterError(
            f"SLURM is not installed here: no {', '.join(missing)} on PATH.", hint="apt-get install slurm-wlm munge"
        )
    if accounting:
        further = {name: shutil.which(name, path=of_slurm or with_daemons) for name in PROGRAMS_OF_SLURM}
        further |= {name: shutil.which(name, path=with_daemons) for name in PROGRAMS_OF_MARIADB}
        missing = [name for name, where in further.items() if where is None]
        if missing:
            raise ClusterError(f"a sandbox with accounting needs {', '.join(missing)}.", hint=INSTALL)
        found |= further
    return {name: where for name, where in found.items() if where}


def prefix_of(programs: dict[str, str]) -> Path | None:
    """Return the prefix of a SLURM that only this shell's PATH leads to; None for one in a standard directory."""
    folder = Path(programs["srun"]).parent
    usual = str(folder) in ("/usr/bin", "/bin", "/usr/local/bin")
    return None if usual or not (folder.parent / "sbin" / "slurmctld").exists() else folder.parent


def write_files(
    spec: SandboxSpec, directory: Path, first_port: int, programs: dict[str, str], prefix: Path | None = None
) -> None:
    """Write all files that the daemons will read: configuration, munge's key, and the plan for the supervisor.

    Args:
        prefix: recorded beside slurm.conf, so that every verb asks this sandbox with the commands of that SLURM.
    """
    user = name_of(os.getuid())
    if user is None:
        raise ClusterError(f"uid {os.getuid()} has no name on this machine, and SLURM refuses such users.")
    devices = [d for d in GPU_DEVICES if os.path.exists(d) and stat.S_ISCHR(os.stat(d).st_mode)]
    if len(devices) < spec.gpus:
        raise ClusterError(f"this machine has devices to stand in for {len(devices)} GPUs per node, not {spec.gpus}.")
    version = _slurm_version(programs["slurmctld"])
    task_prolog = directory / "task-prolog" if prefix is not None else None
    site = Site(directory, user, socket.gethostname().split(".")[0], first_port, task_prolog)
    for name in ("log", "state", "spool", *(f"spool/{node}" for node in spec.node_names)):
        (directory / name).mkdir(mode=0o700)
    texts = {"slurm.conf": slurm_conf(spec, site), "gres.conf": gres_conf(spec, devices)}
    if spec.accounting:
        texts["slurm.conf"] += accounting_lines(spec, site, port_of_slurmdbd(spec, first_port))
        texts["slurmdbd.conf"] = slurmdbd_conf(site, port_of_slurmdbd(spec, first_port))
    if CGROUP_PLUGIN_DISABLED.applies_to(version):
        texts["cgroup.conf"] = "CgroupPlugin=disabled\n"  # see SLURMD_NEEDS_CGROUP
    if prefix is not None:
        texts[PREFIX_FILE] = f"{prefix}\n"
        # A job that was told to export nothing gets the PATH of a login, which has another SLURM or none.
        # One that leads there keeps its order: a front of the person's for one of the commands stays before it.
        texts["task-prolog"] = task_prolog_text(f"{prefix}/bin")
    for name, text in texts.items():
        (directory / name).touch(0o600)
        (directory / name).write_text(text)
    if task_prolog is not None:
        task_prolog.chmod(0o700)
    (directory / EPILOG).touch(0o700)
    (directory / EPILOG).write_text(epilog(site))
    key = directory / "munge.key"
    key.touch(0o600)
    key.write_bytes(secrets.token_bytes(128))
    path = path_with(os.path.dirname(programs["srun"]), os.environ["PATH"])
    (directory / PLAN).write_bytes(msgspec.json.encode(_plan(spec, site, programs, path)))


def task_prolog_text(programs: str) -> str:
    """Return the script that adds the folder of SLURM's commands to a task's PATH, where it is not on it.

    SLURM takes what is printed after "export NAME=" as it stands, without a shell's quotes.
    """
    folder = shlex.quote(programs)
    return f"""#!/bin/sh
case ":$PATH:" in *:{folder}:*) ;; *) printf 'export PATH=%s:%s\\n' {folder} "$PATH" ;; esac
"""


def port_of_slurmdbd(spec: SandboxSpec, first_port: int) -> int:
    """Return the port of slurmdbd, the first after those of slurmctld and the nodes."""
    return first_port + 1 + spec.nodes


def _plan(spec: SandboxSpec, site: Site, programs: dict[str, str], path: str) -> Plan:
    d = site.directory
    # --force: a home directory that only its owner may enter is enough for a sandbox that only its owner uses.
    munged = [programs["munged"], "--foreground", "--force", f"--socket={d}/munge.sock", f"--key-file={d}/munge.key"]
    munged += [f"--pid-file={d}/state/munged.pid", f"--seed-file={d}/state/munged.seed"]
    daemons, prepare = [Daemon("munged", munged, ready=f"{d}/munge.sock")], list[list[str]]()
    if spec.accounting:
        daemons += database_daemons(site, programs, port_of_slurmdbd(spec, site.first_port))
        prepare = accounts_commands(spec, site, programs["sacctmgr"])
    daemons.append(Daemon("slurmctld", [programs["slurmctld"], "-D"], prepare, site.first_port))
    daemons += [Daemon(node, [programs["slurmd"], "-D", "-N", node]) for node in spec.node_names]
    env = {"PATH": path, "LANG": "C.UTF-8", "SLURM_CONF": f"{d}/slurm.conf"}
    return Plan(spec.node_names, env, daemons, [[programs["scancel"], "-p", name] for name in ("low", "high")])


def _slurm_version(slurmctld: str) -> Version:
    text = subprocess.run([slurmctld, "-V"], capture_output=True, text=True, timeout=10, check=False).stdout
    version = parse_version(text)
    if version is None:
        raise ClusterError(f"`{slurmctld} -V` names no version (it says {text.strip()!r}).")
    return version


# Accounting: MariaDB and slurmdbd as further daemons, with an account, its user, and QOS that preempt each other.


def slurmdbd_conf(site: Site, port: int) -> str:
    """Return the text of slurmdbd.conf.

    Args:
        port: the port of slurmdbd.
    """
    d = site.directory
    return f"""\
AuthType=auth/munge
AuthInfo=socket={d}/munge.sock
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={port}
SlurmUser={site.user}
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm
LogFile={d}/log/slurmdbd.log
PidFile={d}/state/slurmdbd.pid
DebugLevel=info
"""


def accounting_lines(spec: SandboxSpec, site: Site, port: int) -> str:
    """Return the lines of slurm.conf by which slurmctld asks slurmdbd, and refuses what accounts and QOS do not allow.

    Whoever talks to slurmdbd finds munge by AccountingStoragePass, and not by AuthInfo (slurm.conf(5)).
    """
    return f"""\

# Accounts, and their limits.
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={port}
AccountingStoragePass={site.directory}/munge.sock
AccountingStorageEnforce=associations,limits,qos
{"AccountingStorageTRES=gres/gpu" if spec.gpus else ""}
JobAcctGatherType=jobacct_gather/none
"""


def database_daemons(site: Site, programs: dict[str, str], port: int) -> list[Daemon]:
    """Return the two daemons, in the order of their start."""
    d = site.directory
    # As root, MariaDB wants to be told that it is meant.
    as_root = ["--user=root"] if site.user == "root" else []
    # Without a password: its socket lies in a directory that nobody else may enter, and it listens on no network.
    make = [programs["mariadb-install-db"], "--no-defaults", f"--datadir={d}/db", "--skip-test-db", *as_root]
    make += ["--auth-root-authentication-method=normal"]
    serve = [programs["mariadbd"], "--no-defaults", f"--datadir={d}/db", f"--socket={d}/db.sock", *as_root]
    serve += ["--skip-networking", f"--pid-file={d}/state/mariadbd.pid"]
    # What is lost with the machine is lost with the sandbox, too: no write waits for the disk.
    serve += ["--innodb-flush-log-at-trx-commit=0", "--innodb-buffer-pool-size=64M", "--innodb-lock-wait-timeout=900"]
    # MariaDB's client takes the socket of "localhost" from this variable alone.
    slurmdbd = ["env", f"MYSQL_UNIX_PORT={d}/db.sock", programs["slurmdbd"], "-D"]
    return [Daemon("mariadbd", serve, prepare=[make], ready=f"{d}/db.sock"), Daemon("slurmdbd", slurmdbd, ready=port)]


def accounts_commands(spec: SandboxSpec, site: Site, sacctmgr: str) -> list[list[str]]:
    """Return the commands that create the cluster, the account, its user and the QOS, before slurmctld asks for them."""
    words = [
        ["add", "cluster", CLUSTER_NAME],
        ["add", "qos", LOW, f"PreemptMode={spec.preempt_mode}", f"GraceTime={spec.grace_s}"],
        ["add", "qos", HIGH, f"Preempt={LOW}", "Priority=100"],
        ["add", "account", ACCOUNT],
        ["add", "user", site.user, f"Account={ACCOUNT}", f"QOS=normal,{LOW},{HIGH}", f"DefaultQOS={LOW}"],
    ]
    if site.user == "root":  # who has an account in every cluster, which is the default one
        words.append(["modify", "user", "root", "set", f"DefaultAccount={ACCOUNT}"])
    return [[sacctmgr, "--immediate", *each] for each in words]
