"""Data: where samples come from, in which order, and how they reach each rank."""

from slurmtrain.data.loader import Batch, BatchLoader, MapDataset, eval_batches
from slurmtrain.data.order import permute, sample_ids
from slurmtrain.data.prepared import PreparedText
from slurmtrain.data.text import IGNORED_TARGET, ByteText, ByteWindows, StdlibText, TextFiles

__all__ = [
    "IGNORED_TARGET",
    "Batch",
    "BatchLoader",
    "ByteText",
    "ByteWindows",
    "MapDataset",
    "PreparedText",
    "StdlibText",
    "TextFiles",
    "eval_batches",
    "permute",
    "sample_ids",
]
