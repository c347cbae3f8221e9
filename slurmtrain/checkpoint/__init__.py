"""Save, commit, verify, restore. Knows no trainer and no SLURM."""

from slurmtrain.checkpoint.checkpointer import Checkpointer, Restored, Saved
from slurmtrain.checkpoint.commit import Incarnation

__all__ = ["Checkpointer", "Incarnation", "Restored", "Saved"]
