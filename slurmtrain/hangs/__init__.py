"""What is known of ranks that hang. Loads no torch, since the supervisor uses it as well.

`beats` is what a rank says once a second, `judge` decides whether a rank hangs and which one, `evidence` is what can be known
of a process, and `page` writes hang.md.
"""
