from __future__ import annotations

from collections.abc import Iterator

from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Severity, rule


@rule("SAF004", "unsupported-format", Severity.ERROR, always=True, fixed=True)
def unsupported_format(ckpt: Checkpoint) -> Iterator[Finding]:
    """The folder holds a checkpoint in a format that ckptlint does not check.

    What it checks:
        The folder holds no files of Orbax, PaddlePaddle, torchsnapshot, zarr, NVRx local checkpoints, GGUF, packed
        NeMo, nanotron, TensorFlow and others. It is only info if they lie beside a checkpoint that is checked. A file
        of TorchScript, whose code runs when it is loaded, is told here by its content; beside a checkpoint by SAF002.
    Why it matters:
        A gate must not pass a checkpoint that was not checked.
    Usual causes:
        A wrong path, or a checkpoint of another framework.
    How to fix:
        Name the folder of the DCP or torch_dist checkpoint, or convert this one.
    """
    yield from map(Finding.of_problem, ckpt.problems_of("unsupported"))
