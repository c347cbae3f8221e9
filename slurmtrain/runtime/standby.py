"""A rank of the next start in the same job: it loads PyTorch while others train, and then waits for its turn.

With requeue.standby_ranks the supervisor starts these ranks as a step of their own beside that of the ranks that train, as
soon as those do. It has the same tasks, CPUs and GPUs, so each process has from SLURM what a rank has. It touches no GPU. When
all are ready and the ranks before them have failed, it tells them the number of their attempt. A signal to stop ends
them, and so does any other word; the end of the job ends them in any case.
"""

from __future__ import annotations

import importlib
import os
import select
import sys
import threading
import time
import traceback
from collections.abc import Iterator

from slurmtrain.config.frozen import load_frozen
from slurmtrain.config.parallel_dims import parallel_dims_of
from slurmtrain.config.schema import Config
from slurmtrain.errors import EXIT_REQUEUE
from slurmtrain.runs.run_dir import ATTEMPT_VARIABLE, RunDir
from slurmtrain.slurm.environment import rank_or_zero
from slurmtrain.system.signals import StopFlag

READY = "ready"  # a line of output, which the supervisor counts
LOOK_EVERY_S = 1.0  # for a signal; a word is read at once


def await_attempt(run_dir: RunDir, stop_flag: StopFlag) -> float:
    """Load what a rank needs, and wait to be told the number of the attempt; leave if it never comes.

    From then on this process is a rank of that attempt: its environment names it, and it writes to its log.

    Returns:
        When it was told, in unix seconds.
    """
    config = load_frozen(run_dir.config_file, with_secrets=False)
    loading = threading.Thread(target=_load, args=[config], name="loading", daemon=True)
    loading.start()
    word = _next_word(stop_flag)
    if not word.isdigit():
        os._exit(EXIT_REQUEUE)  # at once, whatever is being loaded
    began = time.time()
    loading.join()
    os.environ[ATTEMPT_VARIABLE] = word
    log = os.open(run_dir.attempt(int(word)).rank_log(rank_or_zero()), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)
    return began


def _next_word(stop_flag: StopFlag) -> str:
    """Return the next line of standard input; an empty one at its end, or when a stop is requested first."""
    while not stop_flag.requested:
        if select.select([sys.stdin], [], [], LOOK_EVERY_S)[0]:
            return sys.stdin.readline().strip()
    return ""


def _load(config: Config) -> None:
    """Import what every rank of this run imports, and say so. The user's own modules are left to the rank."""
    try:
        for name in _modules(config):
            importlib.import_module(name)
    except BaseException:  # the ranks then start without these, and say it themselves
        traceback.print_exc()
        os._exit(1)
    # In one piece: print() writes the end of the line by itself, and the lines of all ranks meet in one log.
    os.write(1, f"{READY}\n".encode())


def _modules(config: Config) -> Iterator[str]:
    yield "torch"
    if config.parallel.compile:
        yield "torch._dynamo"
    else:
        from slurmtrain.runtime.dynamo_on_demand import load_dynamo_on_demand

        load_dynamo_on_demand()
    yield from ("slurmtrain.runtime.jobs.train", "slurmtrain.runtime.watchdog.watchdog", "hydra.utils")
    dims = parallel_dims_of(config)
    if dims.uses_fsdp(config.parallel):
        yield from ("slurmtrain.parallel.sharded", "slurmtrain.parallel.gradients")
    if dims.pp > 1:
        yield "slurmtrain.parallel.pipeline"
    for target in (config.model.get("_target_"), config.data.get("_target_")):
        if str(target).startswith("slurmtrain."):
            yield str(target).rpartition(".")[0]
