"""The notebook in `docs/`: its cells run in order, and what it shows is true."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support import REPOSITORY

DOCS = REPOSITORY / "docs"


def test_the_cells_run_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(DOCS)
    notebook = json.loads((DOCS / "notebook.ipynb").read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not [cell for cell in cells if cell["outputs"] or cell["execution_count"]]
    names: dict[str, Any] = {}
    for cell in cells:
        exec("".join(cell["source"]), names)
    assert names["report"].verdict == "fail"
    assert (names["tensor"].global_shape, names["region"]) == ((10, 12), (slice(6, 9), slice(0, 12)))
    assert "[6:9, 0:12]" not in names["chunks"] and len(names["chunks"]) == 3
    assert names["newest"].path.endswith("iter_0000020")
    assert names["old"].paths == ()
    assert names["same"].exit_code == 0
    assert names["plan"].verdict == "loads"
    for name in ("report", "newest", "old", "same", "plan"):
        assert names[name]._repr_html_().startswith('<div class="ckptlint')
