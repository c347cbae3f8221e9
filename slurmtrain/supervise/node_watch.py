"""Watch the node of the supervisor from another one, in a job that keeps its nodes when one fails (--no-kill)."""

from __future__ import annotations

import contextlib
import signal

from slurmtrain.errors import ClusterError
from slurmtrain.slurm.client import SlurmClient
from slurmtrain.slurm.job_facts import JobState
from slurmtrain.slurm.nodelist import expand_nodelist

LOOK_EVERY_S = 60.0
# The state is SIGNALING until all nodes have taken a signal, which a failed node never does.
GOES_ON = (JobState.RUNNING, "SIGNALING", "SUSPENDED", "STOPPED", "RESIZING")


def watch_over(job_id: str, node: str, *, requeues: bool) -> None:
    """Requeue or end a job once SLURM has taken the node of its supervisor from it; return when the job ends otherwise.

    The end of the job ends this process, too.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    while True:
        told = signal.sigtimedwait({signal.SIGTERM}, LOOK_EVERY_S) is not None
        with contextlib.suppress(ClusterError):
            facts = SlurmClient().look(job_id)
            # TERM is sent to all steps: the ranks are to save, and this goes on; or the job ends, and this, too.
            if facts is None or (told and facts.state not in GOES_ON):
                return
            if facts.nodes and node not in expand_nodelist(facts.nodes):
                SlurmClient().requeue(job_id) if requeues else SlurmClient().cancel(job_id)
