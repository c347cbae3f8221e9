"""stage: for the batch script. Copy what cluster.stage names to the nodes of the job: --plan, --copy, then --judge.

--judge prints the nodes that have no sound copy, with blanks; with cluster.stage.required it then prints a sentence and exits
with 78.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from slurmtrain.cli.arguments import Parser
from slurmtrain.config.compose import load_frozen
from slurmtrain.errors import EXIT_CONFIG
from slurmtrain.runs.events import Event
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runs.stage_record import read_plan, read_reports, write_plan
from slurmtrain.runtime.staging.judge import judge
from slurmtrain.runtime.staging.node import stage_node
from slurmtrain.runtime.staging.plan import make_plan
from slurmtrain.slurm.environment import own_node_name
from slurmtrain.slurm.nodelist import expand_nodelist

log = logging.getLogger(__name__)

PACKAGE = "slurmtrain"  # begins the line of an error


def main(verb: str, words: list[str]) -> int:
    """Run the verb and return its exit code."""
    parser = Parser(prog=f"python -m slurmtrain {verb}", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--plan", action="store_true", help="decide what is copied, and pack an environment")
    parser.add_argument("--python", default="python", help="with --plan: what starts the ranks' interpreter")
    parser.add_argument(
        "--copy", type=Path, metavar="FOLDER", help="make the copies of this node, and print its report"
    )
    parser.add_argument("--jobs", metavar="IDS", help="with --copy: this user's jobs that SLURM has not ended")
    parser.add_argument("--judge", action="store_true", help="print the nodes that have no sound copy")
    options = parser.parse_args(words)
    run_dir = RunDir(options.run_dir)
    if options.copy is not None:
        return _copy(run_dir, options.attempt, options.copy, options.jobs)
    if options.plan:
        return _plan(run_dir, options.attempt, options.python)
    return _judge(run_dir, options.attempt)


def _plan(run_dir: RunDir, number: int, python: str) -> int:
    config = load_frozen(run_dir.config_file, with_secrets=False)
    nodes = expand_nodelist(os.environ["SLURM_JOB_NODELIST"])
    write_plan(run_dir.attempt(number), make_plan(run_dir, config, nodes, [python]))
    return 0


def _copy(run_dir: RunDir, number: int, folder: Path, jobs: str | None) -> int:
    plan, node = read_plan(run_dir.attempt(number)), own_node_name()
    if plan is None or node is None:
        return 1
    report = stage_node(plan, folder, node, live_jobs=jobs.split() if jobs is not None else None)
    os.write(1, report.line().encode())  # in one piece: the lines of all nodes meet in one file
    return 0


def _judge(run_dir: RunDir, number: int) -> int:
    attempt_dir = run_dir.attempt(number)
    required = load_frozen(run_dir.config_file, with_secrets=False).cluster.stage.required
    plan = read_plan(attempt_dir)
    if plan is None:
        message = f"nothing could be copied to the nodes (cluster.stage): {_last_line(attempt_dir.stage_dir / 'log')}"
        if required:
            print(message)
            return EXIT_CONFIG
        log.warning("%s; the ranks use the shared folders", message)
        return 1
    found = judge(plan, read_reports(attempt_dir))
    run_dir.event(
        Event.STAGED, attempt=number, seconds=found.seconds, size_bytes=plan.size_bytes, without=dict(found.without)
    )
    if found.without and required:
        print(f"{found.sentence} (cluster.stage.required)")
        return EXIT_CONFIG
    if found.without:
        log.warning("%s; the ranks there use the shared folders", found.sentence)
    print(*found.without)
    return 0


def _last_line(path: Path) -> str:
    try:
        lines = path.read_text(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    said = [line.partition(": error: ")[2] for line in lines if line.startswith(f"{PACKAGE}: error: ")]
    return said[-1] if said else lines[-1] if lines else "the first node has not said why"
