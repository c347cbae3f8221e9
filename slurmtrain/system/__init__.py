"""What the operating system offers: files, processes, signals and claims. Knows neither runs nor SLURM."""
