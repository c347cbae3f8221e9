"""drill: interrupt tiny runs in every way that a site knows, or runs of the user's own, and judge how they come back.

`ways` says what is tried, `run` starts, interrupts and ends the runs, `judge` decides from plain values.
"""
