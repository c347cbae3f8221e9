"""Training scripts of other libraries: a thin module for each, imported only by the scripts that use it."""
