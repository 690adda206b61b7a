"""LIV304: what was loaded is what was sealed."""

from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.held_by_ranks import told
from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Severity, rule


@rule("LIV304", "loaded-differs-from-seal", Severity.ERROR, live=True)
def loaded_differs_from_seal(ckpt: Checkpoint) -> Iterator[Finding]:
    """The values that the ranks loaded are not those that the saving job held.

    What it checks:
        After a load, `live.check_loaded` adds up the digests of what the ranks hold, in whatever layout, and compares
        them with those of ckptlint.seal.json, tensor by tensor.
    Why it matters:
        The job goes on with values that nobody trained.
    Usual causes:
        A shard that was loaded into the wrong rank, a fault in resharding, a payload that changed after it was sealed.
    How to fix:
        Run `ckptlint --depth data` on the folder: where LIV302 names the tensor too, the payload is wrong, else the
        load.
    See:
        ckptlint.live.check_loaded
    """
    yield from told(ckpt, hint="compare the payload with the seal: ckptlint --depth data")
