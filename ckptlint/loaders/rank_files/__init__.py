"""Checkpoints that are files of torch.save, one for each rank, layer or expert."""
