"""Save, commit, verify, restore. Knows no trainer and no SLURM.

Nothing is imported here: `commit` needs no torch, and what only looks at checkpoints (status, settle) must not load it.
"""
