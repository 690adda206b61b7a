"""What the numbers of a checkpoint say of each other: elements drawn by place, pairs of them, statistics."""
