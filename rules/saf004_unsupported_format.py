"""SAF004: what lies in the folder is a format that is checked."""

from __future__ import annotations

from collections.abc import Iterator

from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Severity, rule


@rule("SAF004", "unsupported-format", Severity.ERROR, always=True, fixed=True)
def unsupported_format(ckpt: Checkpoint) -> Iterator[Finding]:
    """The folder holds a checkpoint of a known format that is not checked.

    What it checks:
        The marks of Orbax, PaddlePaddle, torchsnapshot, zarr, NVRx local files, GGUF, packed NeMo, nanotron, TensorFlow
        and others. A note where they lie
        beside a checkpoint that is checked.
    Why it matters:
        A gate must not pass what nobody looked at.
    Usual causes:
        A wrong path, or a checkpoint of another framework.
    How to fix:
        Give the folder of the DCP or torch_dist checkpoint, or convert it.
    """
    yield from map(Finding.of_problem, ckpt.problems_of("unsupported"))
