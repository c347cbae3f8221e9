"""checkpoints: list, verify, prune and export the checkpoints that a run can be resumed from.

Works on a run, on any directory of checkpoints, and on a single one. Only `export` imports torch.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurmtrain.checkpoint import blocks, commit, retention
from slurmtrain.checkpoint.commit import Manifest
from slurmtrain.checkpoint.retention import Keep, Kept
from slurmtrain.cli.arguments import Parser
from slurmtrain.cli.columns import print_table
from slurmtrain.cli.json_output import print_json
from slurmtrain.errors import CheckpointError, SlurmtrainError, Unreadable, UnreadableRecord, UsageError, nearest
from slurmtrain.runs import lookup, ownership
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system import records
from slurmtrain.system.files import disk_usage
from slurmtrain.system.records import printable

if TYPE_CHECKING:
    from rich.progress import Progress

DTYPES = ("float32", "float16", "bfloat16", "float64")


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
        return blocks.patiently(partial(commit.committed, self.directory), self.directory)


def main(verb: str, words: list[str]) -> int:
    """Run the verb and return its exit code."""
    options = _parser(verb).parse_args(words)
    actions: dict[str, Callable[[CheckpointTarget, argparse.Namespace], int]] = {
        "list": _list,
        "verify": _verify,
        "prune": _prune,
        "export": _export,
    }
    try:
        return actions[options.action or "list"](_find(options.run), options)
    except SlurmtrainError as error:
        # Names out of a checkpoint must not steer the terminal.
        error.message = printable(error.message)
        error.hint = printable(error.hint) if error.hint else None
        raise


def _parser(verb: str) -> Parser:
    prog = f"python -m slurmtrain {verb}"
    parser = Parser.of(verb)
    parser.add_argument(
        "run",
        metavar="RUN",
        help="a run id, a unique beginning of one, a path, or last; or the path of a directory of checkpoints, or of one",
    )
    parser.add_argument("--json", action="store_true", help="list and verify print a list of objects, for a program")
    actions = parser.add_subparsers(dest="action", metavar="list|verify|prune|export", title="actions")
    listing = actions.add_parser(
        "list", prog=f"{prog} RUN list", help="print a table of what is there; looks at sizes only (default)"
    )

    verify = actions.add_parser(
        "verify",
        prog=f"{prog} RUN verify",
        help="compare every file with its digest, and what they say with each other",
        description="Reads every file, compares it with its digest, and checks that together they hold every tensor. "
        "Exit code 1 when anything is damaged.",
    )
    verify.add_argument("step", nargs="?", type=int, metavar="STEP", help="this one only")
    for action in (listing, verify):  # suppressed: its absence here must not undo what stands before the action
        action.add_argument(
            "--json", action="store_true", default=argparse.SUPPRESS, help="print a list, for a program"
        )

    prune = actions.add_parser(
        "prune",
        prog=f"{prog} RUN prune",
        help="remove what need not be kept",
        description="Removes checkpoints that no rule wants, once the newest is verified. The newest two always stay, and "
        "what somebody reads. Without an option: by the run's own checkpoint.keep_* (no run: the last 2), and leftovers.",
    )
    prune.add_argument("--keep-last", type=int, metavar="N", help="the newest N stay, at least 2")
    prune.add_argument("--keep-every", type=int, metavar="N", help="those whose step is a multiple of N stay, too")
    prune.add_argument("--best", type=int, metavar="N", help="the N best by --metric stay, too")
    prune.add_argument("--metric", metavar="NAME", help="a metric that was saved with them (default: valid_loss)")
    prune.add_argument("--mode", choices=("min", "max"), help="which values of it are good (default: min)")
    prune.add_argument("--damaged", action="store_true", help="remove those that a restore has set aside as damaged")
    prune.add_argument(
        "--leftovers", action="store_true", help="remove what killed saves have left, unchanged for an hour"
    )
    prune.add_argument("--dry-run", action="store_true", help="only say what would be removed")

    export = actions.add_parser(
        "export",
        prog=f"{prog} RUN export",
        help="write the weights to one file for other programs",
        description="Writes the tensors of one object to a file, by their names in it, whatever number of ranks saved them.",
    )
    export.add_argument("out", type=Path, metavar="OUT", help="FILE.safetensors, or FILE.pt or FILE.pth for torch.load")
    export.add_argument("--step", type=int, metavar="N", help="default: the newest checkpoint")
    export.add_argument(
        "--only", default="model", metavar="NAME", help="the object that was saved as NAME (default: model)"
    )
    export.add_argument("--dtype", choices=DTYPES, help="convert floating point tensors; default: as they are")
    export.add_argument("--force", action="store_true", help="replace OUT when it exists")
    return parser


def _find(reference: str) -> CheckpointTarget:
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
        if (path / commit.MANIFEST).is_file() or (path / commit.COMPLETE).is_file() or _named(path):
            return CheckpointTarget(path.parent, str(path), chosen=path)
        if (path / commit.CLAIMS).is_dir() or any(_named(entry) for entry in path.iterdir()):
            return CheckpointTarget(path, str(path))
        if os.sep in reference or reference in (".", ".."):
            raise UsageError(
                f"{path} is neither a run nor a directory of checkpoints",
                hint="checkpoints are folders called checkpoint_<step>",
            )
    run = lookup.find(reference, lookup.runs_root())
    return CheckpointTarget(run.checkpoints, f"run {run.id}", run=run)


def _named(path: Path) -> bool:
    return commit.FINAL_NAME.match(path.name) is not None


def _of_step(place: CheckpointTarget, step: int | None) -> list[Path]:
    """Return the committed checkpoints of a step, or all.

    Raises:
        UsageError: there is none.
    """
    found = place.committed()
    chosen = [path for path in found if step is None or (_named(path) and _step(path) == step)]
    if not chosen:
        steps = ", ".join(str(_step(path)) for path in found[-5:])
        status = f"status {place.run.id}" if place.run else None
        if step is None or not found:
            raise UsageError(f"{place.name} has no checkpoint yet", hint=status)
        raise UsageError(f"{place.name} has no checkpoint of step {step}", hint=f"there are: {steps}")
    return chosen


# list


def _list(place: CheckpointTarget, options: argparse.Namespace) -> int:
    """Print a row for everything that is there, by step. Sizes are compared, contents are not: that is `verify`."""
    now = time.time()
    paths = [place.chosen] if place.chosen else [path for path in _entries(place.directory) if _named(path)]
    if not paths:
        _of_step(place, None)
    paths.sort(key=lambda path: (_step(path), path.name))
    if options.json:
        print_json([_object(path) for path in paths])
        return 0
    rows = [_row(path, now) for path in paths]
    print_table(["step", "size", "age", "layout", "metrics", "torch", "written by", "state"], rows)
    return 0


def _entries(directory: Path) -> list[Path]:
    try:
        return [path for path in directory.iterdir() if path.is_dir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be read: {error.strerror}") from None


def _row(path: Path, now: float) -> list[str]:
    aside = ".damaged-" in path.name
    if not aside and commit.TEMPORARY_NAME.fullmatch(path.name):
        leaves = ".removed-" in path.name
        state = f"{path.name}: {'being removed' if leaves else 'being written'}, or left by a process that was killed"
        return [str(_step(path)), format_size(disk_usage(path)), _age(path, now), "", "", "", "", state]
    manifest, damage = _inspect(path)
    state = damage[0] if damage else "complete"
    if aside:
        state = f"{path.name}: set aside as damaged" + (f" ({damage[0]})" if damage else "")
    elif not (path / commit.COMPLETE).is_file():
        state = f"{path.name} was not committed: it has no {commit.COMPLETE}"
    elif path.name != commit.checkpoint_name(_step(path)) and _named(path):
        state += f" ({path.name})"  # a second one of this step
    if manifest is None:
        return [str(_step(path)), format_size(disk_usage(path)), _age(path, now), "", "", "", "", printable(state)]
    ranks = f"{manifest.world_size} rank{'s' if manifest.world_size != 1 else ''}"
    cells = [
        str(manifest.step),
        format_size(manifest.size),
        _age(path, now),
        f"{ranks}, {len(manifest.tensors)} tensors",
        ", ".join(f"{name} {_number(value)}" for name, value in islice(manifest.metrics.items(), 3)),
        manifest.torch_version,
        manifest.incarnation_label,
        state,
    ]
    return [printable(str(cell)) for cell in cells]


def _object(path: Path) -> dict[str, Any]:
    """Return the JSON of a checkpoint.

    `damage` is what is wrong by sizes, in words; `complete` is whether a restore would consider the checkpoint.
    """
    manifest, damage = _inspect(path)
    facts: dict[str, Any] = {"step": _step(path), "path": str(path), "bytes": disk_usage(path), "damage": damage}
    final = _named(path) and ".damaged-" not in path.name and (path / commit.COMPLETE).is_file()
    facts["complete"] = final and not damage
    if manifest is not None:
        facts |= {"world_size": manifest.world_size, "tensors": len(manifest.tensors), "metrics": manifest.metrics}
        facts |= {"torch": manifest.torch_version, "written_by": manifest.incarnation_label}
    return facts


def _inspect(path: Path) -> tuple[Manifest | None, list[str]]:
    """Return the manifest, and one sentence for everything that is wrong, by sizes."""
    try:
        manifest = commit.read_manifest(path)
    except CheckpointError as error:
        return None, [error.message.removeprefix(f"{path}: ")]
    return manifest, commit.find_damage(path, manifest, verify=False)


# verify


def _verify(place: CheckpointTarget, options: argparse.Namespace) -> int:
    """Compare every file with its digest. The exit code is 1 if anything is damaged."""
    aside = commit.damaged(place.directory) if place.chosen is None and options.step is None else []
    paths = _of_step(place, options.step) if not aside else place.committed()
    found: list[dict[str, Any]] = []
    for path in paths:
        began = time.monotonic()
        try:
            with retention.reading(path):
                size, files, damage = _compare(path)
        except Unreadable as error:  # nothing is known about this one; the others may lie elsewhere
            found.append({"step": _step(path), "path": str(path), "sound": None, "damage": [], "unread": error.message})
            if not options.json:
                print(printable(f"{path.name}: NOT READ: {error.message}: that says nothing about the checkpoint"))
            continue
        seconds = time.monotonic() - began
        found.append({"step": _step(path), "path": str(path), "sound": not damage, "damage": damage})
        if options.json:
            continue
        if damage:
            print(printable(f"{path.name}: DAMAGED: {'; '.join(damage)}"))
        else:
            print(
                f"{path.name}: sound ({files} files, {format_size(size)}, {size / 1e6 / max(seconds, 1e-6):.0f} MB/s)"
            )
    if options.json:
        print_json(found)
    else:
        for name in aside:
            print(f"{name}: set aside as damaged by a restore; nothing reads it, `prune --damaged` removes it")
    return 0 if all(each["sound"] for each in found) else 1


def _compare(path: Path) -> tuple[int, int, list[str]]:
    """Return bytes and number of files, and everything that is wrong with their contents.

    Raises:
        Unreadable: the storage fails, and after all retries still does.
    """
    try:
        manifest = commit.read_manifest(path, patient=True)
    except Unreadable:
        raise
    except CheckpointError as error:
        return 0, 0, [error.message.removeprefix(f"{path}: ")]
    files = sorted(manifest.files.items())
    with blocks.threads() as pool, _progress(path.name, manifest.size) as progress:
        damage = blocks.find_damage(path, files, pool, mapped=True, patient=True, progress=progress)
    if not damage:
        from slurmtrain.checkpoint.index_file import find_disagreement  # numpy, which other actions do not need

        damage = find_disagreement(path, manifest)
    return manifest.size, len(manifest.files), damage


@contextmanager
def _progress(name: str, total: int) -> Iterator[Callable[[int], None]]:
    """Give a function that shows a number of bytes as progress: a bar on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=24), DownloadColumn())
    bar: Progress = Bar(
        *columns, TransferSpeedColumn(), TimeRemainingColumn(), console=Console(stderr=True), transient=True
    )
    with bar:
        task = bar.add_task(name, total=total)
        yield lambda count: bar.advance(task, count)


# prune


@dataclass(frozen=True)
class Removal:
    """A folder to remove, with a description for a person."""

    path: Path
    what: str


def _prune(place: CheckpointTarget, options: argparse.Namespace) -> int:
    """Remove checkpoints that are no longer wanted.

    The newest checkpoint is verified first: if it were damaged, an older one would be needed. A run that is running may
    be pruned: it only adds newer ones, and the decision concerns those that were there before. It must not be fenced
    off, so no incarnation is claimed: removed checkpoints get the number of the newest incarnation.
    """
    if place.chosen is not None:
        raise UsageError(
            "prune takes a run or a directory of checkpoints, not one of them",
            hint=f"checkpoints {place.directory} prune",
        )
    _require_own(place)
    keep = _keep(place, options)
    found = place.committed()
    removals = _surplus(found, keep, asked=options.best is not None) if keep is not None else []
    if options.damaged:
        removals += [
            Removal(place.directory / name, "set aside as damaged") for name in commit.damaged(place.directory)
        ]
    if removals:
        _check_newest(place, found)
        in_use = retention.in_use(place.directory, time.time())  # after the verification, which takes time
        held = {step for step, _ in retention.held(place.directory)}
        waited_for = {path.name for path in found if _step(path) in held} - in_use
        for removal in removals:
            if removal.path.name in in_use:
                print(f"{removal.path.name} is being read and stays")
            if removal.path.name in waited_for:
                print(f"{removal.path.name} is still to be evaluated and stays")
        removals = [removal for removal in removals if removal.path.name not in in_use | waited_for]
    if options.leftovers or (keep is not None and not _by_options(options)):
        removals += [
            Removal(path, "left by a process that was killed")
            for path in retention.leftovers(place.directory, now=time.time())
        ]
    freed, failed = 0, 0
    order = _newest_order(place.directory)
    for removal in removals:
        size = disk_usage(removal.path)
        if not options.dry_run:
            try:
                retention.remove(removal.path, order)
            except OSError as error:
                print(f"{removal.path.name} cannot be removed: {error.strerror}", file=sys.stderr)
                failed += 1
                continue
        freed += size
        print(
            f"{'would remove' if options.dry_run else 'removed'} {removal.path.name} ({removal.what}, {format_size(size)})"
        )
    if not removals:
        print(f"{place.name}: nothing to remove")
    else:
        print(f"{format_size(freed)} {'would be' if options.dry_run else 'were'} freed ({freed} bytes)")
    return 1 if failed else 0


def _require_own(place: CheckpointTarget) -> None:
    """Raise UsageError if the checkpoints belong to another user, or are reached through a link in the run."""
    if place.run is not None:
        ownership.require_own(place.run)
        ownership.check_not_linked(place.run)
    if place.directory.exists() and not records.is_mine(place.directory):
        raise UsageError(f"{place.directory} belongs to user {place.directory.lstat().st_uid}: only they may prune it")


def _by_options(options: argparse.Namespace) -> bool:
    """Return whether the command line says what to keep."""
    return any(value is not None for value in (options.keep_last, options.keep_every, options.best))


def _keep(place: CheckpointTarget, options: argparse.Namespace) -> Keep | None:
    """Return what to keep, by the options or else by the run's config. None: checkpoints are not removed."""
    if options.best is None and (options.metric or options.mode):
        raise UsageError("--metric and --mode say which checkpoints are the best", hint="add --best N")
    if not _by_options(options) and (options.damaged or options.leftovers):
        return None
    try:
        if not _by_options(options):
            return _keep_of(place.run) if place.run is not None else Keep()
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
    except (UnreadableRecord, ValueError, TypeError, KeyError, AttributeError):
        raise UsageError(
            f"{run.config_file} does not say what to keep", hint="say it here: prune --keep-last N [--keep-every N]"
        ) from None


def _surplus(found: Sequence[Path], keep: Keep, *, asked: bool) -> list[Removal]:
    """Return the checkpoints that no rule wants.

    Visibly damaged ones are neither counted nor removed: a restore sets them aside.
    """
    kept, paths = [], []
    for path in found:
        manifest, damage = _inspect(path)
        if manifest is None or damage:
            print(printable(f"{path.name} is damaged and is left alone: {damage[0]}"))
        else:
            kept.append(Kept(_step(path), manifest.metrics))
            paths.append(path)
    if asked and keep.best and kept and not any(keep.metric in (one.metrics or ()) for one in kept):
        known = {name for one in kept for name in one.metrics or ()}
        raise UsageError(
            f"no checkpoint was saved with the metric {keep.metric!r}",
            hint=nearest(keep.metric, known) if known else "none has any metrics",
        )
    steps = set(retention.surplus(kept, keep))
    # A link is left alone: only its maker may remove it.
    return [Removal(path, "not kept") for path in paths if _step(path) in steps and not path.is_symlink()]


def _check_newest(place: CheckpointTarget, found: Sequence[Path]) -> None:
    """Raise CheckpointError unless the newest checkpoint is sound, so that nothing is removed."""
    if not found:
        raise CheckpointError(f"{place.name} has no sound checkpoint, so nothing was removed")
    newest = found[-1]
    with retention.reading(newest):
        _, _, damage = _compare(newest)
    if damage:
        raise CheckpointError(
            f"{newest.name}, the newest checkpoint, is damaged, so nothing was removed: {'; '.join(damage)}",
            hint="the next start of the run sets it aside and goes on from an older one",
        )
    if not (newest / commit.COMPLETE).is_file():
        raise CheckpointError(f"{newest.name} went away while it was verified, so nothing was removed")


def _newest_order(directory: Path) -> int:
    claims = directory / commit.CLAIMS
    names = [path.name for path in claims.iterdir()] if claims.is_dir() else []
    return max((int(name) for name in names if re.fullmatch("[0-9]{1,18}", name)), default=0)


# export


def _export(place: CheckpointTarget, options: argparse.Namespace) -> int:
    path = _of_step(place, options.step)[-1]
    from slurmtrain.checkpoint.export import check_output, export

    check_output(options.out, force=options.force)
    size = commit.read_manifest(path).size
    with _progress(path.name, size) as progress:
        done = export(path, options.out, only=options.only, dtype=options.dtype, force=options.force, progress=progress)
    print(f"{done.path}: {done.tensors} tensors of {options.only} from {path.name}, {format_size(done.size)}")
    return 0


# Words and numbers.


def _step(path: Path) -> int:
    match = commit.FINAL_NAME.match(path.name)
    return int(match.group(1)) if match else -1


def format_size(size: int) -> str:
    """Format a number of bytes for a person, in units of 10^6 or 10^9."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) and math.isfinite(value) else str(value)


def _age(path: Path, now: float) -> str:
    """Format the time since the commit, or else since the folder changed, roughly."""
    try:
        marker = path / commit.COMPLETE
        seconds = now - (marker if marker.exists() else path).stat().st_mtime
    except OSError:
        return "?"
    for size, word in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {word}"
    return f"{max(seconds, 0):.0f} s"
