"""checkpoints RUN export: write the weights for other programs. Like `import`, it imports torch."""

from __future__ import annotations

import argparse
from pathlib import Path

from slurmtrain.checkpoint.format.manifest import read_manifest
from slurmtrain.cli.checkpoints.progress_bar import progress_bar
from slurmtrain.cli.checkpoints.target import CheckpointTarget, of_step
from slurmtrain.cli.columns import format_size
from slurmtrain.errors import UsageError

FORMATS = ("hf", "peft", "safetensors", "torch", "dcp")
SUFFIXES = {"safetensors": (".safetensors",), "torch": (".pt", ".pth")}


def export_weights(target: CheckpointTarget, options: argparse.Namespace) -> int:
    """Write the weights of one checkpoint to a file or folder, and print how many tensors it has."""
    path = of_step(target, options.step)[-1]
    out: Path = options.out
    kind = format_of(out, options.format)
    if kind != "hf" and options.max_shard_size is not None:
        raise UsageError(f"--max-shard-size is for --format hf, and this is {kind}")
    if kind in ("hf", "peft") and options.only != "model":
        raise UsageError(
            f"--only {options.only}: a Hugging Face folder always contains the whole model", hint="--format safetensors"
        )
    if kind == "peft" and options.dtype is not None:
        raise UsageError("--dtype is not for --format peft, which writes adapters unchanged")
    size = read_manifest(path).size
    if kind in ("hf", "peft"):
        return _export_hf(path, out, options, size)
    if kind == "dcp":
        return _export_dcp(path, out, options, size)
    from slurmtrain.checkpoint.export import check_output, export

    check_output(out, force=options.force)
    with progress_bar(path.name, size) as progress:
        done = export(path, out, only=options.only, dtype=options.dtype, force=options.force, progress=progress)
    print(f"{done.path}: {done.tensors} tensors of {options.only} from {path.name}, {format_size(done.size)}")
    return 0


def format_of(out: Path, asked: str | None) -> str:
    """Return the format to write: what is asked for, or else what the suffix of `out` says.

    Raises:
        UsageError: the two disagree.
    """
    by_suffix = next((kind for kind, suffixes in SUFFIXES.items() if out.suffix in suffixes), None)
    if asked in SUFFIXES and by_suffix != asked:
        raise UsageError(
            f"{out} is not a valid name for --format {asked}", hint=f"end it in {' or '.join(SUFFIXES[asked])}"
        )
    if asked in ("hf", "peft", "dcp") and by_suffix is not None:
        raise UsageError(f"--format {asked} writes a folder, and {out} is the name of a file")
    return asked or by_suffix or "safetensors"  # whose own check says what is wrong with the name


def _export_hf(path: Path, out: Path, options: argparse.Namespace, size: int) -> int:
    from slurmtrain.checkpoint.hf_folder import SHARD_BYTES, check_folder
    from slurmtrain.models.hf_export import export_hf, export_peft

    check_folder(out, force=options.force)
    shard_bytes = options.max_shard_size or SHARD_BYTES
    with progress_bar(path.name, size) as progress:
        done = (
            export_peft(path, out, force=options.force, progress=progress)
            if options.format == "peft"
            else export_hf(
                path, out, dtype=options.dtype, force=options.force, shard_bytes=shard_bytes, progress=progress
            )
        )
    exported = done.exported
    print(f"{out}: {exported.tensors} tensors of model from {path.name}, {format_size(exported.size)}")
    for note in done.notes:
        print(f"note: {note}")
    return 0


def _export_dcp(path: Path, out: Path, options: argparse.Namespace, size: int) -> int:
    from slurmtrain.checkpoint.dcp import export_dcp
    from slurmtrain.checkpoint.hf_folder import check_folder

    check_folder(out, force=options.force)
    with progress_bar(path.name, size) as progress:
        done = export_dcp(path, out, only=options.only, dtype=options.dtype, force=options.force, progress=progress)
    print(f"{out}: {done.tensors} tensors of {options.only} from {path.name}, {format_size(done.size)}")
    return 0
