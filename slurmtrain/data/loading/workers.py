"""The processes that fetch batches ahead.

They ignore the signals of a preemption and are killed by the rank: SLURM signals every process of a job step, and only the
ranks are to act on it.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import io
import itertools
import multiprocessing
import multiprocessing.process
import os
import pickle
import queue
import signal
import stat
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from slurmtrain.errors import SlurmtrainError, how_it_ended
from slurmtrain.system.process import be_killed_with
from slurmtrain.system.signals import SLURM_STOP_SIGNALS

PIPE_BYTES = 1 << 20  # room for a batch, so that a worker can read the next one; what a user may have by default
CLOSE_S = 5.0  # seconds for killed workers to leave

Job = TypeVar("Job")
Result = TypeVar("Result")


class Workers(Generic[Job, Result]):
    """An iterator over the results of `work`, in the order of the jobs, that ends at the first error.

    Each worker does every `count`-th job and sends what it gives through a pipe of its own. It reads ahead by what the pipe
    holds, and by one more result, with which it waits for room. A thread of this process receives the next result while the
    last one is used: one of many megabytes takes a tenth of a second to pass through a pipe.

    Args:
        work: called in a worker for each job. Its errors are raised here, in the job's turn.
        jobs: the jobs; every worker has a copy of the iterator.
        count: number of workers.
    """

    def __init__(self, work: Callable[[Job], Result], jobs: Iterator[Job], *, count: int):
        context = multiprocessing.get_context("fork")
        self._workers: list[tuple[Connection, multiprocessing.process.BaseProcess]] = []
        # Blocked across the fork, so that no signal meets a worker before it has learnt to ignore them. Those that
        # arrive for this process meanwhile are delivered afterwards.
        old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, SLURM_STOP_SIGNALS)
        try:
            for number in range(count):
                receiver, sender = context.Pipe(duplex=False)
                with contextlib.suppress(OSError):  # where the system's limits allow it
                    fcntl.fcntl(sender.fileno(), fcntl.F_SETPIPE_SZ, PIPE_BYTES)
                own_jobs = itertools.islice(jobs, number, None, count)
                process = context.Process(target=_run, args=(work, own_jobs, sender, os.getpid()), daemon=True)
                process.start()
                sender.close()  # before the next fork: the pipe of a worker that has died has no other end then
                self._workers.append((receiver, process))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
        self._received: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._room, self._closing = threading.Semaphore(), False  # room for one result
        self._receiver = threading.Thread(target=self._receive, name="receive batches", daemon=True)
        self._receiver.start()

    def __next__(self) -> Result:
        """Return the next result, or raise the error of its job.

        Raises:
            SlurmtrainError: a worker has died.
        """
        result, error = self._received.get()
        if error is not None:
            raise error
        self._room.release()
        return result  # type: ignore[no-any-return]

    def _receive(self) -> None:
        """Receive results, each when there is room for it; runs in a thread."""
        for receiver, process in itertools.cycle(self._workers):
            self._room.acquire()
            if self._closing:
                return
            try:
                message = receiver.recv_bytes()
            except (EOFError, OSError):  # of a pipe without its other end, perhaps in the middle of a message
                process.join()
                self._received.put((None, _dead_worker_error(process)))
                return
            try:
                self._received.put(pickle.loads(message))
            except Exception as error:
                self._received.put((None, error))

    def close(self) -> None:
        """Kill the workers. Takes `CLOSE_S` seconds at most."""
        deadline, self._closing = time.monotonic() + CLOSE_S, True
        self._room.release()
        for _, process in self._workers:
            process.kill()
        for _, process in self._workers:
            process.join(max(0.0, deadline - time.monotonic()))  # a file system that hangs holds it back
        self._receiver.join(max(0.0, deadline - time.monotonic()))  # what a worker's own child holds open, too
        if not self._receiver.is_alive():
            for receiver, _ in self._workers:
                receiver.close()


def _run(work: Callable[[Any], Any], jobs: Iterator[Any], sender: Connection, rank: int) -> None:
    """Do the jobs of a worker, one after another."""
    ignore_stop_signals(0)
    be_killed_with(rank)
    _reopen_files()
    torch.set_num_threads(1)  # the workers are the parallelism
    for job in jobs:
        try:
            message = _pickled(work(job))
        except Exception as error:
            message = pickle.dumps((None, _sendable(error)))
        sender.send_bytes(message)


def _pickled(result: Any) -> bytes:
    """Return a message with a result, whose tensors are sent by value: a data set may use its memory again."""
    file = io.BytesIO()
    pickler = pickle.Pickler(file, pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = {Tensor: _reduced}
    pickler.dump((result, None))
    return file.getvalue()


def _reduced(tensor: Tensor) -> Any:
    try:
        return torch.from_numpy, (tensor.numpy(force=True),)
    except TypeError:  # numpy does not have its type, or its layout
        return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # a copy, too, which takes several times as long


def _sendable(error: Exception) -> Exception:
    """Return the error with its traceback as a note; of a kind that another process cannot make, as a RuntimeError."""
    lines = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(f"\nIn a process that reads data:\n{lines}")
    return error


def _reopen_files() -> None:
    """Give this process a position of its own in each file that it has open for reading only.

    A descriptor that was open before the fork shares its position with the parent and all other workers: if another
    process seeks between the seek and the read of this one, this one reads some other sample. A data set opens files
    before the fork if it opens them in its constructor, or when it is asked for its length.
    """
    with contextlib.suppress(OSError):  # no /proc, and no way to open such a file again
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):  # that of the listing, which is closed; the descriptor stays shared
                flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
                if stat.S_ISREG(os.fstat(descriptor).st_mode) and flags & os.O_ACCMODE == os.O_RDONLY:
                    own = os.open(f"/proc/self/fd/{descriptor}", flags)
                    os.lseek(own, os.lseek(descriptor, 0, os.SEEK_CUR), os.SEEK_SET)
                    os.dup2(own, descriptor, inheritable=os.get_inheritable(descriptor))
                    os.close(own)


def _dead_worker_error(worker: multiprocessing.process.BaseProcess) -> SlurmtrainError:
    code = worker.exitcode or 0
    return SlurmtrainError(
        f"a process that reads data (pid {worker.pid}) {how_it_ended(code)}",
        hint="out of memory? Request more (cluster.mem_*), or set fewer train.data_workers"
        if code == -signal.SIGKILL
        else None,
    )


def ignore_stop_signals(worker_id: int) -> None:
    """Ignore the stop signals in this worker, since only the ranks act on them.

    A rank that ends kills those workers that are left, as torch's with persistent_workers are.
    """
    for number in SLURM_STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SLURM_STOP_SIGNALS)


def _start(then: Callable[[int], None] | None, worker_id: int) -> None:
    """Leave stop signals to the rank, and then do what the user asks for."""
    ignore_stop_signals(worker_id)
    if then is not None:
        then(worker_id)


def ignoring_stop_signals(get_iterator: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a `_get_iterator` of a DataLoader whose workers ignore the stop signals, from their first moment on."""

    @functools.wraps(get_iterator)
    def get(loader: DataLoader[Any]) -> Any:
        then = loader.worker_init_fn
        loader.worker_init_fn = functools.partial(_start, then)
        old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, SLURM_STOP_SIGNALS)
        try:
            return get_iterator(loader)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
            loader.worker_init_fn = then

    return get


def let_all_workers_ignore_stop_signals() -> None:
    """Let the workers of all of torch's own DataLoaders ignore the stop signals: those of a Trainer's, for instance."""
    if not hasattr(DataLoader._get_iterator, "__wrapped__"):
        DataLoader._get_iterator = ignoring_stop_signals(DataLoader._get_iterator)  # type: ignore[assignment,method-assign]


def _kill_daemons() -> None:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler calls this a failure of the worker
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()


# Python's own exit, which comes after this, sends them a SIGTERM, which they ignore, and waits for them.
atexit.register(_kill_daemons)
