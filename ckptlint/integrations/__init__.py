"""Where trainers save: each finished save is checked in a process of its own.

`check_saved` does it; the modules here call it at the right moment: `transformers`, `lightning`, `accelerate`,
`torchtitan`, `megatron`. They check on rank 0 alone, and no rank communicates for it.
"""

from ckptlint.integrations.saved import SaveCheck, check_saved

__all__ = ["SaveCheck", "check_saved"]
