"""Matches the tensors of two checkpoints with each other."""
