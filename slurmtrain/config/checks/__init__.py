"""Checks of the parts of a config, one module for each subject; `config.validate` calls them in order."""
