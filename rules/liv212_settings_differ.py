"""LIV212: The ranks did not check the same thing, so nothing was compared."""

from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.ranks.held_by_ranks import reported
from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Severity, rule


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
