"""Live mode: the verdict inside a running job, on what its ranks hold. docs/live.md tells how.

This package is the only part of ckptlint that imports torch, and only inside functions that need it.
"""
