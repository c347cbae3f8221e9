"""The watch over ranks that hang: every rank has a thread that sees whether its step gets on, and tells the others.

What the main thread does it tells itself (`system/activity.py`). `beats` is what a rank says once a second, `exchange` sends
that over the store, `judge` decides whether a rank hangs and which one, `evidence` is what can be known of a process, `page`
writes hang.md, and `watchdog` is the thread that ties them together. `program` watches a program of the user's own by a file,
and supervise/alone.py a rank that is alone.
"""
