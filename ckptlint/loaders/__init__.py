"""A folder to a Checkpoint: what it holds, which layout it has, what its metadata says."""
