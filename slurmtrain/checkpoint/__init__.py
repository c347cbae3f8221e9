"""Save, commit, verify, restore. It knows nothing of the trainer or of SLURM.

Nothing is imported here: `commit` needs no torch, and programs that only look at checkpoints (status, settle) must not
load it.
"""
