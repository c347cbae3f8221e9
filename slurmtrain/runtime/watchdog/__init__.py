"""The watch over ranks that hang: every rank has a thread that sees whether its step gets on, and tells the others.

`phases` names what a main thread is doing by its stack, `progress` says how long it may, `heartbeats` exchanges both over
the store, `evidence` gathers what is known of a process, `report` decides which ranks did not come and writes the page,
and `watchdog` is the thread that ties them together. Training knows nothing of it.
"""
