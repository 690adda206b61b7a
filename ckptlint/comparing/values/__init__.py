"""Whether two checkpoints hold the same numbers, whatever their names, cut, merge or quantisation."""
