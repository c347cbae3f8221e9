"""The processes that fetch batches ahead: torch's workers, and the thread that receives what they have fetched.

Workers ignore the signals of a preemption and leave when the rank tells them: SLURM signals every process of a job step,
and only the ranks are to act on it.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import io
import multiprocessing
import multiprocessing.process
import os
import pickle
import queue
import resource
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing.reduction import ForkingPickler
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._utils import ExceptionWrapper
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from slurmtrain.errors import SlurmtrainError, how_it_ended
from slurmtrain.system.signals import SLURM_STOP_SIGNALS

Job = TypeVar("Job")
Result = TypeVar("Result")

CLOSE_GRACE_S = 2.0  # seconds for a worker to exit by itself before it is killed
POLL_S = 0.2  # seconds without a result after which it is looked whether there is an end, or a worker has died
SMALL_BYTES = 1 << 20  # a tensor of at most so many is sent in the message: to hand over shared memory takes longer
_OF_NUMPY = {getattr(torch, name) for name in "bool uint8 int8 int16 int32 int64 float16 float32 float64".split()}


class Workers(Generic[Job, Result]):
    """An iterator over the results of `work`, in the order of the jobs, that ends at the first error.

    A thread receives results before they are asked for, so that this costs the rank no time.

    Args:
        work: called in a worker for each job. Its errors are raised here, in the job's turn.
        jobs: the jobs, taken in the thread.
        count: number of workers.
        ahead: number of jobs that are fetched, and of results that are received, before they are wanted.
        received: called in the thread with each result; returns what stands for it.
    """

    def __init__(
        self,
        work: Callable[[Job], Result],
        jobs: Iterator[Job],
        *,
        count: int,
        ahead: int,
        seed: int,
        received: Callable[[Result], Result] | None = None,
    ):
        self._received = received
        self._ready: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(ahead)
        self._closing = False
        loader: DataLoader[Any] = DataLoader(
            _Jobs(work),
            batch_size=None,  # an "index" is a job
            sampler=jobs,
            num_workers=count,
            prefetch_factor=max(2, -(-ahead // count)),
            collate_fn=_identity,
            timeout=POLL_S,
            worker_init_fn=functools.partial(_init_worker, positions=_read_positions()),
            multiprocessing_context="fork",
            # Without one of its own, starting workers would draw from the global generator, which then differs
            # between runs with and without workers, and from that of a resumed run.
            generator=torch.Generator().manual_seed(seed % 2**63),
        )
        before = set(multiprocessing.active_children())
        # Blocked across the fork, so that no signal meets a worker before it has learnt to ignore them. Those that
        # arrive for this process meanwhile are delivered afterwards.
        old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, SLURM_STOP_SIGNALS)
        try:
            with _no_child_handler():
                results = iter(loader)
        except BaseException:
            _kill(set(multiprocessing.active_children()) - before)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
        self._processes = list(set(multiprocessing.active_children()) - before)
        self._thread = threading.Thread(target=self._receive, args=(results,), name="receive batches", daemon=True)
        self._thread.start()
        # A worker that ignores SIGTERM outlives multiprocessing's own cleaning up, which waits for it for ever.
        # Exit functions run last in, first out, so this one comes before that.
        atexit.register(self.close)

    def __iter__(self) -> Workers[Job, Result]:
        return self

    def __next__(self) -> Result:
        """Return the next result, or raise the error of its job.

        Raises:
            SlurmtrainError: a worker has died.
        """
        while not self._closing:
            error: BaseException | None = None
            with contextlib.suppress(queue.Empty):
                result, error = self._ready.get(timeout=POLL_S)
                if error is None:
                    return result  # type: ignore[no-any-return]
            # The thread does not always tell of a death: it may wait for the rest of a message.
            dead = next((worker for worker in self._processes if worker.exitcode), None)
            if dead is not None and (error is None or isinstance(error, RuntimeError)):
                error = _dead_worker_error(dead)
            if error is not None:
                self.close()
                raise error
        raise StopIteration

    def close(self) -> None:
        """Stop the workers. Takes about `CLOSE_GRACE_S` seconds at most."""
        atexit.unregister(self.close)
        self._closing = True
        with contextlib.suppress(queue.Empty):
            while True:  # the thread may wait for room
                self._ready.get_nowait()
        deadline = time.monotonic() + CLOSE_GRACE_S
        with _no_child_handler():
            for process in self._processes:
                process.join(max(deadline - time.monotonic(), 0))
            _kill(self._processes)
            for process in self._processes:
                process.join(CLOSE_GRACE_S)
            self._thread.join(CLOSE_GRACE_S)  # it waits for ever if a worker has died in the middle of a message

    def _receive(self, results: Iterator[Any]) -> None:
        """Receive results until there is an end, and tell the workers of it; runs in a thread."""
        try:
            while not self._closing:
                try:
                    result = next(results)
                except RuntimeError as error:
                    if str(error) != f"DataLoader timed out after {POLL_S} seconds":
                        raise
                    continue
                if isinstance(result, SlurmtrainError):  # torch would pack it into another one, without its hint
                    raise result
                self._ready.put((result if self._received is None else self._received(result), None))
        except BaseException as error:
            self._ready.put((None, error))
        finally:
            results._shutdown_workers()  # type: ignore[attr-defined]


@contextlib.contextmanager
def _no_child_handler() -> Iterator[None]:
    """Leave this process without torch's handler, which raises wherever the process is when a worker has been killed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)


def ignore_stop_signals(worker_id: int) -> None:
    """Ignore the stop signals in this worker, since only the ranks act on them.

    A rank that ends kills those workers that are left, as torch's with persistent_workers are.
    """
    for number in SLURM_STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SLURM_STOP_SIGNALS)


class _WorkerStart:
    """What a worker does first: it leaves stop signals to the rank, and then does what the user asks for."""

    def __init__(self, then: Callable[[int], None] | None):
        self._then = then

    def __call__(self, worker_id: int) -> None:
        ignore_stop_signals(worker_id)
        if self._then is not None:
            self._then(worker_id)


def ignoring_stop_signals(get_iterator: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a `_get_iterator` of a DataLoader whose workers ignore the stop signals, from their first moment on."""

    @functools.wraps(get_iterator)
    def get(loader: DataLoader[Any]) -> Any:
        then = loader.worker_init_fn
        loader.worker_init_fn = _WorkerStart(then)
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


class _Position(NamedTuple):
    """The position of this process in an open file.

    Attributes:
        file: device and inode.
        flags: flags of the open file.
        offset: bytes from its start.
    """

    file: tuple[int, int]
    flags: int
    offset: int


def _init_worker(worker_id: int, positions: Mapping[int, _Position]) -> None:
    """Prepare a worker: ignore stop signals, allow many descriptors, and give it its own positions in open files."""
    ignore_stop_signals(worker_id)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)  # each tensor that waits to be received takes one
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    _reopen_files(positions)


def _read_positions() -> dict[int, _Position]:
    """Return this process's position in each regular file that it has open for reading only, by descriptor."""
    found = {}
    with contextlib.suppress(OSError):  # no /proc, and no way to open such a file again
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):  # closed meanwhile
                status, flags = os.fstat(descriptor), fcntl.fcntl(descriptor, fcntl.F_GETFL)
                if stat.S_ISREG(status.st_mode) and flags & os.O_ACCMODE == os.O_RDONLY:
                    offset = os.lseek(descriptor, 0, os.SEEK_CUR)
                    found[descriptor] = _Position((status.st_dev, status.st_ino), flags, offset)
    return found


def _reopen_files(positions: Mapping[int, _Position]) -> None:
    """Give this process a position of its own in each of these files.

    A descriptor that was open before the fork shares its position with the parent and all other workers: if another
    process seeks between the seek and the read of this one, this one reads some other sample. A data set opens files
    before the fork if it opens them in its constructor, or when it is asked for its length.
    """
    for descriptor, position in positions.items():
        with contextlib.suppress(OSError):  # the descriptor stays shared: it may be closed by now
            status = os.fstat(descriptor)
            if (status.st_dev, status.st_ino) != position.file:
                continue
            own = os.open(f"/proc/self/fd/{descriptor}", position.flags)
            try:
                os.lseek(own, position.offset, os.SEEK_SET)
                os.dup2(own, descriptor, inheritable=os.get_inheritable(descriptor))
            finally:
                os.close(own)


class _Jobs(Dataset[Any]):
    """A data set whose index is a job, and whose sample is its result, or the error that stands for it."""

    def __init__(self, work: Callable[[Any], Any]):
        self._work = work

    def __getitem__(self, job: Any) -> _Pickled:
        worker = get_worker_info()
        assert worker is not None
        try:
            return _Pickled(self._work(job))
        except Exception as error:
            return _Pickled(_sendable(error, f"in data worker {worker.id}"))


class _Pickled:
    """A result, pickled when it is made, and unpickled by the process that it is sent to.

    Otherwise the thread that sends it pickles it later: a data set that uses its memory again would change it, and after an
    error of that thread the rank would wait for ever.
    """

    def __init__(self, result: Any):
        file = io.BytesIO()
        pickler = ForkingPickler(file, pickle.HIGHEST_PROTOCOL)
        pickler.dispatch_table[Tensor] = _reduced
        pickler.dump(result)
        self._content = file.getvalue()

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (self._content,)


def _reduced(tensor: Tensor) -> tuple[Any, ...]:
    """Return how a tensor is sent: in the message itself if it is small and plain, else in shared memory, as torch does."""
    plain = tensor.layout == torch.strided and tensor.device.type == "cpu"
    if plain and tensor.nbytes <= SMALL_BYTES and tensor.dtype in _OF_NUMPY and not tensor.requires_grad:
        return torch.from_numpy, (tensor.numpy(force=True),)
    reduced: tuple[Any, ...] = reduce_tensor(tensor)
    return reduced


def _sendable(error: Exception, where: str) -> SlurmtrainError | ExceptionWrapper:
    """Return the error in a form that another process can raise.

    It is the error itself if it is our own, else torch's wrapper with its traceback.

    An error of a kind that another process cannot make becomes a RuntimeError.
    """
    sent = error if isinstance(error, SlurmtrainError) else ExceptionWrapper(where=where)
    try:
        pickle.loads(pickle.dumps(sent))
    except Exception:
        return ExceptionWrapper(
            (RuntimeError, RuntimeError(f"{type(error).__name__}: {error}"), error.__traceback__), where
        )
    return sent


def _dead_worker_error(worker: multiprocessing.process.BaseProcess) -> SlurmtrainError:
    code = worker.exitcode or 0
    return SlurmtrainError(
        f"a process that reads data (pid {worker.pid}) {how_it_ended(code)}",
        hint="out of memory? Request more (cluster.mem_*), or set fewer train.data_workers"
        if code == -signal.SIGKILL
        else None,
    )


def _identity(result: Any) -> Any:
    return result


def _kill(processes: Iterable[multiprocessing.process.BaseProcess]) -> None:
    for process in processes:
        process.kill()  # nothing happens to one that has left already
