"""Checks in the allocation before training: the facts of all ranks are gathered, compared, and what differs is named."""
