"""Copies of code, environment and data on each node of a job, made before the ranks start (cluster.stage)."""
