"""LIV108: Two values of one rank would be saved under one key."""

from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.held_by_ranks import told
from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Severity, rule


@rule("LIV108", "fqn-collision", Severity.ERROR, live=True)
def fqn_collision(ckpt: Checkpoint) -> Iterator[Finding]:
    """Two values of one rank would be saved under one key.

    What it checks:
        Every path through the state dict gives another key, once joined by dots.
    Why it matters:
        One of the two overwrites the other without a message.
    Usual causes:
        A key holds a dot, or a number stands as text and as a number in one mapping.
    How to fix:
        Rename one of them.
    See:
        torch.distributed.checkpoint._nested_dict.flatten_state_dict
    """
    yield from told(ckpt)
