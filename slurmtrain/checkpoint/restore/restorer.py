"""The restore of a training state: rank 0 chooses the newest complete checkpoint, all ranks check it and load it.

A checkpoint that is damaged is set aside, and the next older one is chosen. Where the directory has none, the newest
copy is fetched from the mirror. Files that the nodes have copies of are read there (`node_folder`). Differences between
checkpoint and training are refused with a diff, unless they are allowed: torch itself
loads what fits and leaves the rest at its initial values, or converts it, without a message. Contents are verified before
the first tensor is touched (`reader`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slurmtrain.checkpoint import module_state, state
from slurmtrain.checkpoint.errors import CheckpointError, CheckpointMismatchError, UnreadableError
from slurmtrain.checkpoint.format import blocks
from slurmtrain.checkpoint.format.directory import (
    committed,
    damaged,
    file_name,
    own_name,
    own_names,
    set_aside,
    step_of,
)
from slurmtrain.checkpoint.format.headers import Contents, FileContents, HeaderReader, damage_of
from slurmtrain.checkpoint.format.manifest import (
    Manifest,
    TensorFacts,
    parse_manifest,
    read_manifest_bytes,
)
from slurmtrain.checkpoint.ranks import CheckpointIdentity, RankGroup
from slurmtrain.checkpoint.restore.reader import read_tensors
from slurmtrain.checkpoint.store import retention
from slurmtrain.checkpoint.tensors import dtype_name
from slurmtrain.choices import DECODERS, Allow
from slurmtrain.errors import UsageError, nearest
from slurmtrain.system.patience import refresh

if TYPE_CHECKING:
    from slurmtrain.checkpoint.node_folder import NodeFolder
    from slurmtrain.checkpoint.store.mirror import MirrorUploader

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Restored:
    """The checkpoint that was restored, and why it was chosen.

    Attributes:
        path: folder of the checkpoint.
        step: optimiser steps done.
        incarnation_label: the incarnation that saved it; empty: it is a folder of another program's weights.
        set_aside: what was wrong with newer checkpoints that were set aside.
        asked_for: the caller named this checkpoint.
        left_out: names of the objects that it has and that nobody asked for.
        as_start: another training starts with some of its objects.
        origin: where files of it were read, if not in the directory alone: the copies on the nodes.
    """

    path: Path
    step: int
    incarnation_label: str
    set_aside: tuple[str, ...] = ()
    asked_for: bool = False
    left_out: tuple[str, ...] = ()
    as_start: bool = False
    origin: str = ""

    @property
    def sentence(self) -> str:
        if self.as_start and not self.incarnation_label:
            return f"beginning at step 0 with the weights in {self.path}"
        if self.as_start:
            return f"beginning at step 0 with a part of {self.path}, of its step {self.step}"
        skipped = f" ({len(self.set_aside)} newer set aside: {'; '.join(self.set_aside)})" if self.set_aside else ""
        why = "as asked for" if self.asked_for else "the newest complete checkpoint"
        left_out = f"; it has more that was not asked for: {', '.join(self.left_out)}" if self.left_out else ""
        origin = f", from {self.origin}" if self.origin else ""
        return f"resuming at step {self.step} from {self.path.name}, {why}{skipped}{origin}{left_out}"


@dataclass(frozen=True)
class RestoreRequest:
    """What a caller wants restored; see `Checkpointer.restore`.

    Attributes:
        objects: those that all ranks share.
        own_objects: those that this rank has for itself.
        path: the checkpoint that was asked for; None: the newest.
        at_most: without `path`, the newest of at most this step; None: of any step.
    """

    objects: Mapping[str, Any]
    own_objects: Mapping[str, Any]
    path: Path | None = None
    allow: Collection[str] = ()
    as_start: bool = False
    at_most: int | None = None


@dataclass(frozen=True)
class Restorer:
    """Restores checkpoints of one directory. All ranks call `restore` together.

    Attributes:
        ranks, ranks_on_host: all ranks, and those of this host.
        borrow_buffer: returns host memory of a size, to read into.
        changed: see `Checkpointer`.
    """

    ranks: RankGroup
    ranks_on_host: RankGroup
    identity: CheckpointIdentity
    borrow_buffer: Callable[[int], memoryview]
    mirror_uploader: MirrorUploader | None
    node_folder: NodeFolder | None
    changed: frozenset[str]

    def restore(self, request: RestoreRequest) -> Restored | None:
        """Load the newest sound checkpoint of the directory, or the one that was asked for; None: there is no checkpoint."""
        set_aside: list[str] = []
        fetched: list[str] = []  # names in the mirror of the copies that were fetched
        while True:
            choice = self.ranks.on_rank_0(partial(self._choose, request.path, request.at_most))
            if choice is None:
                copy = None
                if self.mirror_uploader is not None:
                    copy = self.mirror_uploader.fetch(self.ranks, request.at_most, fetched)
                if copy is not None:
                    fetched.append(copy[1])
                    continue
                if request.at_most is None:
                    self._check_never_damaged(set_aside)
                return None
            path, damage = Path(choice[0]), choice[1]
            if not damage:
                manifest = parse_manifest(path, choice[2].encode(), choice[3])
                with retention.reading(path):
                    origin = "the copies on the nodes" if (copies := self._copies(path, choice[3], manifest)) else ""
                    damage = self._load(path, copies or path, manifest, request)
                    if damage and origin:
                        if self.ranks.rank == 0:
                            log.warning("not from the copies on the nodes: %s: %s", path.name, "; ".join(damage))
                        origin, damage = "", self._load(path, path, manifest, request)
            if not damage:
                break
            if request.path is not None:
                raise CheckpointError(
                    f"{path} was requested but is damaged: {'; '.join(damage)}", hint="name another checkpoint"
                )
            self.ranks.on_rank_0(partial(self._set_aside, path, damage))
            set_aside.append(f"{path.name}: {damage[0]}")
        left_out = sorted(state.object_names(manifest.tensors, manifest.state) - request.objects.keys())
        return Restored(
            path,
            manifest.step,
            manifest.incarnation_label,
            tuple(set_aside),
            asked_for=request.path is not None,
            left_out=tuple(left_out),
            as_start=request.as_start,
            origin=origin,
        )

    def _copies(self, path: Path, digest: str, manifest: Manifest) -> Path | None:
        """Return where this rank finds the files of the checkpoint `path` if any node has copies of them; None: none has."""
        if self.node_folder is None:
            return None
        folder = self.node_folder
        found = self.ranks_on_host.on_rank_0(lambda: str(folder.view(path, digest, manifest.files) or ""))
        return Path(found or path) if self.ranks.maximum(int(found != "")) else None

    def _choose(self, asked_for: Path | None, at_most: int | None) -> list[Any] | None:
        """Choose, on rank 0, the checkpoint to read, and look at everything but the contents of its files.

        Returns:
            Its path; what is wrong with its manifest or the sizes of its files, one sentence each; the text of its
                manifest.json, and its digest by COMPLETE. None: there is none.
        """
        if asked_for is not None:
            path = asked_for
            if not path.is_dir():
                raise CheckpointError(
                    f"{path} was requested but does not exist", hint="`checkpoints RUN list` shows what is"
                )
        else:
            directory = self.identity.directory
            with suppress(OSError):
                refresh(directory)
            candidates = blocks.patiently(partial(committed, directory), directory)
            if at_most is not None:
                candidates = [path for path in candidates if step_of(path) <= at_most]
            if not candidates:
                return None
            path = candidates[-1]
        texts, damage = (b"", ""), []
        try:
            texts = read_manifest_bytes(path)
            damage = blocks.find_damage(path, parse_manifest(path, *texts).files, contents=False)
        except (CheckpointMismatchError, UnreadableError):
            raise
        except CheckpointError as error:
            damage = [damage_of(path, error)]
        return [str(path), damage, texts[0].decode(errors="replace"), texts[1]]

    def _set_aside(self, path: Path, damage: list[str]) -> None:
        """Set a damaged checkpoint aside, on rank 0."""
        set_aside(path)
        log.warning("%s is damaged and was set aside: %s", path.name, "; ".join(damage))

    def _check_never_damaged(self, set_aside: list[str]) -> None:
        """Raise CheckpointMismatchError if there were checkpoints, all of which are damaged.

        An attempt before this one may have set them aside and failed; this one must not start afresh either.
        """
        set_aside = set_aside or self.ranks.on_rank_0(lambda: damaged(self.identity.directory))
        if set_aside:
            raise CheckpointMismatchError(
                f"every checkpoint in {self.identity.directory} is damaged: {'; '.join(set_aside)}",
                hint="look at the *.damaged-* folders; delete them to start from scratch",
            )

    def _load(self, path: Path, folder: Path, manifest: Manifest, request: RestoreRequest) -> list[str]:
        """Fill the objects, unless the checkpoint is damaged: then return what is wrong, and touch nothing.

        Args:
            folder: where this rank reads the files of the checkpoint `path`.
        """
        if request.path is None:
            hint = f"move it away, or start from it on purpose: checkpoint.restore_from={path}"
            self.identity.check_run(path, manifest, hint=hint)
        found = self.ranks.gather(lambda: self._read_headers(folder, manifest))
        if damage := sorted({each["damage"] for each in found if "damage" in each}):
            return damage
        files = {name: held for each in found for name, held in each["files"].items()}
        contents = Contents(manifest.tensors, {name: FileContents.from_json(files[name]) for name in sorted(files)})
        try:
            contents.check_whole(path)
        except CheckpointError as error:
            return [damage_of(path, error)]
        own_file: str | None = file_name(self.ranks.rank)
        if own_file not in contents.files or request.as_start:
            own_file = None  # a rank that did not exist, or another training
        wanted = self.ranks.all_do(lambda: set(module_state.module_tensors(request.objects)))
        on_any_rank = wanted
        if self.ranks.maximum(int(bool(of_modules(request.objects, contents.facts) - wanted))):
            on_any_rank = set().union(*self.ranks.gather(lambda: sorted(wanted)))
        targets, own_targets = self.ranks.all_do(
            lambda: self._find_targets(path, manifest, request, wanted, on_any_rank, own=own_file is not None)
        )
        in_file = partial(own_name, self.ranks.rank)
        damage, own_plain = read_tensors(
            folder,
            contents,
            manifest.files,
            targets | {in_file(name): tensor for name, tensor in own_targets.items()},
            own_file,
            live=wanted | {in_file(name) for name in module_state.module_tensors(request.own_objects)},
            ranks=self.ranks,
            on_this_host=self.ranks_on_host,
            buffer=self.borrow_buffer,
        )
        if damage:
            return damage

        def load() -> None:
            lenient, convert = "keys" in request.allow, "dtypes" in request.allow
            state.load_objects(request.objects, targets, manifest.state, lenient=lenient, convert=convert)
            state.load_objects(request.own_objects, own_targets, own_plain, lenient=True)

        self.ranks.all_do(load)
        return []

    def _read_headers(self, path: Path, manifest: Manifest) -> dict[str, Any]:
        """Return what is in this rank's share of the files, or what is wrong with one of them, as values to send."""
        names = sorted(manifest.files)[self.ranks.rank :: self.ranks.size]
        try:
            files = HeaderReader(path, manifest).read(names)
        except UnreadableError:
            raise
        except CheckpointError as error:
            return {"damage": damage_of(path, error)}
        return {"files": {name: held.to_json() for name, held in files.items()}}

    def _find_targets(
        self,
        path: Path,
        manifest: Manifest,
        request: RestoreRequest,
        wanted: Collection[str],
        on_any_rank: Collection[str],
        *,
        own: bool,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the tensors to fill on this rank, by name, after everything that differs was found to be allowed.

        Args:
            wanted: names of the tensors of this rank's modules.
            on_any_rank: names of the tensors of all ranks' modules.
            own: the checkpoint has what this rank has for itself; its tensors are the second ones that are returned.
        """
        objects, own_objects, allow = request.objects, request.own_objects, request.allow
        saved_config, config = manifest.config, self.identity.config
        if request.as_start:
            saved_config, config = (
                {key: each[key] for key in objects if key in each} for each in (saved_config, config)
            )
        asked_for = request.path is not None
        check_config(path, saved_config, config, allow, changed=self.changed, asked_for=asked_for)
        facts = manifest.tensors
        alone = check_names(path, objects, wanted, on_any_rank, facts, manifest.state, allow)
        useful = {name: fact for name, fact in facts.items() if name not in alone}
        targets = check_tensors(path, state.templates(objects, useful), facts, allow)
        if not own:
            return targets, {}
        own_facts = {name: facts[called] for name, called in own_names(facts, self.ranks.rank).items()}
        names = module_state.module_tensors(own_objects)
        check_names(path, own_objects, names, names, own_facts, None, allow)
        return targets, check_tensors(path, state.templates(own_objects, own_facts), own_facts, allow)


KINDS = tuple(Allow)
FINGERPRINT = "data_fingerprint"  # in the config that a checkpoint is bound to: of the data's content
SHOWN = 5


def check_allowed(allow: Collection[str]) -> None:
    """Raise UsageError if `allow` has a kind of difference that is not known."""
    for kind in allow:
        if kind not in KINDS:
            raise UsageError(f"{kind!r} is not a kind of difference that can be allowed", hint=nearest(kind, KINDS))


def check_config(
    path: Path,
    saved: Mapping[str, Any],
    own: Mapping[str, Any],
    allow: Collection[str],
    *,
    changed: Collection[str] = (),
    asked_for: bool = False,
) -> None:
    """Compare the config values that a checkpoint is bound to with those of this run.

    Args:
        changed: keys that a person has changed on purpose since it was saved; they, and all keys below them, may
            differ.
        asked_for: the checkpoint is of another run and was named by the person.

    Raises:
        CheckpointMismatchError: they differ.
    """
    if not saved or not own:
        return
    if (own.get("model") or {}).get(
        "_target_"
    ) in DECODERS and "lora" not in own:  # adapters mean nothing beside other weights
        changed = {*changed, "model.path"}  # where its first weights came from, not what it computes
    before, now = dict(_leaves(saved)), dict(_leaves(own))
    differing = [
        key for key in sorted({*before, *now}) if before.get(key) != now.get(key) or (key in before) != (key in now)
    ]
    lines = {key: f"{key}: {before.get(key, '(not there)')} -> {now.get(key, '(not there)')}" for key in differing}
    content = lines.pop(FINGERPRINT, None)
    if "config" not in allow:
        unasked = [line for key, line in lines.items() if not _is_under(key, changed)]
        _refuse(path, "config", "was saved with another config", unasked)
    others = [line for key, line in lines.items() if key.startswith("data.")]
    # In the same run, other data by config is allowed or refused as such: this is about other content in the same place.
    if content and FINGERPRINT in before and "data" not in allow and (asked_for or not others):
        raise CheckpointMismatchError(
            f"{path} was saved with other data: {'; '.join([*others, content])}: its step, its schedule and its place "
            "among the samples would be carried onto this data",
            hint="to restart with its weights: checkpoint.restore_only=model; to continue at its step with the current data "
            f"anyway: checkpoint.allow=[{'config,' if others else ''}data]",
        )


def of_modules(objects: Mapping[str, Any], saved: Iterable[str]) -> set[str]:
    """Return the names of the checkpoint that belong to modules among `objects`, without extra state, which may come and go."""
    prefixes = tuple(f"{key}." for key, value in objects.items() if isinstance(value, torch.nn.Module))
    return {name for name in saved if prefixes and name.startswith(prefixes) and not module_state.is_extra(name)}


def check_names(
    path: Path,
    objects: Mapping[str, Any],
    wanted: Collection[str],
    everywhere: Collection[str],
    saved: Collection[str],
    plain: Collection[str] | None,
    allow: Collection[str],
) -> set[str]:
    """Check that checkpoint and objects have the same names, and return the names that only the checkpoint has.

    Args:
        wanted: names of the tensors of this rank's modules.
        everywhere: names of the tensors of all ranks' modules: a pipeline stage has only a part of them.
        plain: names of objects with state that is no tensor; None: not known yet.

    Raises:
        CheckpointMismatchError: one has names that the other lacks.
    """
    alone = of_modules(objects, saved) - set(everywhere)
    lines = [
        f"- {key} is not in the checkpoint"
        for key, value in objects.items()
        if plain is not None and not isinstance(value, torch.nn.Module) and key not in plain
    ]
    lines += [f"- {name} is not in the checkpoint" for name in sorted(set(wanted) - set(saved))]
    lines += [f"+ {name} is in the checkpoint alone" for name in sorted(alone)]
    if "keys" not in allow:
        _refuse(path, "keys", "does not fit", lines)
    return alone


def check_tensors(
    path: Path, targets: Mapping[str, Tensor], saved: Mapping[str, TensorFacts], allow: Collection[str]
) -> dict[str, Tensor]:
    """Check shapes and dtypes, and return the targets that can be filled.

    Raises:
        CheckpointMismatchError: a shape or a dtype differs.
    """
    fit = {name: tensor for name, tensor in targets.items() if name in saved}  # others are allowed by `check_names`
    shapes, dtypes = [], []
    for name, tensor in fit.items():
        fact = saved[name]
        if tuple(tensor.shape) != fact.shape:
            shapes.append(f"{name} is {list(fact.shape)} there and {list(tensor.shape)} here")
        elif dtype_name(tensor.dtype) != fact.dtype:
            dtypes.append(f"{name} is {fact.dtype} there and {dtype_name(tensor.dtype)} here")
    _refuse(path, None, "does not fit", shapes)
    if "dtypes" not in allow:
        _refuse(path, "dtypes", "does not fit", dtypes)
    return fit


def _refuse(path: Path, kind: str | None, what: str, lines: list[str]) -> None:
    if lines:
        shown = "; ".join(lines[:SHOWN]) + (f"; and {len(lines) - SHOWN} more" if len(lines) > SHOWN else "")
        raise CheckpointMismatchError(
            f"{path} {what}: {shown}",
            hint="was the model or the config changed since?"
            + (f" To continue all the same: checkpoint.allow=[{kind}]" if kind else ""),
        )


def _is_under(key: str, others: Collection[str]) -> bool:
    return any(key == other or key.startswith(f"{other}.") for other in others)


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
