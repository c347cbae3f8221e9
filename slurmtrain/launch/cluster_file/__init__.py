"""conf/cluster/NAME.yaml, as `probe` writes it, from the facts of a cluster: pure functions.

Every value has a comment that tells where it comes from. What SLURM does not say becomes a commented line with a question.
`describe` makes the file: `shape` says what a job asks for on each node; `content` is its text.
"""
