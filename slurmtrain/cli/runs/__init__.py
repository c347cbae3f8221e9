"""The verb `runs`: one module for each of its actions."""
