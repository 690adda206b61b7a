"""Two checkpoints side by side: what differs, and whether they hold the same."""
