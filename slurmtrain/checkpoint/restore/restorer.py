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

from slurmtrain.checkpoint import state
from slurmtrain.checkpoint.errors import CheckpointError, CheckpointMismatchError, DamagedError
from slurmtrain.checkpoint.format.blocks import patiently, read_manifest_text
from slurmtrain.checkpoint.format.directory import OWN, committed, damaged, own_name, set_aside, step_of
from slurmtrain.checkpoint.format.manifest import Manifest, parse_manifest
from slurmtrain.checkpoint.ranks import CheckpointIdentity, RankGroup
from slurmtrain.checkpoint.restore.reader import read_contents, read_tensors
from slurmtrain.checkpoint.store import retention
from slurmtrain.checkpoint.tensors import EXTRA_KEY, dtype_name
from slurmtrain.choices import DECODERS, Allow
from slurmtrain.errors import UsageError, nearest
from slurmtrain.system.files import refresh

if TYPE_CHECKING:
    from slurmtrain.checkpoint.node_folder import NodeFolder
    from slurmtrain.checkpoint.state import LiveState
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
class Restorer:
    """One restore, as `Checkpointer.restore` describes it. All ranks call `restore` together.

    Attributes:
        ranks, ranks_on_host: all ranks, and those of this host.
        borrow_buffer: returns host memory of a size, to read into.
        changed: see `Checkpointer`.
        objects: those that all ranks share.
        per_rank: those that this rank has for itself; None: what ranks have for themselves is left as it is.
        path: the checkpoint that was asked for; None: the newest.
        at_most: without `path`, the newest of at most this step; None: of any step.
    """

    ranks: RankGroup
    ranks_on_host: RankGroup
    identity: CheckpointIdentity
    borrow_buffer: Callable[[int], memoryview]
    mirror_uploader: MirrorUploader | None
    node_folder: NodeFolder | None
    changed: frozenset[str]
    objects: Mapping[str, Any]
    per_rank: Mapping[str, Any] | None
    path: Path | None
    allow: Collection[str]
    as_start: bool
    at_most: int | None

    def restore(self) -> Restored | None:
        """Load the newest sound checkpoint, or the one that was asked for; None: there is no checkpoint."""
        for kind in self.allow:
            if kind not in KINDS:
                raise UsageError(f"{kind!r} is not a kind of difference that can be allowed", hint=nearest(kind, KINDS))
        set_aside: list[str] = []
        fetched: list[str] = []  # names in the mirror of the copies that were fetched
        while True:
            newest = self.ranks.on_rank_0(self._newest)
            if newest is None:
                copy = None
                if self.mirror_uploader is not None:
                    copy = self.mirror_uploader.fetch(self.ranks, self.at_most, fetched)
                if copy is not None:
                    fetched.append(copy[1])
                    continue
                # An attempt before this one may have set them aside and failed; this one must not start afresh either.
                if self.at_most is None and not set_aside:
                    set_aside = self.ranks.on_rank_0(lambda: damaged(self.identity.directory))
                if self.at_most is None and set_aside:
                    raise CheckpointMismatchError(
                        f"every checkpoint in {self.identity.directory} is damaged: {'; '.join(set_aside)}",
                        hint="look at the *.damaged-* folders; delete them to start from scratch",
                    )
                return None
            path = Path(newest)
            try:
                with retention.reading(path):
                    text, digest = self.ranks.on_rank_0(partial(read_manifest_text, path))
                    manifest = parse_manifest(path, text, digest)
                    about = {"set_aside": tuple(set_aside)}
                    copies = None
                    if self.node_folder is not None:
                        copies = self._copies(self.node_folder, path, digest, manifest)
                    if copies is not None:
                        try:
                            return self._load(path, manifest, copies, origin="the copies on the nodes", **about)
                        except DamagedError as error:
                            if self.ranks.rank == 0:
                                log.warning("not from the copies on the nodes: %s", error.message)
                    return self._load(path, manifest, path, **about)
            except DamagedError as error:
                what = error.message.removeprefix(f"{path} is damaged: ")
            if self.path is not None:
                raise CheckpointError(f"{path} was requested but is damaged: {what}", hint="name another checkpoint")
            self.ranks.on_rank_0(partial(_set_aside, path, what))
            set_aside.append(f"{path.name}: {what}")

    def _newest(self) -> str | None:
        """Return, on rank 0, the path of the checkpoint that was asked for, or of the newest; None: there is none."""
        if self.path is not None:
            if not self.path.is_dir():
                raise CheckpointError(
                    f"{self.path} was requested but does not exist", hint="`checkpoints RUN list` shows what is"
                )
            return str(self.path)
        directory = self.identity.directory
        with suppress(OSError):
            refresh(directory)
        found = patiently(partial(committed, directory), directory)
        if self.at_most is not None:
            found = [path for path in found if step_of(path) <= self.at_most]
        return str(found[-1]) if found else None

    def _copies(self, folder: NodeFolder, path: Path, digest: str, manifest: Manifest) -> Path | None:
        """Return where this rank finds the files of the checkpoint `path` if any node has copies of them; None: none has."""
        found = self.ranks_on_host.on_rank_0(lambda: str(folder.view(path, digest, manifest.files) or ""))
        return Path(found or path) if any(self.ranks.sums([found != ""])) else None

    def _load(self, path: Path, manifest: Manifest, folder: Path, **about: Any) -> Restored:
        """Fill the objects.

        Args:
            folder: where this rank reads the files of the checkpoint `path`.
            about: more fields of what is returned.

        Raises:
            DamagedError: on every rank: it is damaged, and nothing was touched.
        """
        ranks, allow = self.ranks, self.allow
        if self.path is None:
            hint = f"move it away, or start from it on purpose: checkpoint.restore_from={path}"
            self.identity.check_run(path, manifest, hint=hint)
        contents = read_contents(folder, manifest, ranks)
        own_json = own_name(ranks.rank, "")
        # A rank that did not exist keeps what it has; another training does not take over what was a rank's own.
        own = own_json in contents.facts and not self.as_start
        live = ranks.all_do(lambda: state.live_state(self.objects, self.per_rank if own else None, ranks.rank))
        # What the checkpoint alone has of the modules, without extra state, which may come and go. A pipeline stage has only a
        # part of a module, so what others hold has to be known where something seems to be missing.
        prefixes = tuple(f"{key}." for key, value in live.objects.items() if isinstance(value, torch.nn.Module))
        of_modules = (name for name in manifest.tensors if name.startswith(prefixes))
        alone = {name for name in of_modules if EXTRA_KEY not in name.split(".")} - live.tensors.keys()
        if any(ranks.sums([bool(alone)])):
            alone -= set().union(*ranks.all_do(lambda: sorted(live.tensors), list))
        targets = ranks.all_do(lambda: self._find_targets(path, manifest, live, alone))
        own_text = (
            {own_json: torch.empty(contents.facts[own_json].shape, dtype=torch.uint8, device="cpu")} if own else {}
        )
        own_plain = read_tensors(
            folder,
            contents,
            manifest,
            {**targets, **own_text},
            live=live.tensors,
            ranks=ranks,
            on_this_host=self.ranks_on_host,
            buffer=self.borrow_buffer,
        )
        lenient, convert = "keys" in allow, "dtypes" in allow
        plain = {**manifest.state, **own_plain}
        ranks.all_do(lambda: state.load_objects(live, targets, plain, lenient=lenient, convert=convert))
        named = [*manifest.tensors, *(name for name in manifest.state if not name.startswith(state.EXTRA))]
        left_out = {name.partition(".")[0] for name in named if not name.startswith(OWN)} - live.objects.keys()
        return Restored(
            path,
            manifest.step,
            manifest.incarnation_label,
            asked_for=self.path is not None,
            left_out=tuple(sorted(left_out)),
            as_start=self.as_start,
            **about,
        )

    def _find_targets(
        self,
        path: Path,
        manifest: Manifest,
        live: LiveState,
        alone: Collection[str],
    ) -> dict[str, Tensor]:
        """Return the tensors to fill on this rank, by name, after everything that differs was found to be allowed.

        Args:
            live: what this rank's objects hold.
            alone: names that only the checkpoint has of what all ranks' modules should.

        Raises:
            CheckpointMismatchError: config, names, shapes or dtypes differ.
        """
        state.check(live)
        objects, allow, saved, config = live.objects, self.allow, manifest.config, self.identity.config
        if self.as_start:
            saved, config = ({key: each[key] for key in objects if key in each} for each in (saved, config))
        check_config(path, saved, config, allow, changed=self.changed, asked_for=self.path is not None)
        lines = [
            f"- {key} is not in the checkpoint"
            for key, value in objects.items()
            if not (isinstance(value, torch.nn.Module) or key in manifest.state or key.startswith(OWN))
        ]
        lines += [
            f"- {name} is not in the checkpoint" for name in sorted(live.tensors.keys() - manifest.tensors.keys())
        ]
        lines += [f"+ {name} is in the checkpoint alone" for name in sorted(alone)]
        if lines and "keys" not in allow:
            raise _refusal(path, "keys", "does not fit", lines)
        useful = {name: fact for name, fact in manifest.tensors.items() if name not in alone}
        everything = state.templates(live, useful)
        targets = {name: tensor for name, tensor in everything.items() if name in useful}
        shapes, dtypes = [], []
        for name, tensor in targets.items():
            fact = useful[name]
            if tuple(tensor.shape) != fact.shape:
                shapes.append(f"{name} is {list(fact.shape)} there and {list(tensor.shape)} here")
            elif dtype_name(tensor.dtype) != fact.dtype:
                dtypes.append(f"{name} is {fact.dtype} there and {dtype_name(tensor.dtype)} here")
        if shapes:
            raise _refusal(path, None, "does not fit", shapes)
        if dtypes and "dtypes" not in allow:
            raise _refusal(path, "dtypes", "does not fit", dtypes)
        return targets


def _set_aside(path: Path, what: str) -> None:
    """Set a damaged checkpoint aside, on rank 0."""
    set_aside(path)
    log.warning("%s is damaged and was set aside: %s", path.name, what)


KINDS = tuple(Allow)
FINGERPRINT = "data_fingerprint"  # in the config that a checkpoint is bound to: of the data's content
SHOWN = 5


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
        if unasked:
            raise _refusal(path, "config", "was saved with another config", unasked)
    others = [line for key, line in lines.items() if key.startswith("data.")]
    # In the same run, other data by config is allowed or refused as such: this is about other content in the same place.
    if content and FINGERPRINT in before and "data" not in allow and (asked_for or not others):
        raise CheckpointMismatchError(
            f"{path} was saved with other data: {'; '.join([*others, content])}: its step, its schedule and its place "
            "among the samples would be carried onto this data",
            hint="to restart with its weights: checkpoint.restore_only=model; to continue at its step with the current data "
            f"anyway: checkpoint.allow=[{'config,' if others else ''}data]",
        )


def _refusal(path: Path, kind: str | None, what: str, lines: list[str]) -> CheckpointMismatchError:
    """Return an error that shows some lines of what differs.

    Args:
        kind: of the difference, if it can be allowed.
    """
    shown = "; ".join(lines[:SHOWN]) + (f"; and {len(lines) - SHOWN} more" if len(lines) > SHOWN else "")
    return CheckpointMismatchError(
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
