"""The zip archives of torch.save, member by member."""
