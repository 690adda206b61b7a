"""A run on one screen: find, open, judge."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ckptlint.depth import Depth
from ckptlint.errors import AccessError, NothingToCheckError, ReaderError
from ckptlint.lint.baseline import apply_baseline, read_baseline
from ckptlint.lint.engine import run_rules
from ckptlint.lint.ignores import KeyIgnore, set_aside
from ckptlint.lint.report import CheckpointReport, FailOn, Report
from ckptlint.loaders.checkpoint import open_checkpoint
from ckptlint.loaders.discover import find
from ckptlint.model import Checkpoint
from ckptlint.rule import Rule
from ckptlint.storage.folder import Folder
from ckptlint.storage.paths import shown

if TYPE_CHECKING:
    from ckptlint.payload.reading import Reading


Source = Callable[[str, bool, Depth, "Reading | None"], Iterator[tuple[Folder, Checkpoint]]]


def opened(path: str, all_steps: bool, depth: Depth, reading: Reading | None) -> Iterator[tuple[Folder, Checkpoint]]:
    """Each checkpoint under a path, with its payload at depths that read it.

    Raises:
        NothingToCheckError, AccessError, ReaderError: as `find`, `open_checkpoint` and `read_payload`.
    """
    for folder in find(path, all_steps):
        ckpt = open_checkpoint(folder, depth.looks_at_files)
        if reading is not None and ckpt.readable:
            from ckptlint.payload.reader import read_payload

            ckpt = read_payload(folder, ckpt, reading)
        yield folder, ckpt


def run(
    paths: Iterable[str],
    rules: Sequence[Rule],
    *,
    depth: Depth = Depth.FILES,
    fail_on: FailOn = "error",
    all_steps: bool = False,
    expect: str | None = None,
    reading: Reading | None = None,
    ignores: Sequence[KeyIgnore] = (),
    baseline: str | None = None,
    source: Source | None = None,
    settings: str = "",
) -> Report:
    """Judge every checkpoint under the paths; what could not be found or read is part of the report.

    Args:
        expect: the reference to compare each of them with; without one the rules that need it are not run.
        reading: how to read the payload, at depths `headers` and `data`.
        ignores: findings that do not count, by key.
        baseline: an earlier JSON report, whose findings do not count.
        source: reads what lies under a path otherwise than `opened` does, which it is called like.
        settings: the settings file that all this comes from, to be named in the report.

    Raises:
        ConfigError: the reference or the baseline cannot be used.
    """
    started = time.perf_counter()
    reference = None
    if expect is not None:
        from ckptlint.loaders.reference import read_reference

        reference = read_reference(expect)
    known = {} if baseline is None else read_baseline(baseline)
    parts: list[CheckpointReport] = []
    not_found: list[str] = []
    unreadable: list[str] = []
    for path in paths:
        try:
            for folder, ckpt in (source or opened)(path, all_steps, depth, reading):
                if reference is not None:
                    ckpt = replace(ckpt, reference=reference.part(folder.name))
                parts.append(run_rules(ckpt, rules, depth))
        except NothingToCheckError as error:
            not_found.append(str(error))
        except AccessError as error:
            unreadable.append(str(error))
        except ReaderError as error:
            unreadable.append(
                f"{shown(path)} could not be read because of a mistake in ckptlint, please report: {error}"
            )
    judging = tuple(rule for rule in rules if (reference is not None or not rule.expects) and not rule.live)
    parts = set_aside(parts, rules, ignores, is_whole=not (not_found or unreadable))
    parts, solved = apply_baseline(parts, rules, known)
    seconds = time.perf_counter() - started
    return Report(parts, judging, depth, fail_on, tuple(not_found), tuple(unreadable), seconds, solved, shown(settings))
