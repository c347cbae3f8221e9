"""Save, commit, verify, restore. It knows nothing of the trainer or of SLURM.

Why not torch.distributed.checkpoint? A requeued job has to know, without a person who looks, which of the checkpoints
that killed processes have left is whole, and that it is the one that may go on. Up to torch 2.13 that library writes
shards in place, records them by sizes and keys, and keeps no digest of what is in them: a flipped bit is loaded. Its
record of a checkpoint is a pickle, and loading one runs what it says. Here:

- Every file is digested while it is written, flushed, and written into a directory of this incarnation of the run. The
  commit is one rename of that directory, with a JSON manifest and COMPLETE in it. A save that was killed leaves nothing
  that a reader looks at, and a committed checkpoint is never written to again.
- Rank 0 commits only if the pieces cover every tensor, and no newer incarnation has claimed the directory: a rank of an
  attempt that SLURM has requeued since, and that lives on, cannot commit over its successor.
- A restore compares files with their digests before it touches a tensor. It sets damaged checkpoints aside and takes the
  next older one: a requeue ends in an earlier step, not in a crash loop or in silently wrong weights.
- Weights are safetensors, the rest is JSON: no pickle is written or read.
- What a save writes is planned once, and the plan is reused while names, shapes and dtypes stay.

The price is that other programs do not read these checkpoints as they are: `checkpoints RUN export` writes one file.

`checkpointer` is the way in: `save.job` is the way of a save, `restore.restorer` that of a restore, and `store.commit` the
protocol that both rest on, with the rename in `commit`. What a manifest holds is in `format.manifest`. Digests are
checked by `format.blocks.check_block`, for restores and exports (`restore.reader`) as for `verify`. `weights` has what goes
out to other programs and comes in from them.

Nothing is imported here: `store` needs no torch, and programs that only look at checkpoints (status, the supervisor)
must not load it.
"""
