"""What the ranks of a job wrote, planned and hold."""
