"""prepare: raw text -> tokenised shards with a manifest, by any number of processes, tasks and attempts.

Its way: inputs (sources.py) -> units of work, by names and sizes alone (plan.py) -> each read (reading.py), tokenised and
written as one shard a split, with a record when it is done (unit.py), by a crew of processes (crew.py) -> when all records
are there, the manifest (finish.py). So the data set does not depend on who did which unit, when, or how often it was killed.
"""
