"""The run directory: the one thing that the login node and a job share, with its attempts and what became of them."""
