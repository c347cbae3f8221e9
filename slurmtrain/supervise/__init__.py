"""Inside a job, around its ranks: one loop for every platform. It imports no torch.

`loop` claims an attempt, lets a platform start the ranks, waits until every one has left, has the attempt judged (`finish`,
`evidence`, runs/outcome.py), and lets the platform go on. `platforms.slurm` is a batch job, `platforms.local` this machine.
"""
