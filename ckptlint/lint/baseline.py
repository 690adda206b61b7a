"""Findings that do not count because an earlier report has them, and those of it that occur no more."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptlint.errors import ConfigError
from ckptlint.lint.report import CheckpointReport, Diagnostic, Ignored
from ckptlint.model.text import printable
from ckptlint.rule import Rule

_SCHEMA = "ckptlint.report/1"
_SIZE_LIMIT = 512 * 1024**2  # bytes; a device has no end


def read_baseline(path: str) -> dict[str, str]:
    """The findings of an earlier JSON report: fingerprint -> code and sentence.

    Raises:
        ConfigError: it cannot be read, or is no such report.
    """
    try:
        with Path(path).open("rb") as source:
            data = source.read(_SIZE_LIMIT + 1)
        if len(data) > _SIZE_LIMIT:
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
        return {_text(item, "fingerprint"): _entry(item) for item in findings}
    except (KeyError, TypeError, ValueError):
        raise ConfigError(f"the baseline {path} is not a JSON report of ckptlint ({_SCHEMA})") from None


def apply_baseline(
    parts: Sequence[CheckpointReport], rules: Sequence[Rule], baseline: Mapping[str, str]
) -> tuple[list[CheckpointReport], tuple[str, ...]]:
    """The reports with the findings of an earlier one apart, and the entries of the earlier one that occur no more.

    Findings of fixed rules count all the same.

    Args:
        rules: those that were selected.
        baseline: fingerprint -> finding, of `read_baseline`.
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


def _text(item: Any, key: str) -> str:
    if not isinstance(item[key], str):
        raise TypeError(key)
    return str(item[key])


def _entry(item: Any) -> str:
    subject = item.get("fqn") or item.get("file") or ""
    return printable(f"{_text(item, 'code')} {subject}{': ' if subject else ''}{_text(item, 'message')}")
