"""The sections of the page of a run: one module for each group of them."""
