"""Findings that do not count: ignores of the settings say so, each with its reason, or an earlier report has them."""

from __future__ import annotations

import fnmatch
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ckptlint.errors import ConfigError
from ckptlint.lint.engine import run_rule
from ckptlint.lint.report import CheckpointReport, Diagnostic, Ignored, Report
from ckptlint.model import Problem
from ckptlint.model.text import NUMBER, nearest, printable
from ckptlint.rule import Rule
from ckptlint.vocabulary.keys import role

_SCHEMA = "ckptlint.report/1"
_SIZE_LIMIT = 512 * 1024**2  # bytes; a device has no end
_NEAR_LIMIT = 20_000  # keys among which a look for the nearest takes well under a second


class KeyIgnore(NamedTuple):
    """Findings of some rules about some keys do not count.

    Attributes:
        pattern: a glob of keys (`*` matches dots too), or of files for findings without a key.
        codes: the rules.
        reason: why, for the report.
        file: the settings file it stands in.
    """

    pattern: str
    codes: frozenset[str]
    reason: str
    file: str = ""


def set_aside(
    parts: Sequence[CheckpointReport], rules: Sequence[Rule], ignores: Sequence[KeyIgnore], is_whole: bool = True
) -> list[CheckpointReport]:
    """The reports with ignored findings set aside, and with the findings of LNT001 on the ignores.

    Args:
        rules: those that were selected.
        is_whole: whether all that was to be checked could be; without it no ignore is called unused.
    """
    used: set[KeyIgnore] = set()
    globs = [(ignore, re.compile(fnmatch.translate(ignore.pattern))) for ignore in ignores]

    def why(item: Diagnostic) -> Ignored | None:
        subject = item.fqn or item.finding.at.file
        hits = [ignore for ignore, wanted in globs if item.code in ignore.codes and wanted.match(subject)]
        used.update(hits)
        return Ignored("per-key-ignores", hits[0].reason) if hits else None

    parts, selected = [part.without(why) for part in parts], {rule.code for rule in rules}
    for rule in (rule for rule in rules if rule.after == "all"):
        dead = [ignore for ignore in ignores if ignore not in used and is_whole and _ran(ignore, selected, parts)]
        for part in parts:  # an ignore may be for any of the checkpoints, so the last one reports it
            problems = [_problem(ignore, parts) for ignore in dead] if part is parts[-1] else []
            run_rule(rule, replace(part.checkpoint, problems=problems), part)
    return parts


def _ran(ignore: KeyIgnore, selected: set[str], parts: Sequence[CheckpointReport]) -> bool:
    """Whether the rules of an ignore judged every checkpoint, and one of them found something to judge."""
    judged = all(ignore.codes <= {*part.passed, *part.not_applicable} for part in parts)
    return ignore.codes <= selected and judged and not all(ignore.codes.isdisjoint(part.passed) for part in parts)


def _problem(ignore: KeyIgnore, parts: Sequence[CheckpointReport]) -> Problem:
    """An unused ignore; without a key that it could match it is for another checkpoint, or mistyped."""
    keys: dict[str, None] = {}
    for ckpt in (part.checkpoint for part in parts):
        objects = (name for item in ckpt.objects for name in (item.fqn, item.key))
        byte_objects = (item.fqn for item in ckpt.byte_objects)
        expected = ckpt.reference.tensors if ckpt.reference else ()
        keys |= dict.fromkeys([*ckpt.tensors, *objects, *byte_objects, *ckpt.files.names, *expected])
    wanted = re.compile(fnmatch.translate(ignore.pattern))
    codes = ", ".join(sorted(ignore.codes))
    message = f"the ignore of {codes} for {printable(ignore.pattern)!r} matched no finding"
    unused = Problem("unused", printable(ignore.file), message, fqn=ignore.pattern, hint="delete it")
    if any(map(wanted.match, keys)):
        return unused
    near = nearest(ignore.pattern, keys) if len(keys) <= _NEAR_LIMIT else ""
    hint = f"did you mean {near}?" if near else "delete it unless other checkpoints need it"
    return replace(unused, message=f"{message}, and no key has this name", hint=hint, outside_checkpoint=True)


def to_paste(pattern: str, code: str, file: str = "") -> list[str]:
    """The ignore of a rule for the keys of a glob, as three lines of TOML for this file; only the reason lacks."""
    table = "tool.ckptlint.per-key-ignores" if Path(file).name == "pyproject.toml" else "per-key-ignores"
    return [f"[{table}.{json.dumps(pattern, ensure_ascii=False)}]", f'rules = ["{code}"]', 'reason = ""']


def ignore_of_the_rest(report: Report) -> list[str]:
    """`to_paste` for a report that fails by one rule on keys alike alone; without lines where an ignore cannot mend it.

    Keys that differ in their numbers share a glob, unless it would also hide keys of another kind.
    """
    failing = [item for item in report.diagnostics if report.is_failing(item)]
    kinds = {(item.code, role(item.fqn or "")) for item in failing}
    names = {item.fqn or "" for item in failing}
    if len(kinds) != 1 or report.is_live or report.is_incomplete or report.not_found or failing[0].rule.fixed:
        return []
    import glob

    name = next(iter(names))
    pattern = "*".join(map(glob.escape, NUMBER.split(name))) if len(names) > 1 else glob.escape(name)
    fits = re.compile(fnmatch.translate(pattern)).match
    keys = (key for part in report.checkpoints for key in part.checkpoint.tensors if len(names) > 1)
    hides_others = any(fits(key) and role(key) != role(name) for key in keys)
    is_exact = name and name.isprintable() and all(map(fits, names)) and not hides_others
    return to_paste(pattern, failing[0].code, report.settings) if is_exact else []


def read_baseline(path: str) -> dict[str, str]:
    """The findings of an earlier JSON report: fingerprint -> code and sentence; raises ConfigError for another file."""
    try:
        with Path(path).open("rb") as source:
            is_larger = os.fstat(source.fileno()).st_size > _SIZE_LIMIT  # a device does not say
            data = b"" if is_larger else source.read(_SIZE_LIMIT + 1)
        if is_larger or len(data) > _SIZE_LIMIT:
            raise ConfigError(f"the baseline {path} has more than {_SIZE_LIMIT:,} bytes")
        document = json.loads(data.decode("utf-8"))
    except OSError as error:
        raise ConfigError(f"the baseline {path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"the baseline {path} is not JSON: make one with --output {Path(path).name}") from None
    try:
        if document["schema"] != _SCHEMA:
            raise ValueError(document["schema"])
        findings = [item for part in document["checkpoints"] for item in part["findings"]]
        if any(not isinstance(item[key], str) for item in findings for key in ("fingerprint", "code", "message")):
            raise ValueError("a text is missing")
        subjects = [item.get("fqn") or item.get("file") or "" for item in findings]
        return {
            item["fingerprint"]: printable(f"{item['code']} {subject}{': ' if subject else ''}{item['message']}")
            for item, subject in zip(findings, subjects, strict=True)
        }
    except (KeyError, TypeError, ValueError):
        raise ConfigError(f"the baseline {path} is not a JSON report of ckptlint ({_SCHEMA})") from None


def apply_baseline(
    parts: Sequence[CheckpointReport], rules: Sequence[Rule], baseline: Mapping[str, str]
) -> tuple[list[CheckpointReport], tuple[str, ...]]:
    """The reports with the findings of an earlier one (`read_baseline`) apart, and those of its that occur no more.

    Findings of fixed rules count all the same. `rules` are those that were selected.
    """

    def why(item: Diagnostic) -> Ignored | None:
        return Ignored("baseline") if item.fingerprint in baseline and not item.rule.fixed else None

    if not baseline:
        return list(parts), ()
    present = {item.fingerprint for part in parts for item in (*part.diagnostics, *part.ignored)}
    ran = {code for part in parts for code in (*part.passed, *part.not_applicable)}
    ran -= {rule.code for rule in rules if rule.fixed}
    solved = (text for mark, text in baseline.items() if mark not in present and text.partition(" ")[0] in ran)
    return [part.without(why) for part in parts], tuple(solved)
