"""The way of a restore: the choice of a checkpoint, whether it fits, and reading it into the tensors of this rank."""
