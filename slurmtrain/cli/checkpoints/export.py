"""checkpoints RUN export: write the weights to one file for other programs. The only action that imports torch."""

from __future__ import annotations

import argparse

from slurmtrain.checkpoint.format.manifest import read_manifest
from slurmtrain.cli.checkpoints.progress_bar import progress_bar
from slurmtrain.cli.checkpoints.target import CheckpointTarget, of_step
from slurmtrain.cli.columns import format_size


def export_weights(target: CheckpointTarget, options: argparse.Namespace) -> int:
    """Write the weights of one checkpoint to a file, and print how many tensors it has."""
    path = of_step(target, options.step)[-1]
    from slurmtrain.checkpoint.export import check_output, export

    check_output(options.out, force=options.force)
    size = read_manifest(path).size
    with progress_bar(path.name, size) as progress:
        done = export(path, options.out, only=options.only, dtype=options.dtype, force=options.force, progress=progress)
    print(f"{done.path}: {done.tensors} tensors of {options.only} from {path.name}, {format_size(done.size)}")
    return 0
