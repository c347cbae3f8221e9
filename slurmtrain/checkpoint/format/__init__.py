"""The files of a checkpoint: their names, their index and manifest, and how blocks of them are read and digested."""
