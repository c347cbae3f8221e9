"""Everything on the login node: from a config to jobs in the queue, and from runs to tables."""
