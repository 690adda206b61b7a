"""Compares the tensors of a checkpoint with those that its configuration implies."""
