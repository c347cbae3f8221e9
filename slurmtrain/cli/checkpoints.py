"""checkpoints: list, verify and prune checkpoints; export and import are in a module of their own, which loads torch.

Works on a run, on any directory of checkpoints, and on a single one.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from slurmtrain.checkpoint.format import blocks
from slurmtrain.checkpoint.format.directory import (
    COMPLETE,
    FINAL_NAME,
    MANIFEST,
    TEMPORARY_NAME,
    committed,
    damaged,
    remove,
)
from slurmtrain.checkpoint.format.manifest import Manifest, read_manifest
from slurmtrain.checkpoint.store import retention
from slurmtrain.checkpoint.store.fencing import CLAIMS, newest_claim
from slurmtrain.checkpoint.store.retention import Keep, Soundness
from slurmtrain.cli.columns import print_table
from slurmtrain.cli.json_output import print_json
from slurmtrain.cli.stop import say_which
from slurmtrain.cli.units import format_size, with_unit
from slurmtrain.errors import (
    CheckpointError,
    SlurmtrainError,
    UnreadableError,
    UnreadableRecordError,
    UsageError,
    nearest,
)
from slurmtrain.report.checkpoints import inspect
from slurmtrain.report.page.units import plural
from slurmtrain.runs import lookup, ownership
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system import records, trust
from slurmtrain.system.durations import roughly
from slurmtrain.system.files import disk_usage
from slurmtrain.system.paths import runs_root
from slurmtrain.system.records import printable
from slurmtrain.system.trust import user_in_words

HEADER = ("checkpoint", "size", "age", "layout", "metrics", "torch", "written by", "state")
# Fields of the section `checkpoint` of a config, by the field of Keep.
KEEP = {"last": "keep_last", "every": "keep_every", "best": "keep_best", "metric": "best_metric", "mode": "best_mode"}


def main(options: argparse.Namespace) -> int:
    """Run the verb and return its exit code."""
    try:
        if options.action in ("export", "import"):
            from slurmtrain.cli import checkpoints_export

            if options.action == "import":
                return checkpoints_export.import_checkpoint(options)
            return checkpoints_export.export_weights(of_step(find_target(options.run), options.step)[-1], options)
        actions = {"list": list_checkpoints, "verify": verify_checkpoints, "prune": prune_checkpoints}
        return actions[options.action](find_target(options.run), options)
    except SlurmtrainError as error:
        # Names out of a checkpoint must not steer the terminal.
        error.message = printable(error.message)
        error.hint = printable(error.hint) if error.hint else None
        raise


@dataclass(frozen=True)
class CheckpointTarget:
    """The checkpoints that a command is about.

    Attributes:
        directory: directory of the checkpoints.
        name: name of the directory for a person.
        run: the run that it belongs to, if any.
        chosen: the one checkpoint that was named, if any.
    """

    directory: Path
    name: str
    run: RunDir | None = None
    chosen: Path | None = None

    def committed(self) -> list[Path]:
        if self.chosen is not None:
            return [self.chosen]
        return blocks.patiently(partial(committed, self.directory), self.directory)


def find_target(reference: str) -> CheckpointTarget:
    """Return the checkpoints that a person means by RUN.

    Raises:
        UsageError: it is neither a run nor a checkpoint.
    """
    path = Path(reference)
    try:
        is_dir = path.is_dir()
    except (OSError, ValueError) as error:  # too long, or with a null byte
        raise UsageError(f"{reference[:80]!r} is no path: {error}") from None
    if is_dir and not (path / "run.json").is_file():
        path = path.resolve()
        if RunDir(path).exists():
            return CheckpointTarget(RunDir(path).checkpoints, f"run {path.name}", run=RunDir(path))
        if (path / MANIFEST).is_file() or (path / COMPLETE).is_file() or FINAL_NAME.match(path.name):
            return CheckpointTarget(path.parent, str(path), chosen=path)
        if (path / CLAIMS).is_dir() or any(FINAL_NAME.match(entry.name) for entry in path.iterdir()):
            return CheckpointTarget(path, str(path))
        if os.sep in reference or reference in (".", ".."):
            raise UsageError(
                f"{path} is neither a run nor a directory of checkpoints",
                hint="checkpoints are folders called checkpoint_<step>",
            )
    run = lookup.find(reference, runs_root())
    return CheckpointTarget(run.checkpoints, f"run {run.id}", run=run)


def of_step(target: CheckpointTarget, step: int | None) -> list[Path]:
    """Return the committed checkpoints of a step, or all.

    Raises:
        UsageError: there is none.
    """
    found = target.committed()
    chosen = [path for path in found if step in (None, step_of(path))]
    if not chosen:
        if step is None or not found:
            hint = f"status {target.run.id}" if target.run else None
            raise UsageError(f"{target.name} has no checkpoint yet", hint=hint)
        steps = ", ".join(str(step_of(path)) for path in found[-5:])
        raise UsageError(f"{target.name} has no checkpoint of step {step}", hint=f"there are: {steps}")
    return chosen


def step_of(path: Path) -> int:
    """Return the step in the name of a checkpoint; -1: its name has none."""
    match = FINAL_NAME.match(path.name)
    return int(match.group(1)) if match else -1


# list


def list_checkpoints(target: CheckpointTarget, options: argparse.Namespace) -> int:
    """Print a row for everything that is there, by step. Sizes are compared, contents are not: that is `verify`."""
    if target.chosen is not None:
        paths = [target.chosen]
    else:
        try:
            entries = list(target.directory.iterdir()) if target.directory.exists() else []
        except OSError as error:
            raise CheckpointError(f"{target.directory} cannot be read: {error.strerror}") from None
        paths = [path for path in entries if FINAL_NAME.match(path.name) and path.is_dir()]
    if not paths:
        of_step(target, None)
    found = [_describe(path) for path in sorted(paths, key=lambda path: (step_of(path), path.name))]
    if options.json:
        print_json(found)
    else:
        print_table(HEADER, [_row(each) for each in found])
    return 0


def _describe(path: Path) -> dict[str, Any]:
    """Return a checkpoint as `checkpoints RUN --json` prints it.

    `damage` is what is wrong by sizes, in words; `complete` is whether a restore would consider the checkpoint, and
    `state` says why not. Where the storage fails, `complete` is null.
    """
    facts: dict[str, Any] = {"step": step_of(path), "path": str(path), "bytes": None, "damage": [], "complete": False}
    if TEMPORARY_NAME.fullmatch(path.name):
        doing = "removed" if ".removed-" in path.name else "written"
        return facts | {"bytes": disk_usage(path), "state": f"being {doing}, or left by a process that was killed"}
    try:
        manifest, damage = inspect(path)
    except UnreadableError as error:
        return facts | {"complete": None, "state": f"was not read: {error.message}"}
    facts |= {"bytes": disk_usage(path), "damage": damage, "state": damage[0] if damage else "complete"}
    if ".damaged-" in path.name:
        facts["state"] = "set aside as damaged" + (f" ({damage[0]})" if damage else "")
    elif not (path / COMPLETE).is_file():
        facts["state"] = f"was not committed: it has no {COMPLETE}"
    else:
        facts["complete"] = not damage and FINAL_NAME.fullmatch(path.name) is not None
    if manifest is not None:
        facts |= {"world_size": manifest.world_size, "tensors": len(manifest.tensors), "metrics": manifest.metrics}
        facts |= {"torch": manifest.torch_version, "written_by": manifest.incarnation_label}
    return facts


def _row(facts: dict[str, Any]) -> list[str]:
    path, layout, metrics = Path(facts["path"]), "", ""
    if "tensors" in facts:
        layout = f"{plural(facts['world_size'], 'rank')}, {facts['tensors']} tensors"
        metrics = ", ".join(
            f"{name} {with_unit(value) or value}" for name, value in islice(facts["metrics"].items(), 3)
        )
    try:  # since the commit, or else since the folder changed
        marker = path / COMPLETE
        age = roughly(max(0.0, time.time() - (marker if marker.exists() else path).stat().st_mtime))
    except OSError:
        age = "?"
    size = "" if facts["bytes"] is None else format_size(facts["bytes"])
    about = (facts.get("torch", ""), facts.get("written_by", ""), facts["state"])
    return [printable(str(cell)) for cell in (path.name, size, age, layout, metrics, *about)]


# verify


def verify_checkpoints(target: CheckpointTarget, options: argparse.Namespace) -> int:
    """Compare every file with its digest. The exit code is 1 if anything is damaged."""
    aside = damaged(target.directory) if target.chosen is None and options.step is None else []
    paths = of_step(target, options.step) if not aside else target.committed()
    found: list[dict[str, Any]] = []
    for path in paths:
        began = time.monotonic()
        facts: dict[str, Any] = {"step": step_of(path), "path": str(path), "sound": None, "damage": []}
        try:
            with retention.reading(path):
                size, files, damage = compare_with_digests(path)
            facts |= {"sound": not damage, "damage": damage}
            rate = f"{size / 1e6 / max(time.monotonic() - began, 1e-6):.0f} MB/s"
            text = f"DAMAGED: {'; '.join(damage)}" if damage else f"sound ({files} files, {format_size(size)}, {rate})"
        except UnreadableError as error:  # nothing is known about this one; the others may lie elsewhere
            facts["unread"] = error.message
            text = f"NOT READ: {error.message}: that says nothing about the checkpoint"
        found.append(facts)
        if not options.json:
            print(printable(f"{path.name}: {text}"))
    if options.json:
        print_json(found)
    else:
        for name in aside:
            print(f"{name}: set aside as damaged by a restore; nothing reads it, `prune --damaged` removes it")
    return 0 if all(each["sound"] for each in found) else 1


def compare_with_digests(path: Path) -> tuple[int, int, list[str]]:
    """Return bytes and number of files, and everything that is wrong with their contents.

    Raises:
        UnreadableError: the storage fails, and after all retries still does.
    """
    try:
        manifest = read_manifest(path)
    except UnreadableError:
        raise
    except CheckpointError as error:
        return 0, 0, [error.message.removeprefix(f"{path}: ")]
    files = sorted(manifest.files.items())
    with progress_bar(path.name, manifest.size) as progress:
        damage = blocks.find_damage(path, files, mapped=True, progress=progress)
    if not damage:
        from slurmtrain.checkpoint.format.index_file import find_disagreement  # numpy, which other actions do not need

        damage = find_disagreement(path, manifest)
    return manifest.size, len(manifest.files), damage


@contextmanager
def progress_bar(name: str, total: int) -> Iterator[Callable[[int], None]]:
    """Give a function that shows a number of bytes as progress: a bar on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name, total=total)
        yield lambda count: bar.advance(task, count)


# prune


def prune_checkpoints(target: CheckpointTarget, options: argparse.Namespace) -> int:
    """Remove checkpoints that no rule keeps, and what killed saves have left.

    The newest checkpoint is verified first: if it were damaged, an older one would be needed. A run that is running may
    be pruned: it only adds newer ones, and the decision concerns those that were there before. It must not be fenced
    off, so no incarnation is claimed: removed checkpoints get the number of the newest incarnation.
    """
    directory = target.directory
    if target.chosen is not None:
        raise UsageError(
            "prune takes a run or a directory of checkpoints, not one of them", hint=f"checkpoints {directory} prune"
        )
    _require_own(target)
    if target.run is not None:
        say_which(options.run, target.run)
    keep, found = _keep(target, options), target.committed()
    sound, soundness = _sound(found, asked_metric=keep.metric if keep is not None and options.best else None)

    def unwanted() -> list[Path]:
        return [] if keep is None else retention.unwanted(directory, sound, keep, soundness=soundness)

    aside = [directory / name for name in damaged(directory)] if options.damaged else []
    surplus = unwanted()
    if surplus or aside:
        _check_newest(target, found)
        surplus = unwanted()  # somebody may read one of them by now
    freed, failed, order = 0, 0, newest_claim(directory)
    removals = dict.fromkeys(surplus, "not kept") | dict.fromkeys(aside, "set aside as damaged")
    removals |= dict.fromkeys(retention.leftovers(directory, now=time.time()), "left by a process that was killed")
    for path, why in removals.items():
        size = disk_usage(path)
        try:
            if not options.dry_run:
                remove(path, order)
        except OSError as error:
            print(f"{path.name} cannot be removed: {error.strerror}", file=sys.stderr)
            failed += 1
            continue
        freed += size
        print(f"{'would remove' if options.dry_run else 'removed'} {path.name} ({why}, {format_size(size)})")
    if removals:
        print(f"{format_size(freed)} {'would be' if options.dry_run else 'were'} freed ({freed} bytes)")
    else:
        print(f"{target.name}: nothing to remove")
    return 1 if failed else 0


def _require_own(target: CheckpointTarget) -> None:
    """Raise UsageError if the checkpoints belong to another user, or are reached through a link in the run."""
    if target.run is not None:
        ownership.require_own(target.run)
        ownership.check_not_linked(target.run)
    if target.directory.exists() and not trust.is_mine(target.directory):
        raise UsageError(
            f"{target.directory} belongs to {user_in_words(target.directory.lstat().st_uid)}: only they may prune it"
        )


def _keep(target: CheckpointTarget, options: argparse.Namespace) -> Keep | None:
    """Return what to keep, by the options or else by the run's config. None: checkpoints are not removed."""
    if options.best is None and (options.metric or options.mode):
        raise UsageError("--metric and --mode define which checkpoints are best", hint="add --best N")
    asked = {"last": options.keep_last, "every": options.keep_every, "best": options.best}
    asked = {name: value for name, value in asked.items() if value is not None}
    asked |= {name: value for name, value in (("metric", options.metric), ("mode", options.mode)) if value}
    if not asked and options.damaged:
        return None
    run = target.run
    try:
        if not asked and run is not None and run.config_file.exists():
            settings: Any = run.config_values()["checkpoint"]
            asked = {name: settings[field] for name, field in KEEP.items() if field in settings}
        return Keep(**asked)
    except CheckpointError as error:
        raise UsageError(error.message, hint=error.hint) from None
    except (UnreadableRecordError, ValueError, TypeError, KeyError, AttributeError):
        assert run is not None  # the parser has checked the options
        raise UsageError(
            f"{run.config_file} does not define what to keep", hint="say it here: prune --keep-last N [--keep-every N]"
        ) from None


def _sound(found: Sequence[Path], *, asked_metric: str | None) -> tuple[list[Path], Soundness]:
    """Return the checkpoints that have all their files, and what the newest says of the numbers of older ones.

    Visibly damaged ones are neither counted nor removed: a restore sets them aside.
    """
    sound: dict[Path, Manifest] = {}
    for path in found:
        manifest, damage = inspect(path)
        if manifest is None or damage:
            print(printable(f"{path.name} is damaged and is left alone: {damage[0]}"))
        else:
            sound[path] = manifest
    known = {name for manifest in sound.values() for name in manifest.metrics}
    if asked_metric is not None and sound and asked_metric not in known:
        raise UsageError(
            f"no checkpoint was saved with the metric {asked_metric!r}",
            hint=nearest(asked_metric, known) if known else "none has any metrics",
        )
    state: Any = list(sound.values())[-1].state if sound else None
    for name in ("trainer", "health", "sound_step"):
        state = state.get(name) if isinstance(state, dict) else None
    return list(sound), Soundness(state if records.is_count(state) else None)


def _check_newest(target: CheckpointTarget, found: Sequence[Path]) -> None:
    """Raise CheckpointError unless the newest checkpoint is sound, so that nothing is removed."""
    if not found:
        raise CheckpointError(f"{target.name} has no valid checkpoint, so nothing was removed")
    with retention.reading(found[-1]):
        _, _, damage = compare_with_digests(found[-1])
    if damage:
        raise CheckpointError(
            f"{found[-1].name}, the newest checkpoint, is damaged, so nothing was removed: {'; '.join(damage)}",
            hint="the next start of the run sets it aside and continues from an older one",
        )
