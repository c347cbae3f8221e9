"""Training: the loop, its optimiser, its evaluation, and what ends it."""
