"""Communication between ranks while they save and restore.

A failure on one rank is raised on all, so that no rank waits for others.
"""

from __future__ import annotations

import errno
import os
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from slurmtrain.checkpoint.messages import LONGEST, decode, decode_failure, encode, encode_failure
from slurmtrain.errors import CheckpointError, LostPeersError, storage_hint

T = TypeVar("T")


_EXPECTED = (OSError, MemoryError, RuntimeError)
Answer = list[Any]  # result, and the failure as `messages.encode_failure` gives it, or None
FINE: Answer = [None, None]  # said by an empty message


class RankGroup:
    """The ranks of a gloo group, or a single process (`group` None).

    Every method but `send` and `receive` is called by all of them together.

    Ranks exchange pairs (result, failure), so that an error on one rank becomes a CheckpointError on all. Results are None,
    bool, int, float, str, bytes, or lists and dicts (by str) of them: see `messages`. A value of another type is turned
    into these, and back, by the caller.
    """

    def __init__(self, group: dist.ProcessGroup | None):
        self.group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.size = dist.get_world_size(group) if group is not None else 1
        self.global_rank = dist.get_rank() if group is not None else 0

    def own_group(self, timeout_s: float | None = None) -> RankGroup:
        """Return the same ranks on a process group of their own, whose messages are separate from those of this group.

        Args:
            timeout_s: seconds for which its ranks wait for each other; None: as long as those of this group.
        """
        return RankGroup(self._new_group(timeout_s=timeout_s)) if self.group is not None else RankGroup(None)

    def subgroup(self, members: list[int]) -> RankGroup:
        """Return a group of `members`, which only they have to call.

        With thousands of ranks, it would take minutes if all of them made every group.
        """
        return RankGroup(self._new_group(members, use_local_synchronization=True))

    def _new_group(
        self, members: list[int] | None = None, *, timeout_s: float | None = None, **options: Any
    ) -> dist.ProcessGroup:
        assert self.group is not None
        # Otherwise it would be torch's 30 minutes, whatever this job's setting.
        own = self.group._get_backend(torch.device("cpu")).options._timeout
        timeout = own if timeout_s is None else timedelta(seconds=timeout_s)
        group: dist.ProcessGroup = dist.new_group(members, backend="gloo", timeout=timeout, **options)
        return group

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

    def _attempt(self, work: Callable[[], T]) -> Answer:
        try:
            return [work(), None]
        except Exception as error:
            if self.size == 1 and not isinstance(error, (CheckpointError, *_EXPECTED)):
                raise
            return [None, encode_failure(self.explain(error))]

    def on_rank_0(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 and return its result on every rank."""
        answer = self._attempt(work) if self.rank == 0 else FINE
        if self.group is not None:
            answer = self._broadcast(answer, 0)
        result: T = _results([answer])[0]
        return result

    def gather(self, work: Callable[[], T]) -> list[T]:
        """Run `work` on every rank and return all results on each, in the order of ranks."""
        answers = [self._attempt(work)]
        if self.group is not None:
            own, longest = self._agree_on_length(_encode(answers[0]))
            rows = torch.zeros(self.size, longest, dtype=torch.uint8, device="cpu")
            if longest:
                with _lost_peers():
                    dist.all_gather(list(rows), own, group=self.group)
            answers = _decode_all(rows)
        return _results(answers)

    def gather_on_rank_0(self, work: Callable[[], T], then: Callable[[list[T]], Any]) -> Any:
        """Run `work` on every rank, then `then` on rank 0 with all results, and return its result on every rank.

        Rank 0's own answer is not sent: it may be much longer than the others'.
        """
        answer = self._attempt(work)
        rows = torch.empty(1, 0, dtype=torch.uint8, device="cpu")
        if self.group is not None:
            own, longest = self._agree_on_length(b"" if self.rank == 0 else _encode(answer))
            if self.rank == 0:
                rows = torch.zeros(self.size, longest, dtype=torch.uint8, device="cpu")
            if longest:
                with _lost_peers():
                    dist.gather(own, list(rows) if self.rank == 0 else None, group=self.group, group_dst=0)
        return self.on_rank_0(lambda: then(_results([answer, *_decode_all(rows[1:])])))

    def _agree_on_length(self, message: bytes) -> tuple[Tensor, int]:
        """Return this rank's message, padded to the length of the longest of all ranks, and that length."""
        length = torch.tensor([len(message)], dtype=torch.int64, device="cpu")
        with _lost_peers():
            dist.all_reduce(length, op=dist.ReduceOp.MAX, group=self.group)
        longest = _checked(int(length.item()))
        padded = torch.zeros(longest, dtype=torch.uint8, device="cpu")
        if message:
            padded[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        return padded, longest

    def _broadcast(self, answer: Answer, source: int) -> Answer:
        message = _encode(answer) if self.rank == source else b""
        length = torch.tensor([len(message)], dtype=torch.int64, device="cpu")
        with _lost_peers():
            dist.broadcast(length, group=self.group, group_src=source)
        data = torch.zeros(_checked(int(length.item())), dtype=torch.uint8, device="cpu")
        if message:
            data = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        if data.numel():
            with _lost_peers():
                dist.broadcast(data, group=self.group, group_src=source)
        return answer if self.rank == source else _decode(data)

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
        self.gather(lambda: result.append(work()))  # which is None: nothing is sent where all is well
        return result[0]

    def send(self, data: Tensor, target: int) -> None:
        """Send bytes to rank `target`, which calls `receive`; only these two call it.

        Args:
            data: uint8 [bytes], on the CPU.
        """
        with _lost_peers():
            dist.send(data, group=self.group, group_dst=target)

    def receive(self, into: Tensor, source: int) -> None:
        """Receive the bytes that rank `source` sends; see `send`."""
        with _lost_peers():
            dist.recv(into, group=self.group, group_src=source)

    def broadcast(self, value: T, source: int) -> T:
        """Return the value of rank `source` on all ranks."""
        if self.group is None:
            return value
        received: T = self._broadcast([value, None] if self.rank == source else FINE, source)[0]
        return received


@dataclass(frozen=True)
class RankGroups:
    """The groups on which the ranks of one Checkpointer communicate.

    Attributes:
        training: all ranks, for the thread that trains.
        writing: all ranks, for the thread that writes: its messages must not meet those of the thread that trains.
        on_host: the ranks of this host, for the thread that trains; `training` if there is one host.
    """

    training: RankGroup
    writing: RankGroup
    on_host: RankGroup

    @classmethod
    def make(cls, training: RankGroup, hosts: Sequence[str]) -> RankGroups:
        """Make the groups. All ranks call it together.

        Args:
            hosts: host name of every rank.
        """
        writing = training.own_group()
        if len(set(hosts)) == 1:
            return cls(training, writing, training)
        own_host = hosts[training.rank]
        return cls(training, writing, training.subgroup([rank for rank, host in enumerate(hosts) if host == own_host]))

    def end(self) -> None:
        """Destroy the groups that were made here."""
        self.writing.end()
        if self.on_host is not self.training:
            self.on_host.end()


def _sentence(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno is not None:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{os.strerror(error.errno)}"
    return str(error) or type(error).__name__


def _hint(error: BaseException) -> str | None:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some space; `checkpoints RUN prune` removes checkpoints that are no longer needed"
    return storage_hint(error) if isinstance(error, OSError) else None


def _encode(answer: Answer) -> bytes:
    return b"" if answer == FINE else encode(answer)


def _decode(data: Tensor) -> Answer:
    """Return the answer in a message.

    Args:
        data: uint8 [bytes], the message and padding; nothing, or zeros alone, is the empty message.
    """
    if data.numel() == 0 or int(data[0]) == 0:
        return FINE
    answer = decode(data.numpy().data)
    if not isinstance(answer, list) or len(answer) != 2:
        raise CheckpointError(f"a rank has sent {str(answer)[:100]}, which is no answer")
    return answer


def _decode_all(rows: Tensor) -> list[Answer]:
    return [_decode(row) for row in rows]


def _checked(length: int) -> int:
    if not 0 <= length <= LONGEST:
        raise CheckpointError(
            f"a rank speaks of a message of {length} bytes", hint="do all ranks run the same version of slurmtrain?"
        )
    return length


def _results(answers: Sequence[Answer]) -> list[Any]:
    failures = [failure for _, failure in answers if failure is not None]
    if failures:
        error = decode_failure(failures[0])
        if len(failures) > 1:
            others = f"{len(failures) - 1} more ranks" if len(failures) > 2 else "one more rank"
            error = type(error)(f"{error.message} (and {others})", hint=error.hint)
        raise error
    return [result for result, _ in answers]


@contextmanager
def _lost_peers() -> Iterator[None]:
    """Raise gloo's errors, when a rank is gone or the group was ended, as one sentence."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        text = re.sub(r"^\[[^]]*\] ?", "", str(error).strip())  # gloo begins with a path of its build
        first = (text or type(error).__name__).splitlines()[0]
        raise LostPeersError(f"the ranks lost each other while they saved or restored: {first}") from None
