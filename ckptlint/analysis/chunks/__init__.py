"""Faults in the chunks of a tensor, the ranks that should have saved missing parts, and files of two saves."""
