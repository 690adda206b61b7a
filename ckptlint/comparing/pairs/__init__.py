"""Which tensor of one checkpoint is which of the other."""
