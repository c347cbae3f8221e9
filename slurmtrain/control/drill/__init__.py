"""drill: interrupt tiny runs in every way that a site knows, or a run of the user's own, and judge how they come back.

`ways` says what is tried and how, `judge` and `comparison` decide from plain values, `preemptors` finds out who may preempt
whom, `scratch` starts and ends the runs, `site` and `own` are the two drills.
"""
