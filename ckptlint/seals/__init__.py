"""Digests of contents, and the file beside a checkpoint that keeps them."""
