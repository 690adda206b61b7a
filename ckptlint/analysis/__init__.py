"""What the tensors of a checkpoint say about each other; read by rules, never reading a file."""
