"""Checkpoints that are files of torch.save: one of a whole state, or one for each rank, layer or expert."""
