"""The directory of checkpoints: who may commit into it, the commit itself, what is kept, and a copy in an object store."""
