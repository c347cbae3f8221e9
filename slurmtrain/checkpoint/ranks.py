"""Communication between ranks while they save and restore.

A failure on one rank is raised on all, so that no rank waits for others.
"""

from __future__ import annotations

import errno
import os
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from slurmtrain.errors import CheckpointError, LostPeers

T = TypeVar("T")


_EXPECTED = (OSError, MemoryError, RuntimeError)
Failure = tuple[type[CheckpointError], str, str | None]


class Ranks:
    """The ranks of a gloo group, or a single process (`group` None). Every method is called by all of them together.

    Ranks exchange pairs (result, failure), so that an error on one rank becomes a CheckpointError on all.
    """

    def __init__(self, group: dist.ProcessGroup | None):
        self.group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.size = dist.get_world_size(group) if group is not None else 1
        self.global_rank = dist.get_rank() if group is not None else 0

    def own_group(self, timeout_s: float | None = None) -> Ranks:
        """Return the same ranks on a process group of their own, whose messages are separate from those of this group.

        Args:
            timeout_s: seconds for which its ranks wait for each other; None: as long as those of this group.
        """
        return Ranks(self._new_group(timeout_s=timeout_s)) if self.group is not None else Ranks(None)

    def subgroup(self, members: list[int]) -> Ranks:
        """Return a group of `members`, which only they have to call.

        With thousands of ranks, it would take minutes if all of them made every group.
        """
        return Ranks(self._new_group(members, use_local_synchronization=True))

    def _new_group(
        self, members: list[int] | None = None, *, timeout_s: float | None = None, **options: Any
    ) -> dist.ProcessGroup:
        assert self.group is not None
        # Otherwise it would be torch's 30 minutes, whatever this job's setting.
        own = self.group._get_backend(torch.device("cpu")).options._timeout
        timeout = own if timeout_s is None else timedelta(seconds=timeout_s)
        return dist.new_group(members, backend="gloo", timeout=timeout, **options)

    def end(self) -> None:
        """Destroy the process group."""
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group)
            self.group = None

    def explain(self, error: Exception) -> CheckpointError:
        """Return an error of this rank as all ranks get it.

        The traceback of a possible bug, ours or a user's, is printed here.
        """
        if isinstance(error, CheckpointError):
            return error
        sentence = _sentence(error)
        if not isinstance(error, _EXPECTED):
            traceback.print_exc()
            sentence = f"{type(error).__name__}: {error}"
        prefix = f"rank {self.rank}: " if self.size > 1 else ""
        return CheckpointError(prefix + sentence, hint=_hint(error))

    def _attempt(self, work: Callable[[], T]) -> tuple[T | None, Failure | None]:
        try:
            return work(), None
        except Exception as error:
            if self.size == 1 and not isinstance(error, (CheckpointError, *_EXPECTED)):
                raise
            told = self.explain(error)
            return None, (type(told), told.message, told.hint)

    def on_rank_0(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 and return its result on every rank."""
        answer = [self._attempt(work) if self.rank == 0 else None]
        if self.group is not None:
            with _lost_peers():
                dist.broadcast_object_list(answer, group=self.group, group_src=0)
        return _results(answer)[0]

    def gather(self, work: Callable[[], T]) -> list[T]:
        """Run `work` on every rank and return all results on each, in the order of ranks."""
        answer = self._attempt(work)
        answers: list[Any] = [answer]
        if self.group is not None:
            answers = [None] * self.size
            with _lost_peers():
                dist.all_gather_object(answers, answer, group=self.group)
        return _results(answers)

    def gather_on_rank_0(self, work: Callable[[], T], then: Callable[[list[T]], Any]) -> Any:
        """Run `work` on every rank, then `then` on rank 0 with all results, and return its result on every rank."""
        answer = self._attempt(work)
        answers: list[Any] | None = [answer]
        if self.group is not None:
            answers = [None] * self.size if self.rank == 0 else None
            with _lost_peers():
                dist.gather_object(answer, answers, group=self.group, group_dst=0)

        def with_all() -> Any:
            assert answers is not None
            return then(_results(answers))

        return self.on_rank_0(with_all)

    def maximum(self, number: int) -> int:
        """Return the largest of all ranks' numbers, by the cheapest collective: four bytes."""
        if self.group is None:
            return number
        box = torch.tensor([number], dtype=torch.int32, device="cpu")
        with _lost_peers():
            dist.all_reduce(box, op=dist.ReduceOp.MAX, group=self.group)
        return int(box.item())

    def all_do(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank and return each rank's own result, unless it failed on any rank."""
        result: list[T] = []
        self.gather(lambda: result.append(work()))
        return result[0]

    def tell(self, value: T, source: int) -> T:
        """Return the value of rank `source` on all ranks."""
        if self.group is None:
            return value
        box = [value]
        with _lost_peers():
            dist.broadcast_object_list(box, group=self.group, group_src=source)
        return box[0]


def _sentence(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno is not None:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{os.strerror(error.errno)}"
    return str(error) or type(error).__name__


def _hint(error: BaseException) -> str | None:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some space; `checkpoints RUN prune` removes what is not needed any more"
    return None


def _results(answers: list[Any]) -> list[Any]:
    failures = [failure for _, failure in answers if failure is not None]
    if failures:
        kind, message, hint = failures[0]
        if len(failures) > 1:
            message += f" (and {len(failures) - 1} more ranks)"
        raise kind(message, hint=hint)
    return [result for result, _ in answers]


@contextmanager
def _lost_peers() -> Iterator[None]:
    """Raise gloo's errors, when a rank is gone or the group was ended, as one sentence."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        text = re.sub(r"^\[[^]]*\] ?", "", str(error).strip())  # gloo begins with a path of its build
        first = (text or type(error).__name__).splitlines()[0]
        raise LostPeers(f"the ranks lost each other while they saved or restored: {first}") from None
