"""What runs have done and are doing: status, progress, tables, comparisons, plots. Starts nothing."""
