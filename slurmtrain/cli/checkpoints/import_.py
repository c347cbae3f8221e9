"""checkpoints FOLDER import: make a checkpoint of weights that another program has written. Like `export`, it imports torch."""

from __future__ import annotations

import argparse
from pathlib import Path

from slurmtrain.cli.checkpoints.progress_bar import progress_bar
from slurmtrain.cli.columns import format_size
from slurmtrain.errors import UsageError
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system.files import disk_usage


def import_checkpoint(options: argparse.Namespace) -> int:
    """Write the checkpoint, and print its path and how a run begins from it."""
    directory, source = Path(options.run), Path(options.source)
    if RunDir(directory).exists():
        raise UsageError(
            f"{directory} is a run, which has its own checkpoints",
            hint="name a new folder for the checkpoint: checkpoints FOLDER import SOURCE",
        )
    if not directory.parent.is_dir():
        raise UsageError(f"there is no folder {directory.parent} to make {directory.name} in")
    if not source.exists():
        raise UsageError(f"there is no file or folder {source}")
    from slurmtrain.models.import_weights import import_weights

    with progress_bar(source.name, disk_usage(source) if source.is_dir() else source.stat().st_size) as progress:
        done = import_weights(source, directory, only=options.only, progress=progress)
    print(f"{done.path}: {done.tensors} tensors from {source}, {format_size(done.size)}")
    # The trainer keeps its weights in float32, and a restore refuses others until it is told that they are meant.
    allowed = " 'checkpoint.allow=[dtypes]'" if {str(dtype) for dtype in done.dtypes} != {"torch.float32"} else ""
    print(f"to start from them: checkpoint.restore_from={done.path} checkpoint.restore_only=model{allowed}")
    return 0
