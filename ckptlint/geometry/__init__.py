"""Chunks in the index space of one tensor: graph, map, holes and overlaps."""
