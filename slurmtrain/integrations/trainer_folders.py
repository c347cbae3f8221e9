"""The checkpoint folders of Hugging Face's Trainer: which one is complete, and what to do with one that a kill left torn.

Looks at files only, and imports neither transformers nor torch.
"""

from __future__ import annotations

import json
import logging
import re
from contextlib import suppress
from pathlib import Path

from slurmtrain.runs.program_checkpoints import cut

log = logging.getLogger(__name__)

STATE_FILE = "trainer_state.json"  # Trainer writes it after everything else that a checkpoint needs
FOLDER = re.compile(r"checkpoint-(\d+)")
TORN = "torn-"  # begins the names of folders that were moved aside; Trainer's own search and removal pass them over
SENTINEL = "checkpoint-is-incomplete.txt"  # of TrainingArguments(enable_jit_checkpoint=True), while it saves
CALLBACK = "SlurmtrainCallback"  # keeps the number of ranks in the state
# What Trainer resumes from. Of other files nothing is known: a mark that somebody's callback leaves may well be empty.
NEEDED = (".safetensors", ".pt", ".pth", ".bin", "config.json", ".index.json")


def newest_complete(output_dir: Path) -> Path | None:
    """Return the newest complete checkpoint, and move newer ones that are torn aside."""
    numbered = [(int(match.group(1)), path) for path in _folders(output_dir) if (match := FOLDER.fullmatch(path.name))]
    for _, path in sorted(numbered, reverse=True):
        reason = torn(path)
        if reason is None:
            return path
        aside, number = path.with_name(TORN + path.name), 1
        while aside.exists():
            number += 1
            aside = path.with_name(f"{TORN}{path.name}.{number}")
        path.rename(aside)
        log.warning("%s is not complete and was moved aside, to %s: %s", path, aside.name, reason)
    return None


def _folders(path: Path) -> list[Path]:
    with suppress(FileNotFoundError):
        return [entry for entry in path.iterdir() if entry.is_dir()]
    return []


def torn(checkpoint: Path) -> str | None:
    """Return why a checkpoint of Trainer's is not complete, in one sentence; None: it is."""
    try:
        state = json.loads((checkpoint / STATE_FILE).read_text())
        kept = (state.get("stateful_callbacks") or {}).get(CALLBACK) or {}
        ranks = kept["attributes"]["world_size"] if isinstance(kept, dict) and kept else 0
        step = state["global_step"]
    except FileNotFoundError:
        return f"it has no {STATE_FILE}, which Trainer writes last"
    except (ValueError, KeyError, AttributeError, TypeError):
        return f"its {STATE_FILE} is not whole"
    if checkpoint.name != f"checkpoint-{step}":
        return f"its {STATE_FILE} is of step {step}"
    if (checkpoint / SENTINEL).exists():
        return f"it has a {SENTINEL}"
    missing = [rank for rank in range(ranks) if ranks > 1 and not (checkpoint / f"rng_state_{rank}.pth").exists()]
    if missing:
        return f"the random state of rank {missing[0]} is missing"
    for path in sorted(checkpoint.rglob("*")):
        reason = (cut(path) or _missing_shard(path)) if path.name.endswith(NEEDED) and path.is_file() else None
        if reason:
            return f"{path.relative_to(checkpoint)}: {reason}"
    return None


def _missing_shard(path: Path) -> str | None:
    """Return which file of weights an index names that is not there; None: all are, or it is no index."""
    if not path.name.endswith(".index.json"):
        return None
    try:
        shards = set(json.loads(path.read_text())["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError):
        return "it is no index"
    return next((f"there is no {name}" for name in sorted(shards) if not (path.parent / name).exists()), None)
