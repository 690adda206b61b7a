"""Pickles: read, never run."""
