"""One SLURM: a typed client of its commands, its versions, its node lists, and what it tells a process of a job."""
