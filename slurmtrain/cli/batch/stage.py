"""stage: for the batch script. Copy what cluster.stage names to the nodes of the job: --plan, --look, --copy, then --judge.

--look prints the time and this user's jobs that SLURM has not ended; it exits with 75 where SLURM has told this job to stop,
and with 1 where it does not answer. --judge prints the nodes that have no sound copy, with blanks; with cluster.stage.required
it then prints a sentence and exits with 78.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

from slurmtrain.cli.arguments import Parser
from slurmtrain.config.frozen import load_frozen
from slurmtrain.errors import EXIT_CONFIG, EXIT_REQUEUE, ClusterError
from slurmtrain.runs.events import Event
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.runs.stage_record import read_plan, read_reports, write_plan, write_refusal
from slurmtrain.runtime.staging.judge import judge
from slurmtrain.runtime.staging.node import LiveJobs, stage_node
from slurmtrain.runtime.staging.plan import make_plan
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.slurm.environment import own_job_id, own_node_name
from slurmtrain.slurm.job_states import JobState
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
    parser.add_argument("--jobs", metavar="WORDS", help="with --copy: what --look has printed")
    parser.add_argument("--look", action="store_true", help="print the time, and this user's jobs that are not over")
    parser.add_argument("--judge", action="store_true", help="print the nodes that have no sound copy")
    parser.add_argument("--seconds", type=int, default=0, help="with --judge: how long the last step took")
    options = parser.parse_args(words)
    run_dir = RunDir(options.run_dir)
    if options.copy is not None:
        return _copy(run_dir, options.attempt, options.copy, options.jobs)
    if options.plan:
        return _plan(run_dir, options.attempt, options.python)
    if options.look:
        return look(SlurmClient(), own_job_id() or "")
    return _judge(run_dir, options.attempt, options.seconds)


def _plan(run_dir: RunDir, number: int, python: str) -> int:
    config = load_frozen(run_dir.config_file, with_secrets=False)
    nodes = expand_nodelist(os.environ["SLURM_JOB_NODELIST"])
    write_plan(run_dir.attempt(number), make_plan(run_dir, config, nodes, [python]))
    return 0


def _copy(run_dir: RunDir, number: int, folder: Path, jobs: str | None) -> int:
    plan, node = read_plan(run_dir.attempt(number)), own_node_name()
    if plan is None or node is None:
        return 1
    report = stage_node(plan, folder, node, live_jobs=LiveJobs.parse(jobs) if jobs is not None else None)
    os.write(1, report.line().encode())  # in one piece: the lines of all nodes meet in one file
    return 0


def look(client: SlurmClient, job_id: str) -> int:
    """Print the jobs whose copies must stay, unless this job is to stop: while none of its steps runs, no signal reaches it."""
    asked = time.time()
    facts = client.job(job_id)
    if facts is not None and (facts.preempted or facts.state == JobState.COMPLETING):
        return EXIT_REQUEUE
    try:
        print(LiveJobs(asked, tuple(client.live_jobs())))
    except ClusterError as error:
        log.warning("what ended jobs have left on the nodes stays there: %s", error.message)
        return 1
    return 0


def _judge(run_dir: RunDir, number: int, seconds: int) -> int:
    attempt_dir = run_dir.attempt(number)
    stage = load_frozen(run_dir.config_file, with_secrets=False).cluster.stage
    required, minutes = stage.required, stage.limit_min
    limit = f"{minutes} min (cluster.stage.limit_min)" if seconds >= 60 * minutes else None
    plan = read_plan(attempt_dir)
    if plan is None:
        why = _last_line(attempt_dir.stage_dir / "log") if limit is None else f"it was not prepared after {limit}"
        message = f"nothing could be copied to the nodes (cluster.stage): {why}"
        if required:
            print(message)
            return EXIT_CONFIG
        log.warning("%s; the ranks use the shared folders", message)
        return 1
    found = judge(plan, read_reports(attempt_dir), limit)
    run_dir.event(
        Event.STAGED, attempt=number, seconds=found.seconds, size_bytes=plan.size_bytes, without=dict(found.without)
    )
    if found.without and required:
        write_refusal(attempt_dir, plan, list(found.without))
        print(f"{found.sentence} (cluster.stage.required)")
        return EXIT_CONFIG
    if found.without:
        log.warning("%s; the ranks there use the shared folders", found.sentence)
    if found.in_memory:
        nodes = found.in_memory[0] + (f" and {more} more nodes" if (more := len(found.in_memory) - 1) else "")
        log.warning("the copies take %.2f GB of the job's memory on %s", plan.size_bytes / 1e9, nodes)
    print(*found.without)
    return 0


def _last_line(path: Path) -> str:
    try:
        lines = path.read_text(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    said = [line.partition(": error: ")[2] for line in lines if line.startswith(f"{PACKAGE}: error: ")]
    return said[-1] if said else lines[-1] if lines else "the first node has not said why"
