"""What a job of another shape would read from a checkpoint, and whether it can load it."""
