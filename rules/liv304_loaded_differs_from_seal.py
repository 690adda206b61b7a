from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.ranks.rank_chunks import reported
from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Severity, rule


@rule("LIV304", "loaded-differs-from-seal", Severity.ERROR, live=True)
def loaded_differs_from_seal(ckpt: Checkpoint) -> Iterator[Finding]:
    """The values that the ranks loaded are not those that the job sealed.

    What it checks:
        After a load, `live.check_loaded` adds up the digests of what the ranks hold, in any layout, and compares them
        with ckptlint.seal.json, tensor by tensor.
    Why it matters:
        The job continues with values that no training step produced.
    Usual causes:
        A rank loaded another rank's shard, resharding has a bug, or the payload changed after the seal.
    How to fix:
        Run `ckptlint --depth data` on the folder. If LIV302 names the tensor too, the payload is wrong; else the load
        is.
    See:
        ckptlint.live.check_loaded
    """
    yield from reported(ckpt, hint="run ckptlint --depth data on the folder: it compares the payload with the seal")
