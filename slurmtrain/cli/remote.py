"""--host: the same verbs from another machine, over ssh: the code is sent, and the verb runs on the login node.

ssh is the person's own, with its own configuration, keys and agents: nothing here asks for a password or keeps one. Where
verbs that compose a config are typed, the work tree is sent first, over the same connection.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from slurmtrain.cli.arguments import find_verb, split_program
from slurmtrain.cli.verbs import VERBS
from slurmtrain.config.schema import JobConfig
from slurmtrain.errors import ClusterError, UsageError
from slurmtrain.launch.snapshot import files_to_send
from slurmtrain.system.paths import current_folder

ADDRESS = re.compile(r"[\w.%+-]+(@[\w.%+-]+)?")
SSH_FAILED = 255  # `man ssh`, EXIT STATUS
ONLY_HERE = ("train", "render", "sandbox")  # what they start or write would be looked for on this machine
OPTIONS = ("--host", "--host-python")
MAKE_THE_FOLDER = ("probe",)  # what one types before the first submit

# Run by a login shell in the home directory, which knows what the person has set up there. $1: the folder, $2: Python, then
# our words. Both may begin with ~/, which the shell of this machine leaves as it is within a word, or be relative to that.
_BEGIN = r"""
fail() { echo "slurmtrain: error: $1" >&2; echo "  hint: $2" >&2; exit "$3"; }
cd 2>/dev/null || case $1 in
  /*) cd / ;;
  *) fail "there is no home directory ${HOME:-} on $(hostname)" "ask for one, or name a folder: --host $5:/path/to/it" 1 ;;
esac
case $1 in "~") set -- "$HOME" "${@:2}" ;; "~/"*) set -- "$HOME/${1#\~/}" "${@:2}" ;; esac
python=$2
case $python in "~/"*) python=$HOME/${python#\~/} ;; /*) ;; */*) python=$HOME/$python ;; esac
[ "$python" != python ] || command -v python >/dev/null || python=python3
if ! command -v "$python" >/dev/null; then what="there is no Python $python on $(hostname)"
elif ! "$python" -c 'import slurmtrain' 2>/dev/null; then what="$python on $(hostname) has no slurmtrain"; fi
[ -z "${what:-}" ] || fail "$what" "ssh $5, make an environment (python3 -m venv ~/venv) and install slurmtrain into it as \
here; then --host-python venv/bin/python names it" 78
case $python in */*) export PATH=${python%/*}:$PATH ;; esac  # as an activated environment: `submit -- python ...` means it
"""
_VERB = """
if [ -n "$6" ]; then mkdir -p -- "$1"; fi
cd -- "$1" 2>/dev/null || fail "there is no folder $1 in $PWD on $(hostname)" "submit makes it; --host $5:FOLDER \
names another" 2
export SLURMTRAIN_RUNS="$PWD/runs"
"""
# $3: where the code goes, below the folder; $4: the folder of the command, below that. The code comes in on standard input.
_CODE = """
mkdir -p -- "$1" && cd -- "$1" && export SLURMTRAIN_RUNS="$PWD/runs" && mkdir -p "$3" && cd "$3" && tar -xzf - || \
  fail "the code could not be unpacked into $1/$3 on $(hostname)" "is its disk full, or your quota?" 1
exec </dev/null
if command -v git >/dev/null; then git init -q . && git add --all --force; fi
cd -- "$4" || exit 1
"""
_RUN = """
shift 6
exec "$python" -m slurmtrain "$@"
"""


@dataclass(frozen=True)
class Host:
    """The login node, the folder there in which runs are made, and its Python: a relative path is below the home directory."""

    address: str
    folder: str
    python: str = "python"


def wanted(words: Sequence[str]) -> bool:
    """Return whether a command line is for another machine."""
    own, _ = split_program(words)
    return any(word.partition("=")[0] in OPTIONS for word in own)


def main(words: Sequence[str]) -> int:
    """Run a command line on the machine that its --host names, and return the exit code there."""
    host, words = split_host(words, default_folder=f"slurmtrain-work/{_top_folder().name}")
    verb = find_verb(words)
    if verb is None and "--help" not in words:
        raise UsageError("--host needs a verb", hint="--host user@login status")
    if verb in ONLY_HERE:
        raise UsageError(f"--host does not work with {verb}, which runs on this machine", hint=f"ssh {host.address}")
    if verb == "probe" and not {word.partition("=")[0] for word in words} & {"--out", "--check", "--help", "-h"}:
        raise UsageError(
            f"probe would write its file on {host.address}, and submit sends the cluster files of this machine",
            hint=f"--host {host.address} probe --out - > conf/cluster/NAME.yaml writes it here",
        )
    if shutil.which("ssh") is None:
        raise ClusterError("there is no `ssh` on this machine", hint="install OpenSSH's client")
    sends = verb is not None and VERBS[verb].composes
    code = _send_and_run(host, words) if sends else _run(host, words)
    if code == SSH_FAILED:
        raise ClusterError(
            f"ssh to {host.address} failed"
            + (", so it is not known whether the command was executed" if verb == "submit" else ""),
            hint=f"`ssh {host.address} true` must work; then --host {host.address} status shows what is there",
        )
    return code


def split_host(words: Sequence[str], default_folder: str) -> tuple[Host, list[str]]:
    """Return the machine that a command line is for, and the command line without that.

    Raises:
        UsageError: an option has no value, or the machine's name is none.
    """
    own, program = split_program(words)
    given: dict[str, str] = {}
    rest: list[str] = []
    remaining = iter(own)
    for word in remaining:
        name, equals, value = word.partition("=")
        if name in OPTIONS:
            given[name] = value if equals else next(remaining, "")
            if not given[name]:
                raise UsageError(f"the option {name} needs a value", hint="--host user@login status")
        else:
            rest.append(word)
    if "--host" not in given:
        raise UsageError("--host-python needs --host", hint="--host user@login --host-python PATH status")
    address, _, folder = given["--host"].partition(":")
    if not ADDRESS.fullmatch(address) or address.startswith("-"):
        raise UsageError(
            f"--host {given['--host']!r} is not a valid host", hint="--host user@login, or a Host of ~/.ssh/config"
        )
    host = Host(address, folder or default_folder, given.get("--host-python", "python"))
    return host, [*rest, *(["--", *program] if program is not None else [])]


def remote_command(host: Host, words: Sequence[str], *, code: str | None = None, below: str = ".") -> str:
    """Return the line for the shell of the other machine.

    Args:
        code: the folder for the code that comes in on standard input, below `host.folder`; None: no code is sent.
        below: the folder of the command in it.
    """
    script = _BEGIN + (_VERB if code is None else _CODE) + _RUN
    makes = "yes" if find_verb(words) in MAKE_THE_FOLDER else ""
    facts = [host.folder, host.python, code or "", below, host.address, makes]
    return shlex.join(["bash", "-lc", script, "slurmtrain", *facts, *words])


def _run(host: Host, words: Sequence[str]) -> int:
    terminal = ["-t"] if sys.stdin.isatty() and sys.stdout.isatty() else []
    done = subprocess.run(["ssh", *terminal, "--", host.address, remote_command(host, words)], check=False)
    return done.returncode


def _send_and_run(host: Host, words: Sequence[str]) -> int:
    cwd, root = current_folder(), _top_folder()
    files = files_to_send(cwd, _most_mb(words))
    code = f"sent/{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    below = PurePosixPath(cwd.resolve().relative_to(root.resolve())).as_posix()
    command = ["ssh", "--", host.address, remote_command(host, words, code=code, below=below)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as ssh:
        assert ssh.stdin is not None
        try:
            with contextlib.suppress(BrokenPipeError):  # it has left, and has said why
                write_archive(ssh.stdin, root, files)
        except BaseException:
            ssh.kill()
            raise
        finally:
            with contextlib.suppress(BrokenPipeError):  # what was still to be sent
                ssh.stdin.close()
        return ssh.wait()


def write_archive(to: IO[bytes], root: Path, files: Sequence[Path]) -> None:
    """Write files of a folder as a compressed archive of tar's, without the names of their owner."""

    def anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        return entry

    with tarfile.open(fileobj=to, mode="w|gz") as archive:
        for file in files:
            archive.add(root / file, arcname=os.fspath(file), recursive=False, filter=anonymous)


def _top_folder() -> Path:
    from slurmtrain.launch.snapshot import top_folder

    return top_folder(current_folder())


def _most_mb(words: Sequence[str]) -> int:
    typed = [word.partition("=")[2] for word in words if word.lstrip("+").startswith("job.snapshot_max_mb=")]
    return int(typed[-1]) if typed and typed[-1].isdigit() else JobConfig().snapshot_max_mb
