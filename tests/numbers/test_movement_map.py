"""How far weights moved between two steps: the sentence, the figures, and the map of both pages."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from damages import Save
from support import REAL, run

RUN = REAL / "numbers"


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """A step, the one after it with a weight whose sign was flipped, and its key."""
    folder = tmp_path_factory.mktemp("run")
    shutil.copytree(RUN / "step-190", folder / "step-190")
    now = Save("fsdp2_4r")
    key = next(chunk.fqn for chunk in now.chunks if not chunk.state and "layers.1.self_attn.o_proj" in chunk.fqn)
    for row in now.rows("", fqn=key):
        now.values[row] = -now.values[row]
    now.write(folder / "step-200")
    return folder / "step-190", folder / "step-200", key


def test_a_weight_that_does_not_continue_is_named(steps: tuple[Path, Path, str]) -> None:
    old, new, key = steps
    said = " ".join(run("diff", old, new, "--values").stdout.split())
    assert f"1 weight does not continue the old step, unlike the others: {key} (cosine -" in said
    assert said.endswith("1 does not continue the old step.")
    moved = json.loads(run("diff", old, new, "--values", "--format", "json").stdout)["moved"]
    assert [one["tensor"] for one in moved if not one["continues"]] == [key]


def test_a_healthy_pair_has_moved_and_all_continues() -> None:
    done = run("diff", RUN / "step-190", RUN / "step-200", "--values", "--color", "always")
    assert done.returncode == 1  # they are not the same
    assert re.search(
        r"\x1b\[32mMoved\x1b\[0m: 32 of 32 weights, by [\d.]+ of their norm in the median\.\n$", done.stdout
    )
    assert "not continue" not in done.stdout


def test_it_is_framed_on_both_pages_and_leads_to_its_finding(steps: tuple[Path, Path, str], tmp_path: Path) -> None:
    old, new, key = steps
    run("diff", old, new, "--values", "--html", tmp_path / "diff.html")
    run("check", new, "--output", tmp_path / "check.html", "--depth", "data", "-qq", "--isolated")
    pages = [(tmp_path / name).read_text(encoding="utf-8") for name in ("diff.html", "check.html")]
    cell = re.compile(r'<td class="num heat-\d marked" title="([^:]*): [^"]*">(?:<a href="#(.*?)">)?')
    marked = [cell.findall(page) for page in pages]
    assert [[name for name, _ in of_page] for of_page in marked] == [[key], [key]]
    assert f'<article id="{marked[1][0][1]}"' in pages[1]  # the finding that the cell leads to
    assert "How far the weights moved since step-190" in pages[1]
