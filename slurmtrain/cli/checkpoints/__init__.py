"""The verb `checkpoints`: one module for each of its actions."""
