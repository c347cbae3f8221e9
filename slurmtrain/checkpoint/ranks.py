"""Communication between ranks while they save and restore, and the one directory of checkpoints that they agree on.

A failure on one rank is raised on all, so that no rank waits for others. Messages are JSON: reading one executes nothing,
whoever has sent it.
"""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist
from torch import Tensor

from slurmtrain.checkpoint.errors import (
    CheckpointError,
    CheckpointMismatchError,
    DamagedError,
    DiscardedError,
    LostPeersError,
    NodeFolderError,
    NonFiniteError,
    SupersededError,
    UnreadableError,
)
from slurmtrain.checkpoint.format.manifest import Manifest
from slurmtrain.checkpoint.store.commit import Incarnation, claim, claim_file, wait_until_visible
from slurmtrain.errors import storage_hint
from slurmtrain.system.activity import waiting

T = TypeVar("T")
S = TypeVar("S")

# The only errors that a message can name. Never a class by its path: importing what somebody names would execute it.
FAILURES: dict[str, type[CheckpointError]] = {
    kind.__name__: kind
    for kind in (
        *(CheckpointError, DamagedError, CheckpointMismatchError, UnreadableError, SupersededError),
        *(LostPeersError, DiscardedError, NonFiniteError, NodeFolderError),
    )
}
_EXPECTED = (OSError, MemoryError, RuntimeError)
Answer = list[Any]  # result and failure: [kind, message, hint], or None
FINE: Answer = [None, None]  # said by an empty message


def _encode(answer: Answer) -> bytes:
    return b"" if answer == FINE else json.dumps(answer, separators=(",", ":")).encode()


def _decode(message: Tensor) -> Answer:
    """Return the answer in a message, which may be padded with zeros; what is no message is a failure."""
    text = message.numpy().tobytes().rstrip(b"\0")
    try:
        answer: Answer = json.loads(text) if text else FINE
    except ValueError:
        what = f"a rank has sent {text[:8]!r}, which is not the beginning of a message between ranks; it was ignored"
        hint = "do all ranks run the same version of slurmtrain? If so, another program sent it"
        return [None, [CheckpointError.__name__, what, hint]]
    return answer


class RankGroup:
    """The ranks of a gloo group, or a single process (`group` None).

    Every method is called by all of them together.

    Ranks exchange pairs (result, failure), so that an error on one rank becomes a CheckpointError on all. Results are values
    of JSON; another type is turned into these, and back, by the caller.
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

    def of_host(self, hosts: Sequence[str]) -> RankGroup:
        """Return the ranks of this host, of which each has its name in `hosts`. All ranks call it together."""
        if len(set(hosts)) == 1:
            return self
        # With thousands of ranks, it would take minutes if all of them made every group. It is not to be ended: torch names it
        # by its members, so the next one of the same members would have its name, and wait at its addresses for ever.
        members = [rank for rank, host in enumerate(hosts) if host == hosts[self.rank]]
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
        sentence, hint = str(error) or type(error).__name__, None
        if isinstance(error, OSError) and error.errno is not None:
            sentence = (f"{error.filename}: " if error.filename else "") + os.strerror(error.errno)
        if isinstance(error, OSError):
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            prune = "free some space; `checkpoints RUN prune` removes checkpoints that are no longer needed"
            hint = prune if full else storage_hint(error)
        if not isinstance(error, _EXPECTED):
            traceback.print_exc()
            sentence = f"{type(error).__name__}: {error}"
        return CheckpointError((f"rank {self.rank}: " if self.size > 1 else "") + sentence, hint=hint)

    def _attempt(self, work: Callable[[], T]) -> Answer:
        try:
            return [work(), None]
        except Exception as error:
            if self.size == 1 and not isinstance(error, (CheckpointError, *_EXPECTED)):
                raise
            told = self.explain(error)
            kind = next(kind.__name__ for kind in type(told).__mro__ if kind.__name__ in FAILURES)
            return [None, [kind, told.message, told.hint]]

    def on_rank_0(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 and return its result on every rank."""
        result: T = self.broadcast(*(self._attempt(work) if self.rank == 0 else FINE))
        return result

    @overload
    def all_do(self, work: Callable[[], T]) -> T: ...

    @overload
    def all_do(self, work: Callable[[], T], then: Callable[[list[T]], S]) -> S: ...

    def all_do(self, work: Callable[[], Any], then: Callable[[list[Any]], Any] | None = None) -> Any:
        """Run `work` on every rank, then `then` on rank 0 with all results, in the order of ranks, unless one failed.

        Rank 0's own result is not sent: it may be much longer than the others'.

        Returns:
            What `then` has returned, on every rank; without `then`, each rank's own result, and nothing is sent.
        """
        answer = self._attempt(work)
        result = answer[0]
        if then is None:
            answer = [None, answer[1]]
        answers = [answer]
        if self.group is not None:
            message = b"" if self.rank == 0 else _encode(answer)
            longest = torch.tensor([len(message)], dtype=torch.int64, device="cpu")
            self._together(dist.all_reduce, longest, op=dist.ReduceOp.MAX)
            width = int(longest.item())
            rows = torch.zeros(self.size if self.rank == 0 else 0, width, dtype=torch.uint8, device="cpu")
            if width:
                own = torch.frombuffer(bytearray(message.ljust(width, b"\0")), dtype=torch.uint8)
                self._together(dist.gather, own, list(rows) if self.rank == 0 else None, group_dst=0)
            answers += map(_decode, rows[1:])
        failures = [failure for _, failure in answers if failure is not None]
        if failures:
            kind, text, hint = failures[0]
            if len(failures) > 1:
                others = f"{len(failures) - 1} more ranks" if len(failures) > 2 else "one more rank"
                text = f"{text} (and {others})"
            answer = [None, [kind, text, hint]]
        elif then is not None and self.rank == 0:
            answer = self._attempt(lambda: then([each for each, _ in answers]))
        told = self.broadcast(*answer)
        return result if then is None else told

    def broadcast(self, result: Any, failure: Any = None, *, source: int = 0) -> Any:
        """Return the result of rank `source` on all ranks, or raise its failure there."""
        if self.group is not None:
            message = _encode([result, failure]) if self.rank == source else b""
            (length,) = self.sums([len(message)])
            data = torch.zeros(length, dtype=torch.uint8, device="cpu")
            if message:
                data = torch.frombuffer(bytearray(message), dtype=torch.uint8)
            if length:
                self._together(dist.broadcast, data, group_src=source)
            if self.rank != source:
                result, failure = _decode(data)
        if failure is not None:
            kind, text, hint = failure
            raise FAILURES[kind](text, hint=hint)
        return result

    def _together(self, collective: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        """Call a collective of torch.distributed, and tell that this thread waits.

        Raises:
            LostPeersError: a rank is gone, or the group was ended: gloo's errors as one sentence.
        """
        try:
            with waiting():
                collective(*arguments, group=self.group, **options)
        except (RuntimeError, ValueError) as error:
            text = re.sub(r"^\[[^]]*\] ?", "", str(error).strip())  # gloo begins with a path of its build
            first = (text or type(error).__name__).splitlines()[0]
            raise LostPeersError(f"the ranks lost each other while they saved or restored: {first}") from None

    def sums(self, numbers: Sequence[int]) -> list[int]:
        """Return the sums of all ranks' numbers, or how many say yes, each by its place: eight bytes each."""
        if self.group is None or not numbers:
            return list(numbers)
        box = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        self._together(dist.all_reduce, box)
        found: list[int] = box.tolist()
        return found


# The directory of checkpoints. All ranks call these functions together. See `commit` for what an incarnation is, and what
# claiming the directory for it means.


@dataclass(frozen=True)
class CheckpointIdentity:
    """The identity that every checkpoint of this incarnation is bound to.

    Attributes:
        config: JSON values.
    """

    directory: Path
    incarnation: Incarnation
    run_id: str
    config: Mapping[str, Any]

    def check_run(self, where: Path | str, manifest: Manifest, *, hint: str) -> None:
        """Raise CheckpointMismatchError if the checkpoint at `where` belongs to another run."""
        if self.run_id and manifest.run_id != self.run_id:
            raise CheckpointMismatchError(
                f"{where} belongs to run {manifest.run_id or '(none)'}, this is run {self.run_id}", hint=hint
            )


def config_as_json(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config in the form that a checkpoint will give it back: tuples as lists, keys as text."""
    try:
        values: dict[str, Any] = json.loads(json.dumps(config))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"config= cannot be written into a checkpoint: {error}", hint="give plain values"
        ) from None
    return values


def check_has_all_ranks(group: dist.ProcessGroup | None) -> None:
    """Check that the process group has all ranks of the job.

    Without it, each rank would save as if alone, into one directory.
    """
    variables = os.environ
    stated = variables.get("WORLD_SIZE")
    if stated is None and "SLURM_PROCID" in variables and "SLURM_STEP_NUM_TASKS" in variables:
        stated = variables["SLURM_STEP_NUM_TASKS"]
    have = dist.get_world_size(group) if group is not None else 1
    if stated is not None and stated.isdigit() and int(stated) > have:
        raise CheckpointError(
            f"this job has {stated} ranks, but the process group has {have}",
            hint="initialise torch.distributed in every rank before you create the Checkpointer (slurmtrain.init() does)",
        )


def claim_directory(
    ranks: RankGroup, directory: Path, incarnation: Incarnation | None, local: Path | str | None = None
) -> tuple[Incarnation, list[str]]:
    """Check that all ranks were given the same directory and see it, and claim it on rank 0; see `commit.claim`.

    Args:
        local: this rank's folder for copies.

    Returns:
        The incarnation, and the host of every rank: ranks of one host see the same files.
    """
    answers = ranks.all_do(lambda: [str(directory.absolute()), f"{socket.gethostname()} {local}"], list)
    first = answers[0][0]
    for rank, (other, _) in enumerate(answers):
        if other != first:
            raise CheckpointError(
                f"rank {rank} was told to save in {other}, rank 0 in {first}",
                hint="choose the directory on rank 0 and broadcast it (a time stamp differs between ranks)",
            )
    label = f"pid {os.getpid()} on {socket.gethostname()}"
    claimed = Incarnation(*ranks.on_rank_0(lambda: astuple(claim(directory, incarnation, label=label))))

    def check_is_shared() -> None:
        path = claim_file(directory, claimed)
        wait_until_visible(path)
        if not path.exists():
            raise CheckpointError(
                f"rank {ranks.rank} on {socket.gethostname()} does not see what rank 0 wrote in {directory}",
                hint="checkpoints need a directory that all nodes share",
            )

    ranks.all_do(check_is_shared)
    return claimed, [host for _, host in answers]
