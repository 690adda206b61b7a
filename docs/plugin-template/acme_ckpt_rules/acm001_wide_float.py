from __future__ import annotations

from collections.abc import Iterator

from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Location, NotApplicable, Severity, rule
from ckptlint.vocabulary.dtypes import ITEM_BITS


@rule("ACM001", "wide-float", Severity.WARNING)
def wide_float(ckpt: Checkpoint, most_bits: int = 32) -> Iterator[Finding]:
    """A tensor holds floats wider than agreed.

    What it checks:
        No tensor has a floating-point dtype of more bits than the option `most-bits` allows.
    Why it matters:
        A checkpoint twice as large as agreed does not fit the quota of the next run.
    Usual causes:
        A default dtype of float64, left from a numerical experiment.
    How to fix:
        Cast the tensor before saving, or raise `most-bits` in the settings.
    """
    floats = [tensor for tensor in ckpt.tensors.values() if "float" in tensor.dtype]
    if not floats:
        raise NotApplicable("no floating-point tensor is stored")
    for tensor in floats:
        bits = ITEM_BITS.get(tensor.dtype, 0)
        if bits > most_bits:
            yield Finding(
                f"{bits} bits per element{{of}}, {most_bits} were agreed",
                at=Location(tensor),
                hint="cast it before saving",
            )
