"""The verb `plan`: one module for what it computes from, and one for each form of its answer."""
