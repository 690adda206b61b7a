"""A run on one screen: find, open, judge."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from ckptlint.engine import run_rules
from ckptlint.errors import AccessError, NothingToCheckError, ReaderError
from ckptlint.loaders import find, open_checkpoint
from ckptlint.model import printable
from ckptlint.report import CheckpointReport, FailOn, Report
from ckptlint.rule import Depth, Rule


def run(
    paths: Iterable[str],
    rules: Sequence[Rule],
    *,
    depth: Depth = "files",
    fail_on: FailOn = "error",
    all_steps: bool = False,
) -> Report:
    """Judge every checkpoint under the paths; what could not be found or read is part of the report."""
    started = time.perf_counter()
    parts: list[CheckpointReport] = []
    nothing: list[str] = []
    refused: list[str] = []
    for path in paths:
        try:
            for folder in find(path, all_steps):
                parts.append(run_rules(open_checkpoint(folder, depth != "metadata"), rules, depth))
        except NothingToCheckError as error:
            nothing.append(str(error))
        except AccessError as error:
            refused.append(str(error))
        except ReaderError as error:
            refused.append(
                f"{printable(path)} could not be read because of a mistake in ckptlint, please report: {error}"
            )
    seconds = time.perf_counter() - started
    return Report(parts, tuple(rules), depth, fail_on, tuple(nothing), tuple(refused), seconds)
