"""checkpoints: what a run could be resumed from, and whether it is sound. Reads files only; imports no torch."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from slurmtrain import rundir
from slurmtrain.checkpoint import commit
from slurmtrain.checkpoint.commit import Manifest
from slurmtrain.cli.arguments import Parser
from slurmtrain.cli.runs import print_table
from slurmtrain.cli.verbs import VERBS
from slurmtrain.errors import CheckpointError, UsageError


def main(verb: str, words: list[str]) -> int:
    parser = Parser(prog=f"python -m slurmtrain {verb}", description=VERBS[verb].help)
    parser.add_argument("run", metavar="RUN", help="a run id, a unique beginning of one, a path, or last")
    parser.add_argument("action", nargs="?", default="list", choices=("list", "verify"))
    options = parser.parse_args(words)
    run_dir = rundir.find(options.run, rundir.runs_root())
    found = commit.committed(run_dir.checkpoints)
    aside = commit.damaged(run_dir.checkpoints)
    if not found and not aside:
        raise UsageError(f"run {run_dir.id} has no checkpoint yet", hint=f"status {run_dir.id}")
    code = _verify(found) if options.action == "verify" else _list(found)
    for name in aside:
        print(f"{name}: damaged, set aside by a restore; nothing reads it, and it may be deleted")
    return code


def _list(paths: list[Path]) -> int:
    """One row a checkpoint, newest last. Sizes are compared, contents are not: that is `verify`."""
    rows = []
    for path in paths:
        manifest, damage = _inspect(path, contents=False)
        age = time.time() - (path / "COMPLETE").stat().st_mtime
        known = (
            [f"{_size(manifest) / 1e6:.1f} MB", str(manifest.world_size), manifest.incarnation_label]
            if manifest
            else ["?"] * 3
        )
        rows.append([str(commit.step_of(path)), *known, _age(age), damage[0] if damage else "complete"])
    print_table(["step", "size", "ranks", "written by", "age", ""], rows)
    return 0


def _verify(paths: list[Path]) -> int:
    """Compare every file with its digest. Exit code 1 when anything is damaged."""
    damaged = 0
    for path in paths:
        began = time.monotonic()
        manifest, damage = _inspect(path, contents=True)
        seconds = time.monotonic() - began
        if damage:
            damaged += 1
            print(f"{path.name}: DAMAGED: {'; '.join(damage)}")
        elif manifest is not None:
            size = _size(manifest)
            print(
                f"{path.name}: sound ({len(manifest.files)} files, {size / 1e6:.1f} MB, {size / 1e6 / seconds:.0f} MB/s)"
            )
    return 1 if damaged else 0


def _inspect(path: Path, *, contents: bool) -> tuple[Manifest | None, list[str]]:
    """The manifest, and one sentence for everything that is wrong."""
    try:
        manifest = commit.read_manifest(path)
    except CheckpointError as error:
        return None, [error.message]
    # Hashing lets go of the interpreter's lock, so files are read side by side.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(
            lambda name: commit.find_damage(path, manifest, [name], verify=contents), sorted(manifest.files)
        )
        return manifest, [sentence for sentences in found for sentence in sentences]


def _size(manifest: Manifest) -> int:
    return sum(record.size for record in manifest.files.values())


def _age(seconds: float) -> str:
    """Rough, as a person says it."""
    for size, word in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {word}"
    return f"{seconds:.0f} s"
