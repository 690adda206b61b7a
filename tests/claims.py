"""What the fixtures of the causes claim: cases of rules and real checkpoints on which a cause is told."""

from __future__ import annotations

import tomllib
from typing import Any

from ckptlint.depth import Depth
from ckptlint.lint.causes import fixture_of, load_causes

CLAIMS: dict[str, dict[str, Any]] = {
    known.name: tomllib.loads(fixture_of(known).read_text(encoding="utf-8")) for known in load_causes()
}
"""Cause -> its own cases, real checkpoints, edited or as they lie there, and cases of rules that are this cause."""


def causes_of_case(code: str, name: str) -> list[str]:
    """The causes that claim a case of a rule."""
    return [cause for cause, table in CLAIMS.items() if f"{code}: {name}" in table.get("cases", ())]


def causes_of_real(path: str, depth: str) -> list[str]:
    """The causes that claim a checkpoint of fixtures/real as it lies there, at a depth."""
    return [
        cause
        for cause, table in CLAIMS.items()
        for real in table.get("real", ())
        if real["path"] == path and real.keys() <= {"path", "says", "depth"}
        if Depth(depth).reaches(Depth(real.get("depth", "files")))
    ]
