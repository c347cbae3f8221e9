"""The verbs that only the batch script calls."""
