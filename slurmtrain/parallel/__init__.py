"""Parallelism: distribute a model over the ranks. One module for each kind; `lay` applies them in their order."""
