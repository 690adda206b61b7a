"""What torch.distributed.checkpoint writes, and what Megatron-Core adds: metadata, plans and payload files."""
