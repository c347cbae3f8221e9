"""Planning: the memory that a run will need, by arithmetic alone, before anything is submitted.

Imports neither torch nor SLURM's parts.
"""
