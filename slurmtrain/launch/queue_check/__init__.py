"""Compare what a job asks for with the facts of the cluster, before it is queued, and say what to change: pure functions.

SLURM refuses some of it in a word or two, and lets other jobs wait for ever (PartitionTimeLimit, QOSMaxGRESPerJob). What is
certain is fatal; what only may be so is a warning: a fact that is not known refuses no job.

`request` looks at a whole request: `access` at who may use a partition, `nodes` at what its nodes have, `limits` at what a
job may ask for at most.
"""
