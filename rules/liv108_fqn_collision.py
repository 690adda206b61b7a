"""LIV108: Two values of one rank have the same key."""

from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.ranks.held_by_ranks import reported
from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Severity, rule


@rule("LIV108", "fqn-collision", Severity.ERROR, live=True)
def fqn_collision(ckpt: Checkpoint) -> Iterator[Finding]:
    """Two values of one rank have the same key.

    What it checks:
        Joined by dots, every path through the state dict gives a key of its own.
    Why it matters:
        One of the two overwrites the other without a message.
    Usual causes:
        A key contains a dot, or a mapping has a number both as text and as a number.
    How to fix:
        Rename one of them.
    See:
        torch.distributed.checkpoint._nested_dict.flatten_state_dict
    """
    yield from reported(ckpt)
