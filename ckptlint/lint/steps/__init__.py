"""The steps of a run: which to trust, and which may be deleted."""
