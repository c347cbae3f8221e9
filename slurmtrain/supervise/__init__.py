"""Inside a job, around its ranks: one loop for every platform. It imports no torch.

`loop.supervise` is its life, attempt after attempt:

- Is anything left to do for the run (`anything_left`)? Claim an attempt.
- Copy what cluster.stage names to the nodes (`staging`), start the ranks, survive the signals that are meant for them, and
  wait until every rank has left: `platforms.slurm` in a batch job, `platforms.pods` in a pod of Kubernetes or another engine,
  `platforms.local` on this machine; `platforms.local_ranks` starts the processes for the last two.
- Gather the evidence (`gather_evidence`), decide (runs/decide.py), and complete the record (`end_of_attempt`).
- Start the ranks again in the same job (`in_place`), or let the run go on after it (`requeue`): SLURM requeues the job, a new
  one is submitted, the next one of a chain continues, or the run has ended.
- Run the hook for that (`hooks`).

`packed` does this for each of several runs that share a job. `abandoned` completes the records of attempts whose supervisor is
gone, and `node_watch` guards this process from another node.
"""
