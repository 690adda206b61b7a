from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ckptlint.depth import Depth
from ckptlint.errors import BudgetError
from ckptlint.model import Checkpoint, PayloadTable, Reference
from ckptlint.model.text import first_names, ranges
from ckptlint.rule import Finding, Location, NotApplicable, Severity, require, rule

_RANGES = 4


@rule("REF004", "values", Severity.ERROR, depth=Depth.DATA, expects=True)
def values(ckpt: Checkpoint) -> Iterator[Finding]:
    """A tensor does not hold the values that the manifest has of it.

    What it checks:
        With --expect and a manifest that `ckptlint manifest --values` wrote, each tensor of its names holds the same
        values: in the dtype of the manifest, or rounded to a narrower one that the manifest has a digest for. How it is
        cut, and which files hold it, makes no difference. A tensor that was not read to its last element is left to the
        rules that tell why. If no tensor of its names is here, the verdict is incomplete (exit 4).
    Why it matters:
        The shapes match, but the weights come from another step, another layer or a broken conversion.
    Usual causes:
        An upload or export of another step, a converter that left a tensor as it was made, bytes that changed on the
        way without a checksum.
    How to fix:
        Compare both with `ckptlint diff OLD NEW --values`, which says where they differ; copy or convert again.
    See:
        ckptlint manifest --values
    """
    reference, payload = require(ckpt.reference), require(ckpt.payload)
    if not reference.values:
        raise NotApplicable("the reference holds no values: `ckptlint manifest --values` writes them")
    if payload.sample:
        raise NotApplicable("only a part of the records was read")
    if not payload.values:
        raise BudgetError(
            f"nothing was compared: none of the {len(reference.values):,} keys with values in the reference is stored "
            "here; `ckptlint diff OLD NEW --values` pairs tensors by their values"
        )
    for fqn, tensor in ckpt.tensors.items():
        expected, stored = reference.values.get(fqn, {}), payload.values.get(fqn, {})
        shared = expected.keys() & stored.keys()
        if any(expected[dtype] != stored[dtype] for dtype in shared):
            odd = _odd_rows(reference, payload, fqn)
            message = f"the values{{of}} differ from those of the reference{odd}"
            hint = "compare both with `ckptlint diff OLD NEW --values`, which says where they differ"
            yield Finding(message, at=Location(tensor), identity=(fqn,), hint=hint)


def _odd_rows(reference: Reference, payload: PayloadTable, fqn: str) -> str:
    """The numbers of the rows that differ, as text; "" if the reference has no hashes of rows."""
    for dtype, expected in reference.rows.get(fqn, {}).items():
        stored = payload.row_hashes.get(fqn, {}).get(dtype)
        if stored is not None and len(stored) == len(expected):
            spans = ranges(np.flatnonzero(stored != expected).tolist()).split(",")
            return f": rows {first_names(spans, _RANGES, 'range')} of {len(expected):,}"
    return ""
