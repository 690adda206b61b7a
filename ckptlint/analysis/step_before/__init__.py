"""A checkpoint against the step before it: what follows from what, how far it moved, and what leapt."""
