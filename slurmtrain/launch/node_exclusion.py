"""Leave blamed nodes out of the next start of a job: `--exclude` of a job that is submitted, ExcNodeList of one that waits.

What speaks against a node is in `runs.node_blame`. Here it is decided what SLURM is told: cluster.exclude stays, a node that
the cluster does not have any more is not named, since sbatch would refuse, and nothing is left out where the job may then
never start.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from msgspec import Struct

from slurmtrain.config.frozen import load_frozen
from slurmtrain.config.schema import Config
from slurmtrain.errors import ClusterError, EnvironmentMismatchError
from slurmtrain.launch.script import EXCLUDED_MAX, directive
from slurmtrain.runs import node_blame
from slurmtrain.runs.reasons import Event
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.slurm import node_ledger
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.slurm.node_ledger import Blamed, BlamePolicy
from slurmtrain.slurm.nodelist import expand_nodelist

log = logging.getLogger(__name__)


class Exclusion(Struct, frozen=True):
    """The nodes that a start of a job leaves out.

    Attributes:
        nodes: all of them, as sbatch and scontrol take them, those of cluster.exclude first; "" if none are blamed.
        blamed: those of them that are blamed.
    """

    nodes: str = ""
    blamed: tuple[Blamed, ...] = ()

    @property
    def options(self) -> list[str]:
        """The options of sbatch."""
        return [f"--exclude={self.nodes}"] if self.blamed else []

    def record(self, run: RunDir, job_id: str) -> None:
        """Record in a run that its job leaves these nodes out, for `status`."""
        run.event(Event.NODES_LEFT_OUT, nodes=self.nodes, job_id=job_id, blamed=[asdict(each) for each in self.blamed])

    def tell(self) -> None:
        """Log which nodes are left out, why, and for how long."""
        if self.blamed:
            log.info("left out: %s", "; ".join(each.sentence(time.time()) for each in self.blamed))


def blame_policy(config: Config) -> BlamePolicy:
    """Return the part of the config that decides which nodes are left out."""
    return BlamePolicy(config.requeue.blame_threshold, 3600 * config.requeue.blame_expiry_h)


def for_new_job(runs: Sequence[RunDir], script: Path, client: SlurmClient, config: Config | None = None) -> Exclusion:
    """Return what a job that is about to be submitted leaves out; nothing where no node is blamed.

    Args:
        runs: the runs that share the job.
        script: the script that is submitted.
        config: the config of the runs; None: the frozen one of the first.
    """
    blamed = _blamed(runs, client, config or load_frozen(runs[0].config_file, with_secrets=False))
    if not blamed:
        return Exclusion()
    try:
        own = _nodes_of(directive(script.read_text(), "exclude"))
    except (OSError, EnvironmentMismatchError) as error:
        log.warning("no blamed node is excluded: cluster.exclude cannot be parsed: %s", error)
        return Exclusion()
    return _checked(runs, script, client, own, [each for each in blamed if each.node not in own]) or Exclusion()


def for_waiting_job(runs: Sequence[RunDir], job_id: str, client: SlurmClient) -> Exclusion | None:
    """Return what the next start of a job that waits leaves out; None where that is what it does already.

    Nodes that were left out for these runs before, and are forgotten by now, may be used again.
    """
    blamed = _blamed(runs, client, load_frozen(runs[0].config_file, with_secrets=False))
    ours = {each.node: each for run in runs for each in node_blame.left_out_of(run, job_id)}
    if not blamed and not ours:
        return None
    facts, script = client.job(job_id), runs[0].script
    try:
        own = _nodes_of(directive(script.read_text(), "exclude"))
        before = _nodes_of(facts.excluded) if facts is not None else own
    except (OSError, EnvironmentMismatchError):
        return None
    others = [node for node in before if node in own or node not in ours]
    blamed = [each for each in blamed if each.node not in others]
    if {*others, *(each.node for each in blamed)} == set(before):
        return None
    return _checked(runs, script, client, others, blamed)


def leave_out(runs: Sequence[RunDir], job_id: str, client: SlurmClient) -> str:
    """Exclude blamed nodes from the next start of a job that is pending or about to be, and return all excluded nodes.

    The result is empty if there are none, or none but those that were excluded before.
    """
    exclusion = for_waiting_job(runs, job_id, client)
    if exclusion is None:
        return ""
    try:
        client.update_pending(job_id, ExcNodeList=exclusion.nodes)
    except ClusterError as error:
        log.warning("%s cannot be left out: %s", exclusion.nodes or "no node", error.message)
        return ""
    for run in runs:
        exclusion.record(run, job_id)
    exclusion.tell()
    return exclusion.nodes


def _blamed(runs: Sequence[RunDir], client: SlurmClient, config: Config) -> list[Blamed]:
    cluster = client.cluster_name() if node_ledger.is_kept() else None
    return node_blame.blamed_for(runs, blame_policy(config), cluster, time.time())


def _checked(
    runs: Sequence[RunDir], script: Path, client: SlurmClient, own: list[str], blamed: list[Blamed]
) -> Exclusion | None:
    """Return the exclusion of these nodes; None, once that is recorded, where SLURM would not start the job then.

    Args:
        own: nodes that are excluded anyway.
    """
    there = client.existing_nodes([*own, *(each.node for each in blamed)]) if blamed or own else set()
    if there is not None:
        own, blamed = [node for node in own if node in there], [each for each in blamed if each.node in there]
    if not blamed:
        return Exclusion(",".join(own))
    nodes = ",".join([*own, *(each.node for each in blamed)])
    by_itself = [each for each in blamed if not each.by_hand]
    try:
        # SLURM may have forgotten what the script waits for, which does not matter here.
        waits = directive(script.read_text(), "dependency")
        options = [f"--exclude={nodes}", *(["--dependency=singleton"] if waits else [])]
        code, words = client.test_only(script, options) if len(by_itself) <= EXCLUDED_MAX else (1, "")
    except ClusterError as error:
        code, words = 1, error.message
    if code == 0:
        return Exclusion(nodes, tuple(blamed))
    why = words.splitlines()[-1] if words else f"more than {EXCLUDED_MAX} nodes"
    names = ",".join(each.node for each in blamed)
    log.warning("%s cannot be excluded, since the job might then never start: %s", names.replace(",", ", "), why)
    for run in runs:
        run.event(Event.NODES_NOT_LEFT_OUT, nodes=names, why=why)
    return None


def _nodes_of(excluded: str | None) -> list[str]:
    """Return the nodes of a list as sbatch takes it: names, or a file of them.

    Raises:
        OSError: the file cannot be read.
        EnvironmentMismatchError: it is no list of nodes.
    """
    if not excluded:
        return []
    text = ",".join(Path(excluded).read_text().split()) if "/" in excluded else excluded
    return list(dict.fromkeys(expand_nodelist(text)))
