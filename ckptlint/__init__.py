"""ckptlint: the linter for saved distributed checkpoints.

>>> import ckptlint
>>> ckptlint.check("fixtures/real/fsdp2_4r").verdict  # doctest: +SKIP
'pass'
"""

from __future__ import annotations

from collections.abc import Iterable
from os import PathLike
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptlint.model import Checkpoint
    from ckptlint.report import FailOn, Report
    from ckptlint.rule import Depth

__version__ = "0.1.0"


def check(
    *paths: str | PathLike[str],
    depth: Depth = "files",
    select: Iterable[str] = (),
    ignore: Iterable[str] = (),
    fail_on: FailOn = "error",
    all_steps: bool = False,
    expect: str | PathLike[str] | None = None,
    sample: float | None = None,
    seed: int | None = None,
) -> Report:
    """The report on the checkpoints under the paths; prints nothing and reads no settings.

    Args:
        depth: `metadata`; `files` to look at payload files too; `headers` to open their records; `data` to read all of
            them.
        select: codes, names or prefixes of the rules to run; all by default.
        ignore: the same, to leave out.
        fail_on: the lowest severity that makes `Report.exit_code` 1.
        all_steps: every step of a run folder, not only the newest.
        expect: what to compare with: a manifest, a safetensors file or index, a model folder, another checkpoint.

        sample: percent of the records to read at depths `headers` and `data`, chosen at random; all by default.
        seed: of that choice.

    Raises:
        ConfigError: an unknown rule or depth, a sample at a lesser depth, or a reference that cannot be used.
    """
    from ckptlint import pipeline
    from ckptlint import select as selection
    from ckptlint.errors import ConfigError
    from ckptlint.loaders.payload import default_reading
    from ckptlint.registry import load_rules
    from ckptlint.rule import DEPTHS

    if depth not in DEPTHS:
        raise ConfigError(f"there is no depth {depth!r}: {', '.join(DEPTHS)}")
    rules = selection.select(load_rules(), chosen=select, ignored=ignore, depth=depth, has_reference=expect is not None)
    reference = None if expect is None else str(expect)
    reading = default_reading(depth, sample, seed) if depth in ("headers", "data") else None
    if reading is None and sample is not None:
        raise ConfigError("a sample needs depth headers or data")
    return pipeline.run(
        map(str, paths), rules, depth=depth, fail_on=fail_on, all_steps=all_steps, expect=reference, reading=reading
    )


def load(path: str | PathLike[str]) -> Checkpoint:
    """The checkpoint under a path as data, for notebooks: the newest step of a run folder.

    Raises:
        NothingToCheckError: there is none.
        AccessError: the operating system refused a read.
    """
    from ckptlint.loaders import find, open_checkpoint

    return open_checkpoint(find(str(path))[0])
