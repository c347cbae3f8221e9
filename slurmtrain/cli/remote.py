"""--host: the same verbs from another machine, over ssh: the code is sent, and the verb runs on the login node.

ssh is the person's own, with its own configuration, keys and agents: nothing here asks for a password or keeps one. Where
verbs that compose a config are typed, the work tree is sent first, over the same connection.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from slurmtrain.cli.arguments import PROGRAM, Parser, find_verb, split_program
from slurmtrain.cli.verbs import VERBS
from slurmtrain.config.schema import JobConfig
from slurmtrain.errors import ClusterError, UsageError
from slurmtrain.launch.snapshot import files_to_send, top_folder
from slurmtrain.system.paths import current_folder

ADDRESS = re.compile(r"[\w.%+-]+(@[\w.%+-]+)?")
SSH_FAILED = 255  # `man ssh`, EXIT STATUS
ONLY_HERE = ("train", "sandbox")  # what they start or write would be looked for on this machine

# Run by a login shell, which knows what the person has set up there. $folder, $python, $address, $code and $below are set.
_BEGIN = r"""
fail() { echo "slurmtrain: error: $1" >&2; echo "  hint: $2" >&2; exit "$3"; }
[ "$python" != python ] || command -v python >/dev/null || python=python3
"$python" -c 'import slurmtrain' 2>/dev/null || fail "$python on $(hostname) cannot import slurmtrain" "ssh $address, make an \
environment (python3 -m venv ~/venv) and install slurmtrain into it as here; then --host-python venv/bin/python names it" 78
case $python in */*) export PATH=${python%/*}:$PATH ;; esac  # as an activated environment: `submit -- python ...` means it
mkdir -p -- "$folder" && cd -- "$folder" || fail "the folder $folder on $(hostname) cannot be made" "--host $address:FOLDER" 2
export SLURMTRAIN_RUNS="$PWD/runs"
"""
# The code comes in on standard input.
_UNPACK = """
mkdir -p "$code" && cd "$code" && tar -xzf - --no-same-owner || \\
  fail "the code could not be unpacked into $folder/$code on $(hostname)" "is its disk full, or your quota?" 1
exec </dev/null
if command -v git >/dev/null; then git init -q . && git add --all --force; fi
cd -- "$below" || exit 1
"""


def main(words: Sequence[str]) -> int:
    """Run a command line on the machine that its --host names, and return the exit code there."""
    given, words = split_host(words)
    address, _, folder = (given.host or "").partition(":")
    if not ADDRESS.fullmatch(address) or address.startswith("-"):
        raise UsageError(
            f"--host {given.host!r} is not a valid host", hint="--host user@login, or a Host of ~/.ssh/config"
        )
    verb = find_verb(words)
    if verb is None and "--help" not in words:
        raise UsageError("--host needs a verb", hint="--host user@login status")
    if verb in ONLY_HERE:
        raise UsageError(f"--host does not work with {verb}, which runs on this machine", hint=f"ssh {address}")
    if verb == "probe" and not {word.partition("=")[0] for word in words} & {"--out", "--check", "--help", "-h"}:
        raise UsageError(
            f"probe would write its file on {address}, and submit sends the cluster files of this machine",
            hint=f"--host {address} probe --out - > conf/cluster/NAME.yaml writes it here",
        )
    if shutil.which("ssh") is None:
        raise ClusterError("there is no `ssh` on this machine", hint="install OpenSSH's client")
    here = current_folder()
    root = top_folder(here)
    sends = verb is not None and VERBS[verb].composes
    facts = {
        "address": shlex.quote(address),
        "folder": _from_home(folder or f"slurmtrain-work/{root.name}"),
        "python": _from_home(given.host_python) if "/" in given.host_python else shlex.quote(given.host_python),
        "code": f"sent/{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}",
        "below": shlex.quote(here.resolve().relative_to(root.resolve()).as_posix()),
    }
    script = "\n".join(f"{name}={value}" for name, value in facts.items()) + _BEGIN + (_UNPACK if sends else "")
    script += f'exec "$python" -m slurmtrain {shlex.join(words)}\n'
    terminal = ["-t"] if not sends and sys.stdin.isatty() and sys.stdout.isatty() else []
    command = ["ssh", *terminal, "--", address, shlex.join(["bash", "-lc", script])]
    code = _send(command, here, root, words) if sends else subprocess.run(command, check=False).returncode
    if code == SSH_FAILED:
        raise ClusterError(
            f"ssh to {address} failed"
            + (", so it is not known whether the command was executed" if verb == "submit" else ""),
            hint=f"`ssh {address} true` must work; then --host {address} status shows what is there",
        )
    return code


def split_host(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return `host` and `host_python`, and the command line without them."""
    own, program = split_program(words)
    parser = Parser(prog=PROGRAM, add_help=False, allow_abbrev=False)
    parser.add_argument("--host")
    parser.add_argument("--host-python", default="python")
    given, rest = parser.parse_known_args(own)
    return given, rest if program is None else [*rest, "--", *program]


def _from_home(path: str) -> str:
    """Return a path as a word of the shell there, which knows the home directory that a relative path is below."""
    return shlex.quote(path) if path.startswith("/") else f"~/{shlex.quote(path.removeprefix('~').lstrip('/') or '.')}"


def _send(command: Sequence[str], here: Path, root: Path, words: Sequence[str]) -> int:
    """Run a command with the work tree as a tar file on its standard input, and return its exit code."""
    typed = [word.partition("=")[2] for word in words if word.lstrip("+").startswith("job.snapshot_max_mb=")]
    most_mb = int(typed[-1]) if typed and typed[-1].isdigit() else JobConfig().snapshot_max_mb
    names = b"".join(os.fsencode(name) + b"\0" for name in files_to_send(here, most_mb))
    pack = ["tar", "--create", "--gzip", "--no-recursion", f"--directory={root}", "--null", "--files-from=-"]
    with (
        subprocess.Popen(pack, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as tar,
        subprocess.Popen(command, stdin=tar.stdout) as ssh,
    ):
        assert tar.stdout is not None
        tar.stdout.close()  # ssh alone reads it, so that tar ends with ssh
        tar.communicate(names)
    return ssh.returncode
