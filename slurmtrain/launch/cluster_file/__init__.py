"""conf/cluster/NAME.yaml, as `probe` writes it, from the facts of a cluster: pure functions.

Every value has a comment that tells where it comes from. What SLURM does not say becomes a commented line with a question.
What the file was made of stands at its end, for `probe --check`. `describe` makes the file: `shape` says what a job asks for
on each node, `notes` what SLURM does here, `observed` what it was made of; `content` is its text; `drift` is the check.
"""
