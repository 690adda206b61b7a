"""Rules of Acme for saved checkpoints."""
