"""checkpoints: list, verify, prune and export the checkpoints that a run can be resumed from, and import weights as one.

Works on a run, on any directory of checkpoints, and on a single one. Only `export` and `import` import torch.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

from slurmtrain.cli.arguments import Parser
from slurmtrain.cli.checkpoints.export import FORMATS, export_weights
from slurmtrain.cli.checkpoints.import_ import import_checkpoint
from slurmtrain.cli.checkpoints.listing import list_checkpoints
from slurmtrain.cli.checkpoints.prune import prune_checkpoints
from slurmtrain.cli.checkpoints.target import CheckpointTarget, find_target
from slurmtrain.cli.checkpoints.verify import verify_checkpoints
from slurmtrain.errors import SlurmtrainError
from slurmtrain.system.records import printable

DTYPES = ("float32", "float16", "bfloat16", "float64")


def main(verb: str, words: list[str]) -> int:
    """Run the verb and return its exit code."""
    options = _parser(verb).parse_args(words)
    actions: dict[str, Callable[[CheckpointTarget, argparse.Namespace], int]] = {
        "list": list_checkpoints,
        "verify": verify_checkpoints,
        "prune": prune_checkpoints,
        "export": export_weights,
    }
    try:
        if options.action == "import":
            return import_checkpoint(options)
        return actions[options.action or "list"](find_target(options.run), options)
    except SlurmtrainError as error:
        # Names out of a checkpoint must not steer the terminal.
        error.message = printable(error.message)
        error.hint = printable(error.hint) if error.hint else None
        raise


def _parser(verb: str) -> Parser:
    parser = Parser.of(verb)
    parser.add_argument(
        "run",
        metavar="RUN",
        help="a run ID, a unique prefix of one, a path, or last; or the path of a directory of checkpoints, or of a checkpoint",
    )
    parser.add_argument("--json", action="store_true", help="list and verify print a list of objects, for a program")
    actions = parser.add_subparsers(
        dest="action", metavar="list|verify|prune|export|import", title="actions", prog=f"{parser.prog} RUN"
    )
    listing = actions.add_parser("list", help="print a table of the checkpoints; checks sizes only (default)")

    verify = actions.add_parser(
        "verify",
        help="compare every file with its digest, and the files with each other",
        description="Reads every file, compares it with its digest, and checks that together they hold every tensor. "
        "Exit code 1 when anything is damaged.",
    )
    verify.add_argument("step", nargs="?", type=int, metavar="STEP", help="verify only this checkpoint")
    for action in (listing, verify):  # suppressed: its absence here must not undo what stands before the action
        action.add_argument(
            "--json", action="store_true", default=argparse.SUPPRESS, help="print a list, for a program"
        )

    prune = actions.add_parser(
        "prune",
        help="remove checkpoints that need not be kept",
        description="Removes checkpoints that no rule wants, once the newest is verified. The newest two always stay, the "
        "newest from before numbers broke, and what somebody reads. Without an option: by the run's own checkpoint.keep_* "
        "(no run: the last 2), and leftovers.",
    )
    prune.add_argument("--keep-last", type=int, metavar="N", help="keep the newest N, at least 2")
    prune.add_argument("--keep-every", type=int, metavar="N", help="also keep those whose step is a multiple of N")
    prune.add_argument("--best", type=int, metavar="N", help="also keep the N best by --metric")
    prune.add_argument(
        "--metric", metavar="NAME", help="a metric that was saved with the checkpoints (default: valid_loss)"
    )
    prune.add_argument(
        "--mode", choices=("min", "max"), help="whether lower or higher values are better (default: min)"
    )
    prune.add_argument(
        "--damaged", action="store_true", help="remove checkpoints that a restore has set aside as damaged"
    )
    prune.add_argument(
        "--leftovers", action="store_true", help="remove leftovers of killed saves that have not changed for an hour"
    )
    prune.add_argument("--dry-run", action="store_true", help="only show what would be removed")

    export = actions.add_parser(
        "export",
        help="export the weights for other programs: a Hugging Face folder, or a file",
        description="Writes the tensors of one object to a folder or file, whatever number of ranks saved them. A folder of "
        "Hugging Face has config.json and the tokenizer, too.",
    )
    export.add_argument(
        "out",
        type=Path,
        metavar="OUT",
        help="a folder for --format hf, peft and dcp; FILE.safetensors, FILE.pt or FILE.pth",
    )
    export.add_argument(
        "--format",
        choices=FORMATS,
        help="hf: for transformers, vLLM and others, with adapters merged; peft: adapters only; dcp: for "
        "torch.distributed.checkpoint; default: by OUT's suffix",
    )
    export.add_argument("--step", type=int, metavar="N", help="default: the newest checkpoint")
    export.add_argument(
        "--only", default="model", metavar="NAME", help="the object that was saved as NAME (default: model)"
    )
    export.add_argument("--dtype", choices=DTYPES, help="convert floating-point tensors; default: no conversion")
    export.add_argument(
        "--max-shard-size",
        type=size_in_bytes,
        metavar="SIZE",
        help="with --format hf: size of each file (default: 5GB)",
    )
    export.add_argument("--force", action="store_true", help="replace OUT if it exists")

    imported = actions.add_parser(
        "import",
        help="convert another program's weights into a checkpoint in the folder RUN",
        description="Makes a checkpoint of step 0 in the folder RUN, for checkpoint.restore_from with "
        "checkpoint.restore_only=model. Nothing in SOURCE is executed.",
    )
    imported.add_argument(
        "source",
        metavar="SOURCE",
        help="a folder of Hugging Face or torch.distributed.checkpoint; FILE.safetensors; a file of torch.save",
    )
    imported.add_argument(
        "--only", metavar="NAME", help="the tensors whose names begin with NAME and a dot (default: the model's)"
    )
    return parser


def size_in_bytes(text: str) -> int:
    """Return the bytes of a size such as 5GB or 500MB."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(|[KMGT])i?B", text.strip(), re.IGNORECASE)
    base = 1024 if "i" in text.lower() else 1000
    size = int(float(found[1]) * base ** " KMGT".index(found[2].upper() or " ")) if found else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 5GB or 500MB")
    return size
