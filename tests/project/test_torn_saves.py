"""Saves that are killed in a folder with an older step: no mixture passes, nothing whole fails."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support import REPOSITORY, sweep_only


@sweep_only
def test_no_torn_state_passes_and_no_whole_one_fails() -> None:
    pytest.importorskip("torch")
    command = [sys.executable, REPOSITORY / "bench" / "torn_saves.py", "--kills", "12"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert len(done.stdout.splitlines()) == 3
