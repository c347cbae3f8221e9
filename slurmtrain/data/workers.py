"""The processes that fetch batches ahead: torch's workers, made to outlive the signals of a preemption and to leave when told.

SLURM signals every process of a job step; only the ranks are to act on it.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import multiprocessing.process
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils.data import DataLoader, Dataset

from slurmtrain.errors import SlurmtrainError, how_it_ended

Job = TypeVar("Job")
Result = TypeVar("Result")

CLOSE_GRACE_S = 2.0  # what a worker gets to leave by itself before it is killed
SENT_WHOLE_BYTES = 256 << 10  # tensors up to this size go through the pipe
_OF_NUMPY = {getattr(torch, name) for name in "bool uint8 int8 int16 int32 int64 float16 float32 float64".split()}
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)


class Workers(Generic[Job, Result]):
    """An iterator over `work(job)` for every job, in their order.

    Args:
        work: called in a worker. What it raises is raised here.
        jobs: taken by this process, as results are asked for.
        count: of workers.
        ahead: jobs that are given to each worker before their results are wanted.
        pin_memory: copy the tensors of results into page-locked memory, by a thread.
    """

    def __init__(
        self, work: Callable[[Job], Result], jobs: Iterator[Job], *, count: int, ahead: int, seed: int, pin_memory: bool
    ):
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._results: Iterator[Any] | None = None  # None when not all workers could be started
        loader: DataLoader[Any] = DataLoader(
            _Work(work),
            batch_size=None,  # an "index" is a whole job
            sampler=jobs,
            num_workers=count,
            prefetch_factor=ahead,
            collate_fn=_as_is,
            pin_memory=pin_memory,
            worker_init_fn=_set_up,
            multiprocessing_context="fork",
            # Without one of its own, starting workers would draw from the global generator, which then differs
            # between runs with and without workers, and from that of a resumed run.
            generator=torch.Generator().manual_seed(seed % 2**63),
        )
        # A worker that ignores SIGTERM outlives multiprocessing's own cleaning up, which waits for it for ever.
        # Exit functions run last in, first out, so this one comes before that.
        atexit.register(self.close)
        before = set(multiprocessing.active_children())
        # Blocked across the fork, so that no signal meets a worker before it has learnt to ignore them. Those that
        # arrive for this process meanwhile are delivered afterwards.
        old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
        try:
            self._results = iter(loader)
        except BaseException:
            self._processes = [worker for worker in multiprocessing.active_children() if worker not in before]
            self.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
        self._processes = [worker for worker in multiprocessing.active_children() if worker not in before]

    def __iter__(self) -> Workers[Job, Result]:
        return self

    def __next__(self) -> Result:
        """Raises SlurmtrainError: a worker has died."""
        assert self._results is not None
        try:
            result = next(self._results)
        except RuntimeError:
            dead = next((worker for worker in self._processes if worker.exitcode), None)
            if dead is None:
                raise
            raise _death(dead) from None
        if isinstance(result, SlurmtrainError):  # torch would pack it into another one, without its hint
            raise result
        return result

    def close(self) -> None:
        """Stop the workers. Takes about `CLOSE_GRACE_S` at most."""
        results, processes = self._results, self._processes
        self._results, self._processes = None, []
        atexit.unregister(self.close)
        if not processes:
            return
        killer = threading.Timer(CLOSE_GRACE_S, _kill, [processes])
        killer.daemon = True
        killer.start()
        try:
            # torch raises here when a worker had to be killed, which is no news to us.
            with contextlib.suppress(RuntimeError):
                if results is not None:
                    results._shutdown_workers()  # type: ignore[attr-defined]
        finally:
            killer.cancel()
            _kill(processes)
            for process in processes:
                process.join(CLOSE_GRACE_S)


def ignore_stop_signals(worker_id: int) -> None:
    """What each worker does first: leave the stop signals to the ranks."""
    for number in _STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)


def _set_up(worker_id: int) -> None:
    ignore_stop_signals(worker_id)
    ForkingPickler.register(Tensor, _reduced)  # in this worker alone


def _reduced(tensor: Tensor) -> tuple[Any, ...]:
    """How a tensor is sent. Torch opens shared memory for each and sends its descriptor, which takes longer than small ones."""
    plain = tensor.dtype in _OF_NUMPY and tensor.layout == torch.strided and tensor.device.type == "cpu"
    if not plain or tensor.requires_grad or tensor.nbytes > SENT_WHOLE_BYTES:
        return reduce_tensor(tensor)
    return torch.from_numpy, (tensor.resolve_neg().numpy(),)


class _Work(Dataset[Any]):
    """A data set whose index is a job."""

    def __init__(self, work: Callable[[Any], Any]):
        self._work = work

    def __getitem__(self, job: Any) -> Any:
        try:
            return self._work(job)
        except SlurmtrainError as error:
            return error


def _death(worker: multiprocessing.process.BaseProcess) -> SlurmtrainError:
    code = worker.exitcode or 0
    return SlurmtrainError(
        f"a process that reads data (pid {worker.pid}) {how_it_ended(code)}",
        hint="out of memory? Give the job more (cluster.mem_*), or set fewer train.data_workers"
        if code == -signal.SIGKILL
        else None,
    )


def _as_is(result: Any) -> Any:
    return result


def _kill(processes: Iterable[multiprocessing.process.BaseProcess]) -> None:
    for process in processes:
        process.kill()  # nothing happens to one that has left already
