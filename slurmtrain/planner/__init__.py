"""Planning: what a run will need, by arithmetic alone, before anything is submitted. Knows neither torch nor SLURM."""
