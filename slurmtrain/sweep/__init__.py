"""Many points: the plan of a sweep, its folder, its jobs, searches, and the launcher for Hydra programs."""
