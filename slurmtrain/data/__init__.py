"""Data: where samples come from, in which order, and how they reach each rank.

Names are loaded on first use: preparing data and reading a manifest are done without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slurmtrain.data.loading.batches import IGNORED_TARGET as IGNORED_TARGET
    from slurmtrain.data.loading.batches import Batch as Batch
    from slurmtrain.data.loading.loader import BatchLoader as BatchLoader
    from slurmtrain.data.loading.loader import eval_batches as eval_batches
    from slurmtrain.data.loading.order import permute as permute
    from slurmtrain.data.loading.order import sample_ids as sample_ids
    from slurmtrain.data.sources.mixture import Mixture as Mixture
    from slurmtrain.data.sources.prepared import PreparedText as PreparedText
    from slurmtrain.data.sources.protocol import MapDataset as MapDataset
    from slurmtrain.data.sources.text import ByteText as ByteText
    from slurmtrain.data.sources.text import ByteWindows as ByteWindows
    from slurmtrain.data.sources.text import StdlibText as StdlibText
    from slurmtrain.data.sources.text import TextFiles as TextFiles

_HOMES = {
    "loading.batches": ("Batch", "IGNORED_TARGET"),
    "loading.loader": ("BatchLoader", "eval_batches"),
    "sources.mixture": ("Mixture",),
    "loading.order": ("permute", "sample_ids"),
    "sources.prepared": ("PreparedText",),
    "sources.protocol": ("MapDataset",),
    "sources.text": ("ByteText", "ByteWindows", "StdlibText", "TextFiles"),
}
_PUBLIC = {name: module for module, names in _HOMES.items() for name in names}
__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)
