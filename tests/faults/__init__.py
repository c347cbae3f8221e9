"""The fault matrix: what a person has after any plug was pulled at any moment. `python -m tests.faults` prints the table."""
