"""Inferences about the tensors of a checkpoint, shared by the rules; nothing here reads a file."""
