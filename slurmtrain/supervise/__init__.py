"""Inside a job, around its ranks: one loop for every platform. It imports no torch.

`loop.supervise` is its life, attempt after attempt:

- Is anything left to do for the run (`requeue`)? Claim an attempt.
- Copy what cluster.stage names to the nodes (`staging`), start the ranks, survive the signals that are meant for them, and
  wait until every rank has left: `platforms.slurm` in a batch job, `platforms.pods` in a pod of Kubernetes or another engine,
  `platforms.local` on this machine, which also starts the processes of a pod.
- Gather the evidence, decide (runs/decide.py), and complete the record (`end_of_attempt`).
- Start the ranks again in the same job (`in_place`), or let the run go on after it (`requeue`): SLURM requeues the job, a new
  one is submitted, the next one of a chain continues, or the run has ended.
- Run the hook for that (`hooks`).

Several runs that share a job are supervised at the same time.
"""
