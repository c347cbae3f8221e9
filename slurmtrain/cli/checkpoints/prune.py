"""checkpoints RUN prune: remove checkpoints that no rule wants, and what killed saves have left."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmtrain.checkpoint.format.directory import COMPLETE, damaged, remove
from slurmtrain.checkpoint.format.manifest import Manifest
from slurmtrain.checkpoint.store import retention
from slurmtrain.checkpoint.store.fencing import CLAIMS
from slurmtrain.checkpoint.store.retention import Keep, Kept
from slurmtrain.cli.checkpoints.target import CheckpointTarget, step_of
from slurmtrain.cli.checkpoints.verify import compare_with_digests
from slurmtrain.cli.columns import format_size
from slurmtrain.errors import CheckpointError, UnreadableRecordError, UsageError, nearest
from slurmtrain.report.checkpoints import inspect
from slurmtrain.runs import ownership
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system import records, trust, user
from slurmtrain.system.files import disk_usage
from slurmtrain.system.records import printable


@dataclass(frozen=True)
class Removal:
    """A folder to remove, with a description for a person."""

    path: Path
    what: str


def prune_checkpoints(target: CheckpointTarget, options: argparse.Namespace) -> int:
    """Remove checkpoints that are no longer wanted.

    The newest checkpoint is verified first: if it were damaged, an older one would be needed. A run that is running may
    be pruned: it only adds newer ones, and the decision concerns those that were there before. It must not be fenced
    off, so no incarnation is claimed: removed checkpoints get the number of the newest incarnation.
    """
    if target.chosen is not None:
        raise UsageError(
            "prune takes a run or a directory of checkpoints, not one of them",
            hint=f"checkpoints {target.directory} prune",
        )
    _require_own(target)
    keep = _keep(target, options)
    found = target.committed()
    removals = _surplus(found, keep, asked=options.best is not None) if keep is not None else []
    if options.damaged:
        removals += [Removal(target.directory / name, "set aside as damaged") for name in damaged(target.directory)]
    if removals:
        _check_newest(target, found)
        in_use = retention.in_use(target.directory, time.time())  # after the verification, which takes time
        held = {step for step, _ in retention.held(target.directory)}
        waited_for = {path.name for path in found if step_of(path) in held} - in_use
        for removal in removals:
            if removal.path.name in in_use:
                print(f"{removal.path.name} is being read and is kept")
            if removal.path.name in waited_for:
                print(f"{removal.path.name} has yet to be evaluated and is kept")
        removals = [removal for removal in removals if removal.path.name not in in_use | waited_for]
    if options.leftovers or (keep is not None and not _by_options(options)):
        removals += [
            Removal(path, "left by a process that was killed")
            for path in retention.leftovers(target.directory, now=time.time())
        ]
    freed, failed = 0, 0
    order = _newest_order(target.directory)
    for removal in removals:
        size = disk_usage(removal.path)
        if not options.dry_run:
            try:
                remove(removal.path, order)
            except OSError as error:
                print(f"{removal.path.name} cannot be removed: {error.strerror}", file=sys.stderr)
                failed += 1
                continue
        freed += size
        print(
            f"{'would remove' if options.dry_run else 'removed'} {removal.path.name} ({removal.what}, {format_size(size)})"
        )
    if not removals:
        print(f"{target.name}: nothing to remove")
    else:
        print(f"{format_size(freed)} {'would be' if options.dry_run else 'were'} freed ({freed} bytes)")
    return 1 if failed else 0


def _require_own(target: CheckpointTarget) -> None:
    """Raise UsageError if the checkpoints belong to another user, or are reached through a link in the run."""
    if target.run is not None:
        ownership.require_own(target.run)
        ownership.check_not_linked(target.run)
    if target.directory.exists() and not trust.is_mine(target.directory):
        raise UsageError(
            f"{target.directory} belongs to {user.in_words(target.directory.lstat().st_uid)}: only they may prune it"
        )


def _by_options(options: argparse.Namespace) -> bool:
    """Return whether the command line says what to keep."""
    return any(value is not None for value in (options.keep_last, options.keep_every, options.best))


def _keep(target: CheckpointTarget, options: argparse.Namespace) -> Keep | None:
    """Return what to keep, by the options or else by the run's config. None: checkpoints are not removed."""
    if options.best is None and (options.metric or options.mode):
        raise UsageError("--metric and --mode define which checkpoints are best", hint="add --best N")
    if not _by_options(options) and (options.damaged or options.leftovers):
        return None
    try:
        if not _by_options(options):
            return _keep_of(target.run) if target.run is not None else Keep()
        last, every, best = (number or 0 for number in (options.keep_last, options.keep_every, options.best))
        return Keep(
            last if options.keep_last is not None else 2,
            every,
            best,
            options.metric or Keep.metric,
            options.mode or Keep.mode,
        )
    except CheckpointError as error:
        raise UsageError(error.message, hint=error.hint) from None


def _keep_of(run: RunDir) -> Keep:
    """Return the rules by which the run itself keeps checkpoints, from its frozen config."""
    if not run.config_file.exists():
        return Keep()
    try:
        config: Any = run.config_values()
        settings: dict[str, Any] = config["checkpoint"]
        return Keep(
            settings.get("keep_last", Keep.last),
            settings.get("keep_every", Keep.every),
            settings.get("keep_best", Keep.best),
            settings.get("best_metric", Keep.metric),
            settings.get("best_mode", Keep.mode),
        )
    except (UnreadableRecordError, ValueError, TypeError, KeyError, AttributeError):
        raise UsageError(
            f"{run.config_file} does not define what to keep", hint="say it here: prune --keep-last N [--keep-every N]"
        ) from None


def _surplus(found: Sequence[Path], keep: Keep, *, asked: bool) -> list[Removal]:
    """Return the checkpoints that no rule wants.

    Visibly damaged ones are neither counted nor removed: a restore sets them aside.
    """
    kept, paths, sound_step = [], [], None
    for path in found:
        manifest, damage = inspect(path)
        if manifest is None or damage:
            print(printable(f"{path.name} is damaged and is left alone: {damage[0]}"))
        else:
            kept.append(Kept(step_of(path), manifest.metrics))
            paths.append(path)
            sound_step = _sound_step(manifest)  # in the end that of the newest one
    if asked and keep.best and kept and not any(keep.metric in (one.metrics or ()) for one in kept):
        known = {name for one in kept for name in one.metrics or ()}
        raise UsageError(
            f"no checkpoint was saved with the metric {keep.metric!r}",
            hint=nearest(keep.metric, known) if known else "none has any metrics",
        )
    steps = set(retention.surplus(kept, keep, soundness=retention.Soundness(sound_step)))
    # A link is left alone: only its maker may remove it.
    return [Removal(path, "not kept") for path in paths if step_of(path) in steps and not path.is_symlink()]


def _sound_step(manifest: Manifest) -> int | None:
    """Return the newest step that the trainer knew to be sound when it saved this checkpoint; None: not known."""
    state: Any = manifest.state
    for name in ("trainer", "health", "sound_step"):
        state = state.get(name) if isinstance(state, dict) else None
    return state if records.is_count(state) else None


def _check_newest(target: CheckpointTarget, found: Sequence[Path]) -> None:
    """Raise CheckpointError unless the newest checkpoint is sound, so that nothing is removed."""
    if not found:
        raise CheckpointError(f"{target.name} has no valid checkpoint, so nothing was removed")
    newest = found[-1]
    with retention.reading(newest):
        _, _, damage = compare_with_digests(newest)
    if damage:
        raise CheckpointError(
            f"{newest.name}, the newest checkpoint, is damaged, so nothing was removed: {'; '.join(damage)}",
            hint="the next start of the run sets it aside and continues from an older one",
        )
    if not (newest / COMPLETE).is_file():
        raise CheckpointError(f"{newest.name} disappeared while it was verified, so nothing was removed")


def _newest_order(directory: Path) -> int:
    claims = directory / CLAIMS
    names = [path.name for path in claims.iterdir()] if claims.is_dir() else []
    return max((int(name) for name in names if re.fullmatch("[0-9]{1,18}", name)), default=0)
