"""prepare: raw text -> tokenised shards with a manifest, by any number of processes, tasks and attempts.

The inputs (inputs.py) are cut into units of work by their names and sizes alone (unit_plan.py). A pool of processes
(worker_pool.py) reads each unit (inputs.py), tokenises it, writes it as one shard per split, and then writes a record that it
is done (unit.py). When all records are there, the manifest is written (finish.py). So the data set does not depend on
which process did which unit, when, or how often a process was killed.
"""
