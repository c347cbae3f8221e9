"""checkpoints RUN export and import: weights for other programs, and from them."""

from __future__ import annotations

import argparse
from pathlib import Path

from slurmtrain.checkpoint.format.manifest import read_manifest
from slurmtrain.cli.checkpoints import progress_bar
from slurmtrain.cli.units import format_size
from slurmtrain.errors import UsageError
from slurmtrain.runs.run_dir import RunDir
from slurmtrain.system.files import disk_usage

SUFFIXES = {"safetensors": (".safetensors",), "torch": (".pt", ".pth")}


def export_weights(path: Path, options: argparse.Namespace) -> int:
    """Write the weights of one checkpoint to a file or folder, and print how many tensors it has."""
    out, only = Path(options.out), options.only
    kind = format_of(out, options.format)
    if kind != "hf" and options.max_shard_size is not None:
        raise UsageError(f"--max-shard-size is for --format hf, and this is {kind}")
    if kind in ("hf", "peft") and only != "model":
        raise UsageError(
            f"--only {only}: a Hugging Face folder always contains the whole model", hint="--format safetensors"
        )
    if kind == "peft" and options.dtype is not None:
        raise UsageError("--dtype is not for --format peft, which writes adapters unchanged")
    notes: tuple[str, ...] = ()
    with progress_bar(path.name, read_manifest(path).size) as progress:
        if kind == "hf":
            from slurmtrain.checkpoint.hf_folder import SHARD_BYTES
            from slurmtrain.models.hf_export import export_hf

            size = options.max_shard_size or SHARD_BYTES
            folder = export_hf(path, out, dtype=options.dtype, force=options.force, shard_bytes=size, progress=progress)
            done, notes = folder.exported, folder.notes
        elif kind == "peft":
            from slurmtrain.models.hf_export import export_peft

            folder = export_peft(path, out, force=options.force, progress=progress)
            done, notes = folder.exported, folder.notes
        else:
            from slurmtrain.checkpoint.dcp import export_dcp
            from slurmtrain.checkpoint.export import export

            write = export_dcp if kind == "dcp" else export
            done = write(path, out, only=only, dtype=options.dtype, force=options.force, progress=progress)
    print(f"{out}: {done.tensors} tensors of {only} from {path.name}, {format_size(done.size)}")
    for note in notes:
        print(f"note: {note}")
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
