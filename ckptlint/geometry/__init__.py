"""Chunks in the index space of one tensor: graph and map."""
