"""Everything inside the job: the programs of its ranks, their signals and records."""
