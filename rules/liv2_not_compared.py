"""LIV210 to LIV213: why nothing, or not all, was compared between the ranks."""

from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.ranks.rank_chunks import reported
from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Severity, rule


@rule("LIV210", "rank-unreadable", Severity.ERROR, always=True, live=True)
def rank_unreadable(ckpt: Checkpoint) -> Iterator[Finding]:
    """A rank could not read its own state, so nothing was compared.

    What it checks:
        Every rank can walk its state dict and hash its values.
    Why it matters:
        The state that this rank is about to save was not checked.
    Usual causes:
        A `state_dict()` that raises, or a tensor type that ckptlint does not know.
    How to fix:
        Fix the exception in the message. The LiveError of that rank carries its traceback.
    """
    yield from reported(ckpt)


@rule("LIV211", "rank-absent", Severity.WARNING, always=True, live=True)
def rank_absent(ckpt: Checkpoint) -> Iterator[Finding]:
    """A rank did not come to the check, or was lost in it.

    What it checks:
        Every rank enters the check in time, and its reductions finish.
    Why it matters:
        This save was not verified. The job itself goes on.
    Usual causes:
        A rank raised before the check, skips it under a condition that the others do not meet, or is dead.
    How to fix:
        Look at the logs of the named ranks. Call the check on all ranks.
    """
    yield from reported(ckpt)


@rule("LIV212", "settings-differ", Severity.WARNING, always=True, live=True)
def settings_differ(ckpt: Checkpoint) -> Iterator[Finding]:
    """The ranks did not check the same thing, so nothing was compared.

    What it checks:
        The version of ckptlint, the options and the tag are the same on all ranks.
    Why it matters:
        Nothing was verified.
    Usual causes:
        Different installations, or a tag made from a rank's own clock or counter.
    How to fix:
        Install one version everywhere; use the step or the path as the tag.
    """
    yield from reported(ckpt)


@rule("LIV213", "not-compared", Severity.INFO, always=True, live=True)
def not_compared(ckpt: Checkpoint) -> Iterator[Finding]:
    """Part of the state was not compared.

    What it checks:
        The check compared everything that the ranks hold, contents of objects included.
    Why it matters:
        A fault in the rest would go unseen.
    Usual causes:
        Some contents differ between ranks by design (random states, data loaders) and are left out; or the memory for
        digests ran out.
    How to fix:
        Nothing, unless the part matters to you.
    """
    yield from reported(ckpt)
