"""The objects of the Python API in a console and in a notebook."""

from __future__ import annotations

import json
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from support import HOSTILE, REAL, run

import ckptlint
from ckptlint.reporters import json_report, markdown
from ckptlint.reporters.html import page
from ckptlint.reporters.style import Style
from ckptlint.testing import write_checkpoint

GOOD, HOLE, RUN = REAL / "fsdp2_4r", REAL / "fsdp2_4r_hole", REAL / "frameworks" / "trackers" / "older"
ELEMENTS = {"div", "p", "b", "br", "table", "thead", "tbody", "tr", "th", "td", "code"}


class Part(HTMLParser):
    """A part of a page; its elements and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def shown() -> dict[str, Any]:
    """An object of each kind."""
    return {
        "Report": ckptlint.check(HOLE),
        "Plan": ckptlint.plan(GOOD, "dp=3"),
        "Diff": ckptlint.diff(GOOD, HOLE),
        "Values": ckptlint.diff(GOOD, HOLE, values=True),
        "Search": ckptlint.latest(RUN),
        "Retention": ckptlint.deletable(RUN, keep=1),
    }


COMMANDS = {
    "Report": ("check", HOLE),
    "Plan": ("plan", GOOD, "--to", "dp=3"),
    "Diff": ("diff", GOOD, HOLE),
    "Values": ("diff", GOOD, HOLE, "--values"),
    "Search": ("latest", RUN),
    "Retention": ("deletable", RUN, "--keep", "1"),
}


@pytest.mark.parametrize("kind", COMMANDS)
def test_str_is_what_the_command_prints(kind: str, shown: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("PYTHONIOENCODING", "utf-8")
    answer = run(*COMMANDS[kind])
    printed = answer.stderr.replace("ckptlint: ", "") + answer.stdout
    not_of_it = (" ran on ", "tensor bytes were not read")  # how long it took, and what the options left out
    assert [line for line in str(shown[kind]).splitlines() if not any(map(line.__contains__, not_of_it))] == [
        line for line in printed.splitlines() if not any(map(line.__contains__, not_of_it))
    ]


@pytest.mark.parametrize("kind", COMMANDS)
def test_one_line_and_a_table(kind: str, shown: dict[str, Any]) -> None:
    assert repr(shown[kind]).startswith(f"<{kind}") and "\n" not in repr(shown[kind]) and len(repr(shown[kind])) < 300
    rows = shown[kind].rows()
    assert len({tuple(row) for row in rows}) <= 1
    assert all(isinstance(cell, str | int | float | None) for row in rows for cell in row.values())
    json.dumps(rows)
    part = Part(shown[kind]._repr_html_())
    assert part.tags <= ELEMENTS and part.attributes <= {"class", "style"}
    assert ("table" in part.tags) == bool(rows)


def test_a_report_is_a_sequence_of_findings() -> None:
    report = ckptlint.check(GOOD, HOLE)
    assert (len(report.diagnostics), report.diagnostics[0].code, report.ignored) == (2, "GEO004", ())
    assert repr(report) == "<Report 2 checkpoints: fail, 1 error>"
    sentence = "rows 6-8 of model.layers.0.feed_forward.w1.weight are missing"
    assert repr(report.diagnostics[0]) == f"<Diagnostic GEO004 error: {sentence}>"
    assert repr(report.checkpoints[0]) == f"<CheckpointReport {GOOD}: no findings>"
    first = report.rows()[0]
    assert (first["code"], first["rank"], first["checkpoint"]) == ("GEO004", 2, str(HOLE))
    text = Part(report._repr_html_()).text
    assert "1 error in 2 checkpoints." in text and "cause: rank 2 saved other tensors" in text


@pytest.mark.parametrize(("code", "left"), [("PAY003", None), ("PAY004", 0)])
def test_every_lost_key_is_named_and_counted(code: str, left: int | None, tmp_path: Path) -> None:
    folder = shutil.copytree(REAL / "fsdp2_4r", tmp_path / "step")
    damaged = folder / "__2_0.distcp"
    if left is None:
        damaged.unlink()
    else:
        damaged.write_bytes(b"")
    ckpt = ckptlint.load(folder)
    lost = {ckpt.records.name(row) for row in range(len(ckpt.records)) if ckpt.byte_range_of(row)[0] == damaged.name}
    report = ckptlint.check(folder, depth="files")
    [item] = [item for item in report.diagnostics if item.code == code]
    assert isinstance(item.keys, tuple) and set(item.keys) == lost and len(item.keys) == len(lost) > 1
    [row] = [row for row in report.rows() if row["code"] == code]
    [group] = [group for group in page.group_rows(report) if group["rule"] == code]
    assert (row["keys"], group["keys"]) == (len(lost), f"{len(lost):,}")
    style = Style(ascii_only=False)
    [line] = [line for line in markdown.render(report, style).splitlines() if line.startswith(f"| error | {code}")]
    assert line.endswith(f"| {len(lost):,} |")
    document = json.loads(json_report.render(report, style))
    assert [found["keys"] for found in document["checkpoints"][0]["findings"] if found["code"] == code] == [
        [*item.keys]
    ]


def test_records_that_are_gone_were_not_read_and_mark_their_layers(tmp_path: Path) -> None:
    healthy = ckptlint.check(REAL / "fsdp2_4r", depth="data")
    assert "Every record was read." in page.render(healthy, Style(ascii_only=False))
    folder = shutil.copytree(REAL / "fsdp2_4r", tmp_path / "step")
    (folder / "__2_0.distcp").unlink()
    report = ckptlint.check(folder, depth="data")
    [item] = [item for item in report.diagnostics if item.code == "PAY003"]
    sentence = f"{len(item.keys)} records were not read because a file is missing or damaged."
    html = page.render(report, Style(ascii_only=False))
    for text in (html, report._repr_html_(), " ".join(str(report).split())):
        assert sentence in text and "Every record was read" not in text
    tensors = report.checkpoints[0].checkpoint.tensors
    assert html.count('<div class="row flagged error">') == sum(key in tensors for key in item.keys) < len(tensors)


def test_of_unreadable_metadata_nothing_is_called_read() -> None:
    assert "Every record" not in page.render(
        ckptlint.check(REAL / "metadata_missing", depth="data"), Style(ascii_only=False)
    )


def test_a_finding_on_no_key_counts_none() -> None:
    report = ckptlint.check(REAL / "metadata_missing")
    assert [(row["keys"], item.keys) for row, item in zip(report.rows(), report.diagnostics, strict=True)] == [(0, ())]
    assert [group["keys"] for group in page.group_rows(report)] == [""]


def test_rows_of_what_a_plan_loses_and_a_diff_finds(shown: dict[str, Any]) -> None:
    plan = ckptlint.plan(REAL / "fsdp2_4r_hole", "dp=3")
    assert {(row["effect"], row["key"]) for row in plan.rows()} >= {("drops", "model.layers.0.feed_forward.w1.weight")}
    kinds = {row["kind"] for row in shown["Diff"].rows()}
    assert kinds == {"removed"}
    proven = [row for row in shown["Values"].rows() if row["proven"]]
    assert len(proven) == 19 and proven[0]["relation"] == "equal"


def test_latest_answers_as_the_command_does(tmp_path: Path) -> None:
    found = ckptlint.latest(RUN)
    assert found.path == f"{RUN}/iter_0000020" and repr(found) == f"<Search {RUN}: iter_0000020 passes, 0 skipped>"
    assert ckptlint.latest(RUN, require=["optimizer"]).path is None
    with pytest.raises(ckptlint.ConfigError, match="there is no part 'optim'"):
        ckptlint.latest(RUN, require=["optim"])
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "step-1").symlink_to(GOOD)
    with pytest.raises(ckptlint.ConfigError, match="holds 2 runs: name one of them"):
        ckptlint.latest(tmp_path)


@pytest.mark.parametrize("kind", HOSTILE)
def test_no_name_is_more_than_text(kind: str, tmp_path: Path) -> None:
    name = HOSTILE[kind][:3000]
    holes = {name: {"shape": [8], "chunks": ["0:4"]}, f"layers.0.{name}": {"shape": [4], "chunks": []}}
    write_checkpoint({"tensors": holes}, tmp_path / "old")
    write_checkpoint({"tensors": {"w": {"shape": [8], "chunks": ["0:8"]}}}, tmp_path / "new")
    for found in (
        ckptlint.check(tmp_path / "old"),
        ckptlint.diff(tmp_path / "old", tmp_path / "new"),
        ckptlint.plan(tmp_path / "old", "dp=2"),
    ):
        part = Part(found._repr_html_())
        assert part.tags <= ELEMENTS and part.attributes <= {"class", "style"}
        assert "\n" not in repr(found) and repr(found).isprintable()
        text = str(found)
        assert all(line.isprintable() for line in text.splitlines())
        text.encode(), part.text.encode()
        for line in text.splitlines():
            assert not line.lstrip().startswith(("::", "##["))
