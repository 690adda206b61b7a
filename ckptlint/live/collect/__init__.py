"""What this rank holds, without asking the others."""
