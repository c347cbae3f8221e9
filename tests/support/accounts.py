"""A sandbox with slurmdbd: an account, its user, and QOS that preempt each other in place of partitions."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import msgspec
import pytest

from slurmtrain.sandbox import SandboxSpec, control
from slurmtrain.sandbox.directory import PLAN, Daemon, Plan
from slurmtrain.sandbox.files import write_files
from slurmtrain.sandbox.spec import CLUSTER_NAME
from slurmtrain.system.trust import own_user

ACCOUNT = "sandbox"  # the account of whoever starts the sandbox, and the default one
LOW, HIGH = "low", "high"  # QOS: the default one, and the one that preempts it
PROGRAMS = ("slurmdbd", "sacctmgr", "sacct", "mariadbd", "mariadb-install-db", "my_print_defaults")
SBIN = "/usr/sbin:/usr/bin:/sbin:/usr/local/sbin"
# Whoever talks to slurmdbd finds munge by AccountingStoragePass, and not by AuthInfo (slurm.conf(5)).
CONF = """
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={port}
AccountingStoragePass={d}/munge.sock
AccountingStorageEnforce=associations,limits,qos
AccountingStorageTRES=gres/gpu
JobAcctGatherType=jobacct_gather/none
"""
DBD = """AuthType=auth/munge
AuthInfo=socket={d}/munge.sock
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={port}
SlurmUser={user}
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm
LogFile={d}/log/slurmdbd.log
PidFile={d}/state/slurmdbd.pid
"""


def add_accounts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sandboxes have slurmdbd from now on. Its port is the first after those of the nodes."""

    def write(spec: SandboxSpec, directory: Path, first_port: int, *rest: object) -> None:
        write_files(spec, directory, first_port, *rest)  # type: ignore[arg-type]
        d, port, user = str(directory), first_port + 1 + spec.nodes, own_user()
        conf = directory / "slurm.conf"
        text = conf.read_text().replace("preempt/partition_prio", "preempt/qos") + CONF.format(d=d, port=port)
        conf.write_text(re.sub(r" PriorityTier=\S+ PreemptMode=\S+( GraceTime=\S+)?", "", text))
        (directory / "slurmdbd.conf").touch(0o600)  # slurmdbd refuses any other mode
        (directory / "slurmdbd.conf").write_text(DBD.format(d=d, port=port, user=user))
        plan = msgspec.json.decode((directory / PLAN).read_bytes(), type=Plan)
        munged, slurmctld, *nodes = plan.daemons
        found = {name: str(shutil.which(name, path=f"{plan.env['PATH']}:{SBIN}")) for name in PROGRAMS}
        as_root = " --user=root" if user == "root" else ""
        # Without a password: its socket lies in a directory that nobody else may enter, and it listens on no network.
        make = f"{found['mariadb-install-db']} --no-defaults --datadir={d}/db --skip-test-db{as_root}"
        make += " --auth-root-authentication-method=normal"
        serve = f"{found['mariadbd']} --no-defaults --datadir={d}/db --socket={d}/db.sock --skip-networking{as_root}"
        serve += f" --pid-file={d}/state/mariadbd.pid --innodb-flush-log-at-trx-commit=0 --innodb-lock-wait-timeout=900"
        words = [
            f"add cluster {CLUSTER_NAME}",
            f"add qos {LOW} PreemptMode={spec.preempt_mode} GraceTime={spec.grace_s}",
            f"add qos {HIGH} Preempt={LOW} Priority=100",
            f"add account {ACCOUNT}",
            f"add user {user} Account={ACCOUNT} QOS=normal,{LOW},{HIGH} DefaultQOS={LOW}",
            *([f"modify user root set DefaultAccount={ACCOUNT}"] if user == "root" else []),
        ]
        accounts = " && ".join(f"{found['sacctmgr']} --immediate {each}" for each in words)
        start = f"{accounts} && exec {shlex.join(slurmctld.argv)}"
        plan.daemons[:] = [
            munged,
            Daemon("mariadbd", ["sh", "-c", f"{make} && exec {serve}"], f"{d}/db.sock"),
            Daemon("slurmdbd", ["env", f"MYSQL_UNIX_PORT={d}/db.sock", found["slurmdbd"], "-D"], port),
            Daemon("slurmctld", ["sh", "-c", start], slurmctld.ready),
            *nodes,
        ]
        (directory / PLAN).write_bytes(msgspec.json.encode(plan))

    monkeypatch.setattr(control, "write_files", write)
