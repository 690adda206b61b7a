"""Untrusted bytes to plain values, one file format each; nothing here knows a checkpoint."""
