"""Save and restore of a whole training state by all ranks, under the commit protocol.

Writing is synchronous torch.distributed.checkpoint; `save` and `restore` are the interface, behind which it may become
asynchronous. Knows no trainer: it is given objects by name.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from slurmtrain.checkpoint import commit, state
from slurmtrain.checkpoint.commit import FileRecord, Incarnation, Manifest
from slurmtrain.errors import CheckpointError, CheckpointMismatch

T = TypeVar("T")
ONLY_LIFE = Incarnation(0)


@dataclass(frozen=True)
class Saved:
    """One committed checkpoint: where, of which step, how long all ranks were held up for it (seconds)."""

    path: Path
    step: int
    seconds: float


@dataclass(frozen=True)
class Restored:
    """What was restored, and why this one and no newer one."""

    path: Path
    step: int
    incarnation_label: str
    set_aside: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        skipped = f" ({len(self.set_aside)} newer set aside: {'; '.join(self.set_aside)})" if self.set_aside else ""
        return f"resuming at step {self.step} from {self.path.name}, the newest complete checkpoint{skipped}"


class Checkpointer:
    """Checkpoints in one directory, written and read by all ranks of a process group together.

    Args:
        directory: shared by all ranks; final names are `checkpoint_<step>`.
        group: a gloo group of all ranks that nothing else uses, or None for a single process.
        incarnation: which life of the run this is; an older one is refused.
        run_id: written into the manifest.
        keep_last: how many complete checkpoints stay; at least 2.
        verify: compare digests before a tensor is touched, not only sizes.
        say: where one line about a restore or a damaged checkpoint goes (rank 0 only).

    Raises:
        CheckpointError: a newer incarnation of the run has been here.
    """

    def __init__(
        self,
        directory: Path | str,
        *,
        group: dist.ProcessGroup | None = None,
        incarnation: Incarnation = ONLY_LIFE,
        run_id: str = "",
        keep_last: int = 2,
        verify: bool = True,
        say: Callable[[str], None] | None = None,
    ):
        if keep_last < 2:
            raise CheckpointError(
                f"keep_last={keep_last}: at least 2, since one has to be left while the next is checked"
            )
        self.directory = Path(directory)
        self._group = group
        self._rank = dist.get_rank(group) if group is not None else 0
        self._world_size = dist.get_world_size(group) if group is not None else 1
        self._incarnation = incarnation
        self._run_id = run_id
        self._keep_last = keep_last
        self._verify = verify
        self._say = say or (lambda text: print(f"slurmtrain: {text}", file=sys.stderr, flush=True))
        self._random = state.RandomState()
        self.last_step: int | None = None
        self._on_rank_0(lambda: commit.claim(self.directory, self._incarnation))

    def save(self, step: int, *, per_rank: Mapping[str, Any] | None = None, **objects: Any) -> Saved:
        """Save `objects` as the state after `step` optimiser steps. All ranks call it together.

        Args:
            step: optimiser steps done.
            per_rank: objects that differ between ranks, by name. The random state of every rank is always included.
            objects: modules, optimisers, anything with state_dict and load_state_dict, or plain JSON values.

        Raises:
            CheckpointError: on every rank, when any of them could not write. The older checkpoints are as they were.
        """
        started = time.monotonic()
        temporary = self._on_rank_0(lambda: commit.begin(self.directory, step, self._incarnation))
        tensors, plain = state.flatten(objects)
        own_tensors, own_plain = state.flatten(self._own(per_rank))
        records = self._gather(lambda: self._write(temporary, {**tensors, **own_tensors}, own_plain))
        final = self._on_rank_0(lambda: self._commit(temporary, step, records, plain))
        self.last_step = step
        return Saved(final, step, time.monotonic() - started)

    def restore(self, *, per_rank: Mapping[str, Any] | None = None, **objects: Any) -> Restored | None:
        """Load the newest checkpoint that is complete and undamaged into `objects`. All ranks call it together.

        Plain JSON values are not given back here; see `read`.

        Returns:
            None when there is no checkpoint: a fresh start.

        Raises:
            CheckpointMismatch: there are checkpoints, but none fits or none is sound.
        """
        set_aside: list[str] = []
        while True:
            path = self._on_rank_0(self._newest)
            if path is None:
                # An attempt before this one may have set them aside and failed; this one must not start afresh either.
                set_aside = set_aside or self._on_rank_0(lambda: commit.damaged(self.directory))
                if set_aside:
                    raise CheckpointMismatch(
                        f"every checkpoint in {self.directory} is damaged: {'; '.join(set_aside)}",
                        hint="look at the *.damaged-* folders; delete them to start afresh",
                    )
                return None
            manifest, damage = self._inspect(path)
            if not damage:
                break
            self._on_rank_0(partial(commit.set_aside, path))
            set_aside.append(f"{path.name}: {damage[0]}")
            if self._rank == 0:
                self._say(f"{path.name} is damaged and was set aside: {'; '.join(damage)}")
        assert manifest is not None
        self._load(path, manifest, {**objects}, self._own(per_rank))
        self.last_step = manifest.step
        restored = Restored(path, manifest.step, manifest.incarnation_label, tuple(set_aside))
        if self._rank == 0:
            self._say(restored.sentence)
        return restored

    def _own(self, per_rank: Mapping[str, Any] | None) -> dict[str, Any]:
        """This rank's own objects under its own keys: one key on all ranks would keep one rank's value."""
        prefix = f"rank{self._rank:05d}/"
        return {prefix + key: value for key, value in {"random": self._random, **(per_rank or {})}.items()}

    def _write(self, temporary: Path, tensors: dict[str, torch.Tensor], own: dict[str, Any]) -> dict[str, FileRecord]:
        """Write this rank's share and say what was written. thread_count=1: other threads' errors would be lost."""
        writer = dcp.FileSystemWriter(temporary, single_file_per_rank=True, sync_files=True, thread_count=1)
        with _failures_as_checkpoint_errors(temporary):
            dcp.save(tensors, storage_writer=writer, process_group=self._group, no_dist=self._group is None)
            own_file = temporary / f"rank{self._rank:05d}.json"
            commit.write_synced(own_file, json.dumps(own))
        names = [path for path in temporary.iterdir() if path.name.startswith(f"__{self._rank}_")]
        if self._rank == 0:
            names.append(temporary / ".metadata")  # DCP fsyncs it before it is written; digest() does after
        return {path.name: commit.digest(path) for path in [*names, own_file]}

    def _commit(self, temporary: Path, step: int, records: list[dict[str, FileRecord]], plain: dict[str, Any]) -> Path:
        files = {name: record for rank_files in records for name, record in rank_files.items()}
        manifest = Manifest(
            format=commit.FORMAT,
            run_id=self._run_id,
            step=step,
            incarnation=self._incarnation.order,
            incarnation_label=self._incarnation.label,
            world_size=self._world_size,
            torch_version=torch.__version__,
            files=files,
            tensors=_check_coverage(temporary, files),
            state=plain,
        )
        final = commit.commit(temporary, manifest, self._incarnation)
        commit.prune(self.directory, keep_last=self._keep_last, incarnation=self._incarnation)
        return final

    def _newest(self) -> Path | None:
        found = commit.committed(self.directory)
        return found[-1] if found else None

    def _inspect(self, path: Path) -> tuple[Manifest | None, list[str]]:
        """The manifest and all damage found; every rank checks its share of the files and hears of all."""

        def share() -> tuple[Manifest, list[str]]:
            manifest = commit.read_manifest(path)
            names = sorted(manifest.files)[self._rank :: self._world_size]
            return manifest, commit.find_damage(path, manifest, names, verify=self._verify)

        try:
            answers = self._gather(share)
        except CheckpointError as error:
            return None, [error.message]
        return answers[0][0], [sentence for _, damage in answers for sentence in damage]

    def _load(self, path: Path, manifest: Manifest, objects: dict[str, Any], own: dict[str, Any]) -> None:
        mine = f"rank{self._rank:05d}/"
        shared = {key: value for key, value in manifest.tensors.items() if not key.startswith("rank") or "/" not in key}
        own_file = path / f"rank{self._rank:05d}.json"
        own_plain = json.loads(own_file.read_text()) if own_file.exists() else None
        _check_keys(path, objects, shared, manifest.state)
        targets = state.templates(objects, shared)
        _check_shapes(path, targets, manifest.tensors)
        if own_plain is not None:
            own_saved = {key: value for key, value in manifest.tensors.items() if key.startswith(mine)}
            targets.update(state.templates(own, own_saved))
        with _failures_as_checkpoint_errors(path):
            dcp.load(
                targets,
                storage_reader=dcp.FileSystemReader(path),
                process_group=self._group,
                no_dist=self._group is None,
            )
        state.put_back(objects, targets, manifest.state)
        if own_plain is not None:
            state.put_back({key: value for key, value in own.items() if key in own_plain}, targets, own_plain)

    def _on_rank_0(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 and give every rank its result, or its failure."""
        if self._group is None:
            try:
                return work()
            except OSError as error:
                raise CheckpointError(str(error)) from None
        answer: list[Any] = [None, None]
        if self._rank == 0:
            try:
                answer[0] = work()
            except CheckpointError as error:
                answer[1] = (error.message, error.hint)
            except OSError as error:
                answer[1] = (f"rank 0: {error}", None)
        dist.broadcast_object_list(answer, group=self._group, group_src=0)
        if answer[1] is not None:
            raise CheckpointError(answer[1][0], hint=answer[1][1])
        result: T = answer[0]
        return result

    def _gather(self, work: Callable[[], T]) -> list[T]:
        """Run `work` on every rank and give each all results; one failure is everybody's, so that nobody waits."""
        result, failure = None, None
        try:
            result = work()
        except (CheckpointError, OSError) as error:
            failure = f"rank {self._rank}: {error}" if self._world_size > 1 else str(error)
        if self._group is None:
            answers: list[Any] = [(result, failure)]
        else:
            answers = [None] * self._world_size
            dist.all_gather_object(answers, (result, failure), group=self._group)
        failures = [failure for _, failure in answers if failure]
        if failures:
            raise CheckpointError(failures[0] + (f" (and {len(failures) - 1} more ranks)" if len(failures) > 1 else ""))
        return [result for result, _ in answers]


def _check_coverage(temporary: Path, files: Mapping[str, FileRecord]) -> dict[str, dict[str, Any]]:
    """Shape and dtype of every tensor, after checking that the pieces that were handed in cover it.

    Raises:
        CheckpointError: elements of a tensor were written by nobody, or to a file that nobody handed in.
    """
    metadata = dcp.FileSystemReader(temporary).read_metadata()
    tensors: dict[str, dict[str, Any]] = {}
    for name, description in metadata.state_dict_metadata.items():
        if not isinstance(description, TensorStorageMetadata):
            continue
        covered = sum(chunk.sizes.numel() for chunk in description.chunks)
        if covered != description.size.numel():
            raise CheckpointError(
                f"{temporary.name}: {covered} of {description.size.numel()} elements of {name} were written"
            )
        tensors[name] = {"shape": list(description.size), "dtype": str(description.properties.dtype)}
    for index, place in (metadata.storage_data or {}).items():
        if place.relative_path not in files:
            raise CheckpointError(
                f"{temporary.name}: {index.fqn} lies in {place.relative_path}, which no rank handed in"
            )
    return tensors


def _check_keys(path: Path, objects: Mapping[str, Any], saved: Mapping[str, Any], plain: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of another model: what is missing would keep its initial values without a word."""
    wanted: set[str] = set()
    for key, value in objects.items():
        if isinstance(value, torch.nn.Module):
            wanted.update(f"{key}.{name}" for name in state.unwrap(value).state_dict())
    prefixes = tuple(f"{key}." for key, value in objects.items() if isinstance(value, torch.nn.Module))
    have = {name for name in saved if name.startswith(prefixes)} if prefixes else set()
    missing, extra = sorted(wanted - have), sorted(have - wanted)
    missing += [key for key, value in objects.items() if not isinstance(value, torch.nn.Module) and key not in plain]
    if missing or extra:
        parts = [f"it lacks {_some(missing)}"] * bool(missing) + [f"it has {_some(extra)} besides"] * bool(extra)
        raise CheckpointMismatch(
            f"{path} does not fit: {' and '.join(parts)}", hint="was the model changed since it was saved?"
        )


def _check_shapes(path: Path, targets: Mapping[str, torch.Tensor], saved: Mapping[str, Mapping[str, Any]]) -> None:
    for name, tensor in targets.items():
        found = saved[name]
        if list(tensor.shape) != found["shape"] or str(tensor.dtype) != found["dtype"]:
            raise CheckpointMismatch(
                f"{path} does not fit: {name} is {found['dtype']} {found['shape']} there and "
                f"{tensor.dtype} {list(tensor.shape)} here",
                hint="was the model changed since it was saved?",
            )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


@contextmanager
def _failures_as_checkpoint_errors(path: Path) -> Iterator[None]:
    """DCP's CheckpointException is a BaseException that `except Exception` does not catch, with a traceback a rank."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process: as intended
            yield
    except CheckpointException as error:
        first = next(iter(error.failures.items()), (0, ("", "")))
        raise CheckpointError(f"{path}: rank {first[0]}: {first[1][0] or error}") from None
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{path}: {error}") from None
