"""checkpoints: list, verify, prune and export checkpoints. Only export loads torch.

Works on a run, on any directory of checkpoints, and on a single one.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from slurmtrain.checkpoint.errors import CheckpointError, UnreadableError
from slurmtrain.checkpoint.format import directory
from slurmtrain.checkpoint.format.blocks import find_damage, patiently, read_manifest
from slurmtrain.checkpoint.format.directory import COMPLETE, FINAL_NAME, MANIFEST, OWN, TEMPORARY_NAME
from slurmtrain.checkpoint.format.manifest import Manifest
from slurmtrain.checkpoint.store import retention
from slurmtrain.checkpoint.store.commit import CLAIMS, newest_claim
from slurmtrain.checkpoint.store.retention import Keep, Soundness
from slurmtrain.cli.columns import print_table
from slurmtrain.cli.json_output import print_json
from slurmtrain.cli.stop import say_which
from slurmtrain.cli.units import format_size, with_unit
from slurmtrain.errors import UnreadableRecordError, UsageError
from slurmtrain.report.checkpoints import inspect
from slurmtrain.report.page.units import plural
from slurmtrain.runs import lookup, ownership
from slurmtrain.runs.attempts import all_attempts
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system import records
from slurmtrain.system.files import disk_usage, is_mine, user_in_words
from slurmtrain.system.paths import runs_root
from slurmtrain.system.records import printable
from slurmtrain.system.texts import roughly

HEADER = ("checkpoint", "size", "age", "layout", "metrics", "state")
# Fields of the section `checkpoint` of a config, by the field of Keep.
KEEP = {"last": "keep_last", "every": "keep_every", "best": "keep_best", "metric": "best_metric", "mode": "best_mode"}


def main(options: argparse.Namespace) -> int:
    """Run the verb and return its exit code."""
    actions = {"list": _list, "verify": _verify, "prune": _prune, "export": _export}
    return actions[options.action](_target(options.run), options)


class Target(NamedTuple):
    """The checkpoints that a command is about.

    Attributes:
        folder: folder of the checkpoints.
        name: name of the folder for a person.
        run: the run that it belongs to, if any.
        chosen: the one checkpoint that was named, if any.
    """

    folder: Path
    name: str
    run: RunDir | None = None
    chosen: Path | None = None

    def committed(self) -> list[Path]:
        if self.chosen is not None:
            return [self.chosen]
        return patiently(partial(directory.committed, self.folder), self.folder)

    def of_step(self, step: int | None) -> list[Path]:
        """Return the committed checkpoints of a step, or all.

        Raises:
            UsageError: there is none.
        """
        found = self.committed()
        chosen = [path for path in found if step in (None, _step_of(path))]
        if not found:
            hint = None
            if self.run is not None:
                saved = [each.saved for each in all_attempts(self.run) if each.saved is not None]
                hint = f"its program saves in its own way: {saved[-1]}" if saved else f"status {self.run.id}"
            raise UsageError(f"{self.name} has no checkpoint yet", hint=hint)
        if not chosen:
            steps = ", ".join(str(_step_of(path)) for path in found[-5:])
            raise UsageError(f"{self.name} has no checkpoint of step {step}", hint=f"there are: {steps}")
        return chosen


def _target(reference: str) -> Target:
    """Return the checkpoints that a person means by RUN.

    Raises:
        UsageError: it is neither a run nor a checkpoint.
    """
    if os.path.isdir(reference) and not os.path.isfile(os.path.join(reference, "run.json")):
        path = Path(reference).resolve()
        if (path / MANIFEST).is_file() or (path / COMPLETE).is_file() or FINAL_NAME.match(path.name):
            return Target(path.parent, str(path), chosen=path)
        if (path / CLAIMS).is_dir() or any(FINAL_NAME.match(entry.name) for entry in path.iterdir()):
            return Target(path, str(path))
        if os.sep in reference or reference in (".", ".."):
            raise UsageError(
                f"{path} is neither a run nor a directory of checkpoints",
                hint="checkpoints are folders called checkpoint_<step>",
            )
    run = lookup.find(reference, runs_root())
    return Target(run.checkpoints, f"run {run.id}", run=run)


def _step_of(path: Path) -> int:
    """Return the step in the name of a checkpoint, also of one that was set aside; -1: its name has none."""
    match = FINAL_NAME.match(path.name)
    return int(match.group(1)) if match else -1


# list


def _list(target: Target, options: argparse.Namespace) -> int:
    """Print a row for everything that is there, by step. Sizes are compared, contents are not: that is `verify`."""
    if target.chosen is not None:
        paths = [target.chosen]
    else:
        try:
            entries = list(target.folder.iterdir()) if target.folder.exists() else []
        except OSError as error:
            raise CheckpointError(f"{target.folder} cannot be read: {error.strerror}") from None
        paths = [path for path in entries if FINAL_NAME.match(path.name) and path.is_dir()]
    if not paths:
        target.of_step(None)
    found = [_describe(path) for path in sorted(paths, key=lambda path: (_step_of(path), path.name))]
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
    facts: dict[str, Any] = {"step": _step_of(path), "path": str(path), "bytes": None, "damage": [], "complete": False}
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
        tensors = sum(not name.startswith(OWN) for name in manifest.tensors)
        facts |= {"world_size": manifest.world_size, "tensors": tensors, "metrics": manifest.metrics}
        facts |= {"torch": manifest.torch_version, "written_by": manifest.incarnation_label}
    return facts


def _row(facts: dict[str, Any]) -> list[str]:
    path, layout = Path(facts["path"]), ""
    if "tensors" in facts:
        layout = f"{plural(facts['world_size'], 'rank')}, {facts['tensors']} tensors"
    metrics = [f"{name} {with_unit(value) or value}" for name, value in islice(facts.get("metrics", {}).items(), 3)]
    try:  # since the commit, or else since the folder changed
        marker = path / COMPLETE
        age = roughly(max(0.0, time.time() - (marker if marker.exists() else path).stat().st_mtime))
    except OSError:
        age = "?"
    size = "" if facts["bytes"] is None else format_size(facts["bytes"])
    return [printable(cell) for cell in (path.name, size, age, layout, ", ".join(metrics), facts["state"])]


# verify


def _verify(target: Target, options: argparse.Namespace) -> int:
    """Compare every file with its digest. The exit code is 1 if anything is damaged."""
    aside = directory.damaged(target.folder) if target.chosen is None and options.step is None else []
    found: list[dict[str, Any]] = []
    for path in target.committed() if aside else target.of_step(options.step):
        began = time.monotonic()
        facts: dict[str, Any] = {"step": _step_of(path), "path": str(path), "sound": None, "damage": []}
        try:
            size, files, damage = _compare_with_digests(path)
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


def _compare_with_digests(path: Path) -> tuple[int, int, list[str]]:
    """Return bytes and number of files, and everything that is wrong with their contents.

    Raises:
        UnreadableError: the storage fails, and after all retries still does.
    """
    with retention.reading(path):
        try:
            manifest = read_manifest(path)
        except UnreadableError:
            raise
        except CheckpointError as error:
            return 0, 0, [error.message.removeprefix(f"{path} is damaged: ")]
        with _progress_bar(path.name, manifest.size) as progress:
            damage = find_damage(path, manifest.files, progress=progress)
    return manifest.size, len(manifest.files), damage


@contextmanager
def _progress_bar(name: str, total: int) -> Iterator[Callable[[int], None]]:
    """Give a function that shows a number of bytes as progress: a bar on a terminal, nothing elsewhere."""
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        yield partial(bar.advance, bar.add_task(escape(name), total=total))


# prune


def _prune(target: Target, options: argparse.Namespace) -> int:
    """Remove checkpoints that no rule keeps, and what killed saves have left.

    The newest checkpoint is verified first: if it were damaged, an older one would be needed. A run that is running may
    be pruned: it only adds newer ones, and the decision concerns those that were there before. It must not be fenced
    off, so no incarnation is claimed: removed checkpoints get the number of the newest incarnation.
    """
    folder = target.folder
    if target.chosen is not None:
        raise UsageError(
            "prune takes a run or a directory of checkpoints, not one of them", hint=f"checkpoints {folder} prune"
        )
    if target.run is not None:
        ownership.require_own(target.run)
        ownership.check_not_linked(target.run)
        say_which(options.run, target.run)
    if folder.exists() and not is_mine(folder):
        owner = user_in_words(folder.lstat().st_uid)
        raise UsageError(f"{folder} belongs to {owner}: only they may prune it")
    keep, found = _keep(target, options), target.committed()
    sound, soundness = _sound(found)

    def unwanted() -> list[Path]:
        return [] if keep is None else retention.unwanted(folder, sound, keep, soundness=soundness)

    aside = [folder / name for name in directory.damaged(folder)] if options.damaged else []
    surplus = unwanted()
    if surplus or aside:
        _check_newest(target, found)
        surplus = unwanted()  # somebody may read one of them by now
    removals = dict.fromkeys(surplus, "not kept") | dict.fromkeys(aside, "set aside as damaged")
    removals |= dict.fromkeys(retention.leftovers(folder, now=time.time()), "left by a process that was killed")
    order = newest_claim(folder)
    return remove_all(removals, lambda path: directory.remove(path, order), dry_run=options.dry_run)


def remove_all(
    whys: Mapping[Path, str],
    remove: Callable[[Path], bool | None],
    *,
    size_of: Callable[[Path], int] = disk_usage,
    dry_run: bool,
) -> int:
    """Remove folders, and print each with why and its size, or only print them; return 1 if one could not be removed.

    Args:
        remove: returns False if a folder has to stay, since it has changed.
    """
    freed, failed = 0, 0
    for path, why in whys.items():
        size = size_of(path)
        try:
            if not dry_run and remove(path) is False:
                print(f"{path.name} is kept: it has just changed")
                continue
        except OSError as error:
            print(f"{path.name} cannot be removed: {error.strerror}", file=sys.stderr)
            failed = 1
            continue
        freed += size
        print(f"{'would remove' if dry_run else 'removed'} {path.name} ({why}, {format_size(size)})")
    would = "would be" if dry_run else "were"
    print(f"{format_size(freed)} {would} freed ({freed} bytes)" if whys else "nothing to remove")
    return failed


def _keep(target: Target, options: argparse.Namespace) -> Keep | None:
    """Return what to keep, by --keep-last or else by the run's config. None: checkpoints are not removed."""
    run = target.run
    if options.keep_last is not None:
        return Keep(last=options.keep_last)
    if options.damaged:
        return None
    if run is None or not run.config_file.exists():
        return Keep()
    try:
        settings: Any = run.config_values()["checkpoint"]
        return Keep(**{name: settings[field] for name, field in KEEP.items() if field in settings})
    except (CheckpointError, UnreadableRecordError, ValueError, TypeError, KeyError, AttributeError):
        raise UsageError(
            f"{run.config_file} does not define what to keep", hint="say it here: prune --keep-last N"
        ) from None


def _sound(found: list[Path]) -> tuple[list[Path], Soundness]:
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
    state: Any = list(sound.values())[-1].state if sound else None
    for name in ("trainer", "health", "sound_step"):
        state = state.get(name) if isinstance(state, dict) else None
    return list(sound), Soundness(state if records.is_count(state) else None)


def _check_newest(target: Target, found: list[Path]) -> None:
    """Raise CheckpointError unless the newest checkpoint is sound, so that nothing is removed."""
    if not found:
        raise CheckpointError(f"{target.name} has no valid checkpoint, so nothing was removed")
    _, _, damage = _compare_with_digests(found[-1])
    if damage:
        raise CheckpointError(
            f"{found[-1].name}, the newest checkpoint, is damaged, so nothing was removed: {'; '.join(damage)}",
            hint="the next start of the run sets it aside and continues from an older one",
        )


# export


def _export(target: Target, options: argparse.Namespace) -> int:
    """Write the weights of one checkpoint to a file or folder, and print how many tensors it has."""
    path, out, kind = target.of_step(options.step)[-1], Path(options.out), options.format
    if kind is not None and out.suffix in (".safetensors", ".pt", ".pth", ".bin", ".ckpt"):
        raise UsageError(f"--format {kind} writes a folder, and {out} is the name of a file")
    if kind is not None and options.only != "model":
        raise UsageError(
            f"--only {options.only}: a Hugging Face folder always contains the whole model",
            hint="export to a file: FILE.safetensors",
        )
    if kind == "peft" and options.dtype is not None:
        raise UsageError("--dtype is not for --format peft, which writes adapters unchanged")
    with _progress_bar(path.name, read_manifest(path).size) as progress:
        if kind == "hf":
            from slurmtrain.weights.hf_export import export_hf

            done = export_hf(path, out, dtype=options.dtype, progress=progress)
        elif kind == "peft":
            from slurmtrain.weights.lora_export import export_peft

            done = export_peft(path, out)
        else:
            from slurmtrain.weights.export import export

            done = export(path, out, only=options.only, dtype=options.dtype, progress=progress)
    print(f"{out}: {done.tensors} tensors of {options.only} from {path.name}, {format_size(done.size)}")
    for note in done.notes:
        print(f"note: {note}")
    return 0
