"""Parallelism: distribute a model over the ranks. One module for each kind; `parallelize` applies them in their order."""
