"""From the global order of samples to the micro batches of each rank."""
