"""Whether two checkpoints hold the same values, whatever they are cut into and called: told by words of rows."""
