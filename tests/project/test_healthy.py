"""A sample of bench/evidence/healthy.py, of the kinds that need torch alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import bench, examples


@pytest.mark.sweep
def test_what_torch_writes_under_random_names_is_not_flagged(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # ranks are forked beside no threads
    try:
        judged = list(bench("evidence/healthy").healthy(examples(4, 40), 1, tmp_path))
    finally:
        torch.set_num_threads(threads)
    assert judged and [one for one in judged if one[2]] == []
