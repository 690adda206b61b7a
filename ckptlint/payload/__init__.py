"""Reads the records themselves, at depths `headers` and `data`."""
