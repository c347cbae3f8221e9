"""Submit, follow, read and end runs: what the command line does, as functions and objects for notebooks and programs.

Nothing here prints, handles signals or ends the process.
"""
