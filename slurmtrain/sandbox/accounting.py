"""Accounting of a sandbox: MariaDB and slurmdbd as further daemons, with an account, its user, and QOS that preempt each other.

As pure functions from the sandbox's description to files and commands; the supervisor runs them in their order.
"""

from __future__ import annotations

from slurmtrain.sandbox.directory import Daemon
from slurmtrain.sandbox.spec import CLUSTER_NAME, SandboxSpec, Site

ACCOUNT = "sandbox"  # the account of whoever starts the sandbox, and the default one
LOW, HIGH = "low", "high"  # QOS: the default one, and the one that preempts it
PROGRAMS_OF_SLURM = ("slurmdbd", "sacctmgr", "sacct")
PROGRAMS_OF_MARIADB = ("mariadbd", "mariadb-install-db", "my_print_defaults")
INSTALL = "apt-get install slurmdbd mariadb-server-core mariadb-client-core"


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
