"""The files of a checkpoint: their names, their headers and manifest, and how blocks of them are read and digested."""
