"""Fixtures that several test files use."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pickles
import pytest
from support import REAL

from ckptlint.formats import safe_pickle as unpickle


@pytest.fixture
def real_copy(tmp_path: Path) -> Callable[[str], Path]:
    """A writable copy of a checkpoint of `fixtures/real`."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(REAL / name, tmp_path / name.replace("/", "-")))

    return copy


@pytest.fixture(params=["opcode by opcode", "in columns"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test twice: metadata is read by the unpickler alone, and with its regular rows as columns."""
    monkeypatch.setattr(unpickle, "WORTHWHILE", 0 if request.param == "in columns" else 1 << 60)


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file that a payload would create, from a child process too; the test fails when it is there at the end."""
    path = tmp_path / "was_here"
    monkeypatch.setattr(pickles, "TRACE", path)
    yield path
    assert not path.exists(), "a payload was run"
