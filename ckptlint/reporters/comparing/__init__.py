"""What differs between two checkpoints, and how far one step is from another."""
