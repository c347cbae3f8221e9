"""The files of a checkpoint: their names, the manifest, and how blocks of them are written, read and digested."""
