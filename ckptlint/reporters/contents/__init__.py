"""What a checkpoint holds, without a verdict: whole, by rank, by tensor and in one region."""
