"""A folder to a Checkpoint: what lies there, which layout it has, what its metadata says."""
