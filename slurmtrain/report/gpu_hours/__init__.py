"""The time and the GPU hours of runs by cause: what was productive, and what was lost to what."""
