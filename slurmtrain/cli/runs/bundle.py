"""runs bundle: one file with what it takes to run a run again elsewhere."""

from __future__ import annotations

import argparse
from pathlib import Path

from slurmtrain.cli.columns import format_size
from slurmtrain.cli.json_output import print_json
from slurmtrain.errors import UsageError
from slurmtrain.launch.bundle import write_bundle
from slurmtrain.runs import lookup

OTHER_ARCHIVES = (".zip", ".xz", ".txz", ".bz2", ".tbz2", ".zst", ".7z")  # what a bundle is not


def bundle_run(options: argparse.Namespace) -> int:
    """Pack a run into a file."""
    _check_target(options.file)
    run_dir = lookup.find(options.run, lookup.runs_root())
    target = Path(options.file or f"{run_dir.path.parent.name}-{run_dir.id}.tar.gz")
    digest = write_bundle(run_dir, target, exclude=options.exclude or ())
    size = target.stat().st_size
    if options.json:
        print_json({"run": run_dir.id, "file": str(target.resolve()), "sha256": digest, "size": size})
        return 0
    print(f"wrote {target} ({format_size(size)})\n  sha256 {digest}")
    print(f"  run it again, here or elsewhere: submit --from {target}")
    return 0


def _check_target(name: str | None) -> None:
    """Refuse a file that cannot be written, or would not be what its name says."""
    if name is None:
        return
    target = Path(name)
    if name == "-" or target.suffix.lower() in OTHER_ARCHIVES:
        raise UsageError(f"a bundle is a file whose name ends in .tar.gz or .tar, not {name}", hint="my-run.tar.gz")
    if target.is_dir() or not target.resolve().parent.is_dir():
        raise UsageError(f"cannot write {target}: it is a folder, or its folder does not exist", hint="my-run.tar.gz")
