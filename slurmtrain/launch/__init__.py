"""One job, on the login node: from a config to a job in the queue, or to processes of this machine."""
