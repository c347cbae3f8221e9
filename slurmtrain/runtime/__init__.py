"""Everything inside the job: the programs of its ranks, their signals and records, and the batch script's verdict."""
