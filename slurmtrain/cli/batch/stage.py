"""stage: for the batch script. Copy what cluster.stage names to the nodes of the job: --pack once, then --copy on each node.

--pack prints the path of the environment's tar. A node on which --copy fails says so, and its ranks use the shared folders.
"""

from __future__ import annotations

import logging
import socket
import tarfile
from pathlib import Path

from slurmtrain.cli.arguments import Parser
from slurmtrain.config.frozen import load_frozen
from slurmtrain.errors import SlurmtrainError
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runtime.staging import archive_of, stage_node
from slurmtrain.slurm.environment import own_node_name

log = logging.getLogger(__name__)


def main(verb: str, words: list[str]) -> int:
    """Run the verb and return its exit code."""
    parser = Parser(prog=f"python -m slurmtrain {verb}", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--python", default="python", help="what starts the ranks' interpreter")
    parser.add_argument("--pack", action="store_true", help="pack the environment, unless there is a tar of it")
    parser.add_argument("--copy", type=Path, metavar="FOLDER", help="make the copies of this node below this folder")
    parser.add_argument("--archive", metavar="FILE", help="with --copy: what --pack has printed")
    parser.add_argument("--live", default="", metavar="JOBS", help="with --copy: this user's jobs in the queue")
    options = parser.parse_args(words)
    run_dir, node = RunDir(options.run_dir), own_node_name() or socket.gethostname()
    try:
        if options.pack:
            print(archive_of(options.python, run_dir.environments))
            return 0
        config = load_frozen(run_dir.config_file, with_secrets=False)
        archive = Path(options.archive) if options.archive else None
        live = options.live.split()
        stage_node(run_dir, config, options.copy / node, python=options.python, archive=archive, live=live)
    except (SlurmtrainError, OSError, tarfile.TarError) as error:
        what = f"{node} uses" if not options.pack else "all nodes use"
        log.warning("%s the shared folders instead of copies (cluster.stage): %s", what, _words(error))
        return 1
    return 0


def _words(error: Exception) -> str:
    if isinstance(error, SlurmtrainError):
        return error.message
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__
