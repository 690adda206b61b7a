"""What the records themselves hold, at depths headers and data."""
