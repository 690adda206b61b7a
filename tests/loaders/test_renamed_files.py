"""A payload file that lies beside the others under another ending."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support import REAL, codes, report_on


@pytest.mark.parametrize("name", ["__3_0.distcp.bak", "__3_0.distcp~", "__3_0.old", "__3_0.distcp.part"])
def test_a_renamed_file_is_one_finding_that_says_so(name: str, tmp_path: Path) -> None:
    shutil.copytree(REAL / "fsdp2_4r", tmp_path / "step")
    (tmp_path / "step" / "__3_0.distcp").rename(tmp_path / "step" / name)
    for depth in ("files", "data"):
        (item,) = report_on(tmp_path / "step", depth=depth).diagnostics
        assert (item.code, item.finding.hint) == (
            "PAY003", f"{name} has the size of the missing __3_0.distcp: rename it",
        )  # fmt: skip


def test_a_file_of_another_size_or_name_is_not_the_missing_one(tmp_path: Path) -> None:
    for size, name in ((-1, "__3_0.distcp.bak"), (1, "__3_0.distcp.bak"), (0, "__33_0.distcp.bak"), (0, "other.bak")):
        step = tmp_path / f"{name}{size}"
        shutil.copytree(REAL / "fsdp2_4r", step)
        data = (step / "__3_0.distcp").read_bytes()
        (step / "__3_0.distcp").unlink()
        (step / name).write_bytes(data[: len(data) + min(size, 0)] + b"x" * max(size, 0))
        report = report_on(step)
        assert "rename it" not in str([item.finding.hint for item in report.diagnostics])
        assert "PAY003" in codes(report)


def test_a_copy_beside_a_whole_checkpoint_is_no_lost_file(tmp_path: Path) -> None:
    shutil.copytree(REAL / "fsdp2_4r", tmp_path / "step")
    shutil.copy(tmp_path / "step" / "__3_0.distcp", tmp_path / "step" / "__3_0.distcp.bak")
    report = report_on(tmp_path / "step")
    assert "PAY003" not in codes(report)
    assert "rename it" not in str([item.finding.hint for item in report.diagnostics])
