"""A sample of bench/evidence/precision.py: types of which no folder may be flagged."""

from __future__ import annotations

import pytest
from support import bench

TYPES = ["bert", "clip", "gemma3", "gpt_oss", "llama", "mixtral", "t5"]


@pytest.mark.ci
def test_what_transformers_saves_is_not_flagged() -> None:
    pytest.importorskip("transformers", reason="needs transformers (extra tables)")
    lines = list(bench("evidence/precision").precision(TYPES, seed=1, count=2))
    assert len(lines) >= 40 and [one for one in lines if one.keys() & {"why", "flagged"}] == []
