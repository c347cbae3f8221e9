"""Time and memory of weights that come in and go out, beside safetensors' own reading and writing of the same files.

    python -m tests.bench weights [--gb 2] [--rounds 3]

A decoder of that size in bfloat16 lies in a folder of Hugging Face, and in float32 in a checkpoint. Each row is a process of
its own, in turns; memory is the most that it had resident beyond what it had before it began, with the pages of mapped files
(which the kernel may take back) told apart. The files are in the page cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

DIM, LAYER = 1024, 12 * 1024 * 1024 + 2 * 1024  # parameters of a layer with hidden_dim 8/3 of dim, roughly


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench weights", description=__doc__)
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--row", nargs=2, metavar=("NAME", "FOLDER"), help="measure one row, in this process")
    options = parser.parse_args(sys.argv[2:])
    if options.row:
        print(json.dumps(_measured(ROWS[options.row[0]], Path(options.row[1]))))
        return
    with tempfile.TemporaryDirectory(prefix="weights-") as folder:
        prepare = subprocess.run(
            [sys.executable, "-c", f"from tests.bench.weights import prepare; print(prepare({folder!r}, {options.gb}))"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        print(f"a folder of {int(prepare.stdout) / 1e9:.2f} GB in bfloat16, a checkpoint of twice that in float32")
        found: dict[str, list[dict[str, float]]] = {name: [] for name in ROWS}
        for _ in range(options.rounds):
            for name in ROWS:
                words = [sys.executable, "-m", "tests.bench", "weights", "--row", name, folder]
                done = subprocess.run(words, capture_output=True, text=True, check=True)
                found[name].append(json.loads(done.stdout.splitlines()[-1]))
    print(f"{'':44}{'time':>8}{'own memory':>14}{'with mapped files':>20}")
    for name, rows in found.items():
        seconds, own, all_ = (statistics.median(row[key] for row in rows) for key in ("seconds", "own", "all"))
        print(f"{name:44}{seconds:6.2f} s{own / 1e9:11.2f} GB{all_ / 1e9:17.2f} GB")


def prepare(folder: str, gb: float) -> int:
    """Make a checkpoint, and a folder of Hugging Face from it; return the folder's bytes of tensors."""
    import torch

    from slurmtrain.checkpoint.checkpointer import Checkpointer
    from slurmtrain.checkpoint.format.directory import committed
    from slurmtrain.models import Decoder
    from slurmtrain.models.hf_export import export_hf

    config: dict[str, Any] = {
        "vocab_size": 32003, "dim": DIM, "n_layers": max(1, int(gb * 1e9 / 2 / LAYER)), "n_heads": 16, "n_kv_heads": 4,
        "max_seq_len": 128, "tie_embeddings": True,
    }  # fmt: skip
    with torch.device("meta"):
        model = Decoder(**config)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.normal_(std=0.02)
    checkpointer = Checkpointer(
        Path(folder, "checkpoints"), config={"model": {"_target_": "slurmtrain.models.Decoder", **config}}
    )
    checkpointer.save(1, model=model)
    checkpointer.close()
    exported = export_hf(committed(Path(folder, "checkpoints"))[-1], Path(folder, "hf"), dtype="bfloat16").exported
    return exported.size


def _decoder(folder: Path) -> Any:
    """An empty decoder of the folder's sizes, whose memory is no part of what is measured."""
    import torch

    from slurmtrain.config.families import with_sizes
    from slurmtrain.models import Decoder

    config = with_sizes({"_target_": "slurmtrain.models.Decoder", "path": str(folder / "hf")})
    with torch.device("meta"):
        model = Decoder(**{name: value for name, value in config.items() if name != "_target_"})
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.zero_()  # its pages are there
    return model


def _ours_in(folder: Path) -> Callable[[], Any]:
    from slurmtrain.models.pretrained import load_pretrained

    model = _decoder(folder)
    return lambda: load_pretrained(model, folder / "hf")


def _safetensors_in(folder: Path) -> Callable[[], Any]:
    import torch
    from safetensors import safe_open

    from slurmtrain.config.families import hugging_face_name

    model = _decoder(folder)
    names = {hugging_face_name(name): parameter for name, parameter in model.named_parameters()}

    @torch.no_grad()
    def read() -> None:
        for file in sorted((folder / "hf").glob("*.safetensors")):
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (it is no dict)
                    names[name].copy_(opened.get_tensor(name))

    return read


def _safetensors_whole(folder: Path) -> Callable[[], Any]:
    import torch
    from safetensors.torch import load_file

    from slurmtrain.config.families import hugging_face_name

    model = _decoder(folder)
    names = {hugging_face_name(name): parameter for name, parameter in model.named_parameters()}

    @torch.no_grad()
    def read() -> None:
        for file in sorted((folder / "hf").glob("*.safetensors")):
            for name, tensor in load_file(file).items():
                names[name].copy_(tensor)

    return read


def _ours_out(folder: Path) -> Callable[[], Any]:
    from slurmtrain.checkpoint.format.directory import committed
    from slurmtrain.models.hf_export import export_hf

    path = committed(folder / "checkpoints")[-1]
    return lambda: export_hf(path, folder / "out", dtype="bfloat16", force=True)


def _safetensors_out(folder: Path) -> Callable[[], Any]:
    """What a script does: read the state dict, convert it, write it; safetensors' own writer does not fsync, so we do."""
    import os

    import torch
    from safetensors.torch import save_file

    from slurmtrain.checkpoint.format.directory import committed
    from slurmtrain.checkpoint.restore.reader import load

    path = committed(folder / "checkpoints")[-1]

    def write() -> None:
        state = {name: tensor.to(torch.bfloat16) for name, tensor in load(path).items() if name.startswith("model.")}
        (folder / "theirs").mkdir(exist_ok=True)
        save_file(state, folder / "theirs" / "model.safetensors")
        descriptor = os.open(folder / "theirs" / "model.safetensors", os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

    return write


ROWS: dict[str, Callable[[Path], Callable[[], Any]]] = {
    "in: load_pretrained": _ours_in,
    "in: safetensors.safe_open, tensor by tensor": _safetensors_in,
    "in: safetensors.load_file": _safetensors_whole,
    "out: export --format hf": _ours_out,
    "out: whole state dict, save_file": _safetensors_out,
}


def _measured(row: Callable[[Path], Callable[[], Any]], folder: Path) -> dict[str, float]:
    """Seconds, and the most memory beyond that of before: anonymous memory, and all that was resident."""
    work = row(folder)
    before, most, ended = _resident(), [0, 0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.005):
            most[:] = [max(pair) for pair in zip(most, _resident(), strict=True)]

    watcher = threading.Thread(target=watch)
    watcher.start()
    begun = time.perf_counter()
    work()
    seconds = time.perf_counter() - begun
    ended.set()
    watcher.join()
    return {"seconds": seconds, "own": max(0, most[0] - before[0]), "all": max(0, most[1] - before[1])}


def _resident() -> list[int]:
    """Bytes of anonymous memory, and of all that is resident."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return [1024 * int(fields[name].split()[0]) for name in ("RssAnon", "VmRSS")]
