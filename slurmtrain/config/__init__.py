"""The config: its schema, its composition by Hydra, and the checks before anything is submitted."""
