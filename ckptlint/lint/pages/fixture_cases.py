"""The cases of a fixture file as tables: what tests judge, and what the page of a rule shows."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def case_tables(path: Path) -> list[dict[str, Any]]:
    """The tables of a fixture file, with what each takes from the case that it is `like` (see fixtures/README.md)."""
    tables: list[dict[str, Any]] = tomllib.loads(path.read_text(encoding="utf-8"))["case"]
    full = {table.get("name"): table for table in tables if "like" not in table}
    for table in (table for table in tables if "like" in table):
        like, without = table.pop("like"), table.pop("without", ())
        base = {key: item for key, item in full.get(like, {}).items() if key not in ("name", "expect", "says")}
        if lost := [like] if like not in full else [name for name in without if _over(base, {}, [name]) == base]:
            what = "full case has the name" if like not in full else f"key of {like!r} is named"
            raise ValueError(f"{path.name}, case {table.get('name')!r}: no {what} {lost[0]!r}")
        table |= _over(base, table, without)
    return tables


def _over(base: dict[str, Any], table: dict[str, Any], without: Sequence[str]) -> dict[str, Any]:
    """Own keys over those of a base: tables by key, except that what has a shape is replaced as a whole."""
    merged = {key: item for key, item in base.items() if key not in without} | table
    for key in base.keys() & merged.keys() - set(without):
        item, mine = base[key], table.get(key, {})
        if isinstance(item, dict) and isinstance(mine, dict) and not (mine and "shape" in item | mine):
            merged[key] = _over(item, mine, without)
    return merged
