"""Benchmarks: ratios of things measured side by side in one run. `python -m tests.bench` lists them.

None of them is a test: machines are shared and noisy, and a time that fails a build on a busy day teaches nothing.
"""
