"""The way of a save: when one is due, which rank writes what, the copy in host memory, and the thread that writes it."""
