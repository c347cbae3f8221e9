"""The watch over ranks that hang: every rank has a thread that sees whether its step gets on, and tells the others.

What the main thread does it tells itself (`system/activity.py`). `exchange` sends the heartbeats over the store, `hangs/`
decides, and `watchdog` is the thread that ties them together. supervise/loop.py
watches a rank that is alone.
"""
