"""The HTML report: what it holds, that nothing in it is live, and how it looks in a real browser."""

from __future__ import annotations

import base64
import functools
import os
import re
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from support import REAL, examples, report_on, run, sweep_only

import ckptlint
from ckptlint.analysis.ranks.contents import rank_contents_of
from ckptlint.lint.registry import load_rules
from ckptlint.lint.report import Report
from ckptlint.model.tiling import Box
from ckptlint.reporters import full
from ckptlint.reporters.ci import junit
from ckptlint.reporters.contents import ranks
from ckptlint.reporters.html import page as html
from ckptlint.reporters.style import Style
from ckptlint.testing import load_folder, write_checkpoint

pytestmark = pytest.mark.ci

VOID = {"meta", "link", "br", "hr", "img", "input"}
ELEMENTS = """
html head meta title link style body header main section nav article figure figcaption div span p h1 h2 h3 ul li dl dt
dd table thead tbody tr th td a b pre details summary input label svg defs pattern rect path text
"""
HOSTILE = "</code><script>alert(1)</script><img src=x onerror=alert(2)>&amp;'\"{{ 7*7 }}{% x %}"


class Page(HTMLParser):
    """A page taken apart; fails on tags that do not fit each other.

    Attributes:
        tags: every element in order, with its attributes.
        texts: the text by the name of the innermost element.
        source: the page as it is.
    """

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.texts: list[tuple[str, str]] = []
        self.stack: list[str] = []
        self.source = text
        self.feed(text)
        self.close()
        assert not self.stack

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        assert len({name for name, _ in attrs}) == len(attrs)
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self.stack[-1] if self.stack else "", data))

    def all(self, tag: str, class_: str = "") -> list[dict[str, str]]:
        """The attributes of the elements of a kind, and of a class."""
        return [a for t, a in self.tags if t == tag and (not class_ or class_ in a.get("class", "").split())]

    @property
    def text(self) -> str:
        """All text."""
        return " ".join(text for _, text in self.texts)


def rendered(*names: str | Path) -> str:
    return html.render(ckptlint.check(*(REAL / name for name in names)), Style())


def parsed(*names: str | Path) -> Page:
    return Page(rendered(*names))


def checked(table: dict[str, Any], folder: Path) -> Report:
    return ckptlint.check(write_checkpoint(table, folder))


# ---------------------------------------------------------------- what it holds

ALL = sorted(path.parent.relative_to(REAL) for path in [*REAL.glob("*/.metadata"), *REAL.glob("*/iter_*/.metadata")])


@pytest.mark.parametrize("name", ALL, ids=str)
def test_every_real_checkpoint_gives_a_whole_page(name: Path) -> None:
    report = ckptlint.check(REAL / name)
    text = html.render(report, Style())
    page = Page(text)
    groups = [group for part in report.checkpoints for group in part.groups]
    assert len(page.all("article")) == len(groups)
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = [attributes["href"] for attributes in page.all("a")]
    assert all(link.startswith("#") and link[1:] in ids for link in links)
    for group in groups:
        assert group.lead.code in page.text
    assert text.startswith("<!doctype html>")
    assert {"pass": "Passed", "fail": "Failed", "incomplete": "Incomplete"}[report.verdict] in page.text


@pytest.mark.parametrize("name", ["fsdp2_4r", "fsdp2_4r_hole", "metadata_malicious", "megatron_tp2_pp2"])
def test_nothing_on_the_page_is_live_or_comes_from_elsewhere(name: str) -> None:
    text = rendered(name)
    page = Page(text)
    assert not re.search(r"https?://|<script|javascript:|@import|\bsrc=|xlink", text)
    assert {tag for tag, _ in page.tags} <= set(ELEMENTS.split())
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on") or name == "style"]
    hatches = "gap", "overlap", "outside", "mark", "missing", "cut", "failed", "unchecked", "partly", "grid"
    assert set(re.findall(r"url\(([^)]*)\)", text)) == {f"#hatch-{kind}" for kind in hatches}


def test_the_policy_forbids_scripts_and_network_and_allows_this_style_only() -> None:
    import hashlib

    text = rendered("fsdp2_4r_hole")
    policy = next(a["content"] for a in Page(text).all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    rules = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert rules["default-src"] == "'none'" and "script-src" not in rules and rules["img-src"] == "data:"
    style = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style[0].encode()).digest()).decode()
    assert len(style) == 1 and rules["style-src"] == f"'sha256-{digest}'"
    assert text.index("Content-Security-Policy") < text.index("<style>")


def test_names_with_markup_are_text(tmp_path: Path) -> None:
    name = f"layers.0.{HOSTILE}"
    table = {
        "tensors": {name: {"shape": [8, 4], "chunks": ["0:4, :"], "records": ["<b>.distcp 0:1705"]}},
        "bytes": [HOSTILE],
    }
    folder = tmp_path / "<i>&run"
    text = html.render(checked(table, folder), Style())
    page = Page(text)
    assert not page.all("script") and not page.all("img") and not page.all("i")
    assert len(page.all("b")) == len(parsed("fsdp2_4r_hole").all("b"))
    assert name in page.text and "<i>&run" in page.text and "<b>.distcp" in page.text
    assert any(name in attributes["aria-label"] for attributes in page.all("svg") if "aria-label" in attributes)


def test_a_long_name_is_cut(tmp_path: Path) -> None:
    text = html.render(checked({"tensors": {"w" * 3000: {"shape": [8], "chunks": ["0:4"]}}}, tmp_path), Style())
    assert "w" * 98 + "..." + "w" * 98 in text and "w" * 99 not in text


def test_a_map_has_a_rectangle_for_every_cell_with_what_it_holds() -> None:
    text = rendered("overlap_and_gap_same_volume")
    first = re.search(r'<svg class="map".*?</svg>', text, re.DOTALL)
    assert first is not None
    page = Page(first[0])
    kinds = [attributes["class"] for attributes in page.all("rect")]
    assert kinds == ["ok", "overlap", "ok", "gap", "ok", "ok", "region"]
    titles = [text for tag, text in page.texts if tag == "title"]
    assert titles[1].splitlines() == [
        "[3:4, :] in 2 chunks",
        "chunk A [0:4, 0:8] __0_0.distcp, rank 0",
        "chunk B [3:7, 0:8] __1_0.distcp, rank 1",
    ]
    assert titles[3] == "[7:8, :] in no chunk"
    svg = page.all("svg")[0]
    assert svg["role"] == "img" and "1 gap cell" in svg["aria-label"] and "1 overlap cell" in svg["aria-label"]


def test_a_cut_that_runs_through_a_chunk_is_a_boundary() -> None:
    assert parsed("boundary_mismatch").all("path", "boundary")
    assert not parsed("fsdp2_4r_hole").all("path", "boundary")


def test_the_graph_of_an_axis_has_a_dashed_link_where_one_is_missing() -> None:
    text = rendered("fsdp2_4r_hole")
    chain = re.search(r'<svg class="chain".*?</svg>', text, re.DOTALL)
    assert chain is not None
    page = Page(chain[0])
    assert [a["class"] for a in page.all("rect")] == ["node end", "node ok", "node ok", "node ok", "node end"]
    assert len(page.all("path", "missing")) == 1
    assert ("title", "6:9 is in no chunk") in page.texts
    assert len(page.all("path", "link")) == 4


def test_a_pass_says_what_was_not_read_as_the_terminal_does() -> None:
    for depth in ("files", "data"):
        report = ckptlint.check(REAL / "fsdp2_4r", depth=depth)
        text = " ".join(full.render(report, Style()).split())
        page = Page(html.render(report, Style()))
        (said,) = (sentence for _, sentence in page.texts if sentence.startswith(("Tensor bytes", "Every record")))
        assert "Passed" in page.text and said in text
        assert ("Tensor bytes were not read" in said) == (depth == "files")


def test_all_formats_agree_on_how_many_rules_ran() -> None:
    report = ckptlint.check(REAL / "fsdp2_4r_hole")
    page = Page(html.render(report, Style()))
    words = [text for _, text in page.texts]
    ran, silent = (int(words[words.index(name) + 1]) for name in ("rules that ran", "not run"))
    assert f"{ran} rules ran" in full.render(report, Style()) and ran + silent == len(load_rules())
    assert len(ElementTree.fromstring(junit.render(report, Style())).findall(".//testcase")) == ran
    lists = [len(re.findall("<li", part)) for part in re.findall(r'<ul class="codes">.*?</ul>', page.source, re.DOTALL)]
    assert lists == [ran] and page.source.count('<dt class="code">') == silent


def test_what_a_cause_explains_asks_for_nothing_of_its_own(tmp_path: Path) -> None:
    step = Path(shutil.copytree(REAL / "hsdp_2x2", tmp_path / "step"))
    shutil.copy(REAL / "fsdp2_4r" / ".metadata", step)  # PAY004 alone would say: copy the file again
    report = ckptlint.check(step, depth="headers")
    (part,) = report.checkpoints
    assert [cause.name for cause in part.causes] == ["metadata-of-another-save"]
    drawn = re.findall("<article.*?</article>", html.render(report, Style()), re.DOTALL)
    cards = dict(zip(part.groups, drawn, strict=True))
    explained = [Page(card).text for group, card in cards.items() if group in part.folded]
    assert {group.lead.code for group in part.folded} >= {"PAY004", "PAY013"}
    assert all("by the cause metadata-of-another-save above" in text for text in explained)
    assert not any('class="hint"' in cards[group] for group in part.folded)
    hints = [row["hint"] for row in html.group_rows(report) if row["rule"] == "PAY004"]
    assert set(hints) == {"by the cause metadata-of-another-save above"}


def test_when_and_how_the_page_was_made(tmp_path: Path) -> None:
    target, settings = tmp_path / "report.html", tmp_path / "ckptlint.toml"
    settings.write_text('depth = "metadata"\n')
    assert run(REAL / "fsdp2_4r", "--config", settings, "--output", target, "-qq").returncode == 0
    words = [text for _, text in Page(target.read_text(encoding="utf-8")).texts]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d [+-]\d{4}, checked in .* s", words[words.index("date") + 1])
    command = words[words.index("command") + 1]
    assert command.startswith("ckptlint ") and f"{REAL / 'fsdp2_4r'} --config {settings}" in command
    assert words[words.index("version") + 1] == f"ckptlint {ckptlint.__version__}"
    assert str(settings) in words[words.index("settings") + 1]
    assert "no settings file" in parsed("fsdp2_4r").text


def test_chunks_whose_bytes_are_lost_are_hatched_and_explained(tmp_path: Path) -> None:
    folder = shutil.copytree(REAL / "fsdp2_4r", tmp_path / "lost")
    (folder / "__2_0.distcp").unlink()
    os.truncate(folder / "__1_0.distcp", 3000)
    last = folder / "__3_0.distcp"
    last.write_bytes(bytes(last.stat().st_size))
    page = Page(html.render(ckptlint.check(folder, depth="headers"), Style()))
    strips = re.findall(r'<svg class="strip".*?</svg>', page.source, re.DOTALL)
    for state in ("missing", "cut", "failed"):
        assert sum(f'class="lost-{state}"' in strip for strip in strips) > 10, state
    legend = re.findall(r'<p class="signs">.*?</p>', page.source, re.DOTALL)[-1]
    assert [a["class"] for a in Page(legend).all("rect")] == ["lost-missing", "lost-cut", "lost-failed"]
    healthy = parsed("fsdp2_4r").source
    assert healthy.count('<p class="signs">') == 1 and not re.search('class="lost-(missing|cut|failed)', healthy)


def test_a_map_marks_the_chunk_whose_file_is_gone(tmp_path: Path) -> None:
    folder = shutil.copytree(REAL / "fsdp2_4r_hole", tmp_path / "hole")
    (folder / "__0_0.distcp").unlink()
    page = Page(html.render(ckptlint.check(folder), Style()))
    drawn = next(m for m in re.findall(r'<svg class="map".*?</svg>', page.source, re.DOTALL) if "gap" in m)
    assert [a["class"] for a in Page(drawn).all("rect")][:1] == ["lost-missing"]
    assert "__0_0.distcp (missing), rank 0" in drawn and "1 gap cell, 1 missing cell" in drawn
    chain = re.search(r'<svg class="chain".*?</svg>', page.source, re.DOTALL)
    assert chain is not None and len(Page(chain[0]).all("rect", "lost-missing")) == 1
    assert ("span", "missing") in page.texts and "in a chunk whose bytes are missing" in page.text


def test_all_chunks_of_a_finding_are_marked(tmp_path: Path) -> None:
    bad, good = {"put": {1: 0x7FC00000}}, {}
    tensor = {"shape": [16], "chunks": ["0:4", "4:8", "8:12", "12:16"], "holds": [bad, good, good, bad]}
    table = {"tensors": {"w.weight": tensor}, "depth": "data"}
    report = ckptlint.check(write_checkpoint(table, tmp_path), depth="data")
    page = html.render(report, Style())
    drawn = {kind: re.search(f'<svg class="{kind}".*?</svg>', page, re.DOTALL) for kind in ("map", "strip")}
    regions = [int(a["x"]) for a in Page(drawn["map"][0]).all("rect", "region")]
    cells = [int(a["x"]) for a in Page(drawn["map"][0]).all("rect", "ok")]
    assert regions == [cells[0], cells[3]] and "2 chunks · 8 elements · 32 B" in page
    assert [a["x"] for a in Page(drawn["strip"][0]).all("rect", "mark")] == ["0", "750"]


def test_a_chunk_that_is_stored_twice_is_lost_only_with_both(tmp_path: Path) -> None:
    table = {"tensors": {"w": {"shape": [10], "chunks": ["0:5", "5:10", "0:5"]}}}
    tensor = load_folder(write_checkpoint(table, tmp_path)).tensors["w"]
    for states, lost in (([4, 2, 0], (5, 10, "lost-failed")), ([4, 0, 2], (0, 5, "lost-failed"))):
        assert html.svg.lost_marks(tensor, np.array(states, np.uint8), 0) == [lost]


def test_steps_are_one_table_with_links(tmp_path: Path) -> None:
    steps = [tmp_path / f"step-{number}" for number in (10, 20)]
    shutil.copytree(REAL / "fsdp2_4r", steps[0])
    for part, name in (("model", "fsdp2_4r_hole"), ("ema", "fsdp2_4r")):
        shutil.copytree(REAL / name, steps[1] / part)
    report = ckptlint.check(*steps, REAL / "gap_middle")
    page = Page(html.render(report, Style()))
    (drawn,) = re.findall(r'<nav aria-label="Checkpoints">.*?</nav>', page.source, re.DOTALL)
    texts = [text for tag, text in Page(drawn).texts if tag in ("a", "span")]
    assert texts == ["step-20: ", "ema", ", ", "model", "step-10", "error", str(REAL / "gap_middle")]
    assert len({a["href"] for a in Page(drawn).all("a")}) == len(report.checkpoints) == 4
    assert f"The newest step that passes: {steps[0]}" in page.text
    assert len(page.all("table", "steps")) == 1
    (strip,) = re.findall(r'<ul class="steps-strip">.*?</ul>', page.source, re.DOTALL)
    marks = re.findall(r'class="level (.*?)"><b title=".*?">(.)</b> <a href="#(.*?)">(.*?)</a>', strip)
    hole = next(part["id"] for part in page.all("section", "checkpoint") if "blameless" not in part["class"])
    assert marks == [("error", "F", hole, "step-20"), ("good blameless", "P", marks[1][2], "step-10")]
    assert "F fails · P passes" in page.text


def test_a_healthy_page_shows_who_holds_what() -> None:
    report = ckptlint.check(REAL / "megatron_tp2_pp2")
    text = html.render(report, Style())
    (drawn,) = re.findall(r'<section class="holdings".*?</section>', text, re.DOTALL)
    held = rank_contents_of(report.checkpoints[0].checkpoint)
    page, (shown, left) = Page(drawn), ranks.folded(held)
    labels = [text for tag, text in page.texts if tag == "th"]
    assert labels[3:] == [label for label, _ in shown] == ["ranks 0-1", "rank 2", "rank 3"] and left == 0
    # ranks 0 and 1 are the first stage: embedding and layer 0 of the model, not layer 1, the norm and the head
    first = next(a["aria-label"] for a in page.all("svg", "cells") if a["aria-label"].startswith("ranks 0-1"))
    assert first == "ranks 0-1: 3 nothing, 7 there"
    assert len(page.all("svg", "size")) == 3 and len(drawn) < 10_000
    bar = [float(a["width"]) for a in page.all("rect", "share-model")]
    assert bar[1] / bar[0] == pytest.approx(held.model[2] / np.median(held.model[:2]), rel=0.01)


@pytest.mark.sweep
def test_the_matrix_says_which_rank_is_gone_and_stays_small(tmp_path: Path) -> None:
    folder = shutil.copytree(REAL / "fsdp2_4r", tmp_path / "lost")
    (folder / "__2_0.distcp").unlink()
    drawn = re.findall(
        r'<section class="holdings".*?</section>', html.render(ckptlint.check(folder), Style()), re.DOTALL
    )
    page = Page(drawn[0])
    assert "missing of rank 2: __2_0.distcp" in page.text and ("td", "missing") in page.texts
    assert len(page.all("path", "lost-missing")) == 1
    world = examples(128, 2048)
    parts = {i: [f"{n}:{n + 1}, :" for n in range(world - world // 64 * i)] for i in range(64)}
    wide = {f"layers.{i}.w.weight": {"shape": [world, 4], "chunks": part} for i, part in parts.items()}
    page_of_many = html.render(ckptlint.check(write_checkpoint({"tensors": wide}, tmp_path / "wide")), Style())
    (drawn_many,) = re.findall(r'<section class="holdings".*?</section>', page_of_many, re.DOTALL)
    assert drawn_many.count("<tr>") == 41 and "24 more rows that differ" in drawn_many and len(drawn_many) < 40_000


def test_a_checkpoint_that_is_not_read_has_no_matrix() -> None:
    assert '<section class="holdings"' not in rendered("metadata_malicious")


def test_healthy_neighbours_of_a_hole_are_not_marked() -> None:
    assert not parsed("fsdp2_4r_hole").all("tr", "concerned")
    assert len(parsed("overlap_and_gap_same_volume").all("tr", "concerned")) == 2


def test_findings_name_their_ranks() -> None:
    report = ckptlint.check(REAL / "overlap_and_gap_same_volume")
    part = report.checkpoints[0]
    part.diagnostics[:] = [
        replace(item, finding=replace(item.finding, at=replace(item.finding.at, ranks=(2, 3, 5))))
        for item in part.diagnostics
    ]
    page = Page(html.render(report, Style()))
    assert len(page.all("td", "ranks")) == 2 and [text for _, text in page.texts].count("2-3,5") == 2
    # once in the finding about the hole, once in the line of its tensor
    assert [text for _, text in page.texts if text.startswith("missing from")] == ["missing from ranks 2-3,5"] * 2


def test_every_tensor_has_a_strip_and_the_concerned_ones_show_where() -> None:
    page = parsed("fsdp2_4r_hole")
    assert len(page.all("svg", "strip")) == 21
    assert len(page.all("div", "flagged")) == 2
    assert "model.layers.0" in page.text and "Outside of numbered layers" in page.text


def test_strips_show_true_proportions(tmp_path: Path) -> None:
    ckpt = load_folder(
        write_checkpoint({"tensors": {"w": {"shape": [10], "chunks": ["0:3", "3:6", "9:10"]}}}, tmp_path)
    )
    drawn = Page(html.svg.strip(ckpt.tensors["w"].tiling, 0, [(6, 9, "gap")], "w"))
    assert [(a["class"], a.get("x"), a["width"]) for a in drawn.all("rect")] == [
        ("gap", None, "1000"),
        ("ok", "0", "600"),
        ("ok", "900", "100"),
        ("gap", "600", "300"),
    ]
    assert drawn.all("path")[0]["d"] == "M300 0v10M600 0v10M900 0v10"


def test_what_a_region_is(tmp_path: Path) -> None:
    table = {"tensors": {"w": {"shape": [10], "chunks": ["0:5", "4:8"]}}}
    layout = load_folder(write_checkpoint(table, tmp_path)).tensors["w"].tiling
    regions = [Box((8,), (2,)), Box((4,), (1,)), Box((0,), (5,)), Box((8,), (9,))]
    assert [html.svg.region_kind(layout, region) for region in regions] == ["gap", "overlap", "mark", "mark"]


def test_rules_that_gave_no_verdict_say_why() -> None:
    text = parsed("metadata_malicious").text
    assert "needs .metadata" in text and "SAF001" in text and "STACK_GLOBAL  posix system" in text
    assert "needs --expect" in parsed("fsdp2_4r").text


def test_paths_without_a_checkpoint_are_named(tmp_path: Path) -> None:
    text = html.render(report_on(tmp_path / "none<x>"), Style())
    assert "Nothing was checked." in Page(text).text and "none<x>" in Page(text).text


def test_the_page_of_a_rule_is_there_once() -> None:
    report = ckptlint.check(REAL / "fsdp2_4r_hole", REAL / "gap_middle")
    page = Page(html.render(report, Style()))
    assert len(page.all("details", "page")) == len({item.code for item in report.diagnostics})
    assert [a["href"] for a in page.all("a") if a["href"].endswith("-page")]


@sweep_only
def test_a_large_report_stays_small_and_quick(tmp_path: Path) -> None:
    tensors = {}
    for i in range(2500):
        chunks = [f"{8 * k}:{8 * k + 8}, {64 * c}:{64 * c + 64}" for k in range(8) for c in range(2)]
        lost = i % 16 if i < 1000 else 16
        tensors[f"model.layers.{i // 50}.block{i % 50}x.weight"] = {
            "shape": [64, 128],
            "chunks": [chunk for k, chunk in enumerate(chunks) if k != lost],
        }
    report = checked({"tensors": tensors}, tmp_path)
    part = report.checkpoints[0]
    part.diagnostics[:] = [
        replace(item, finding=replace(item.finding, group=str(i))) for i, item in enumerate(part.diagnostics)
    ]
    text = html.render(report, Style())
    assert len(part.groups) == 1000 and len(text.encode()) < 10_000_000
    assert text.count("<article ") == 1000 and text.count('<svg class="strip"') == html.STRIP_LIMIT
    assert "500 more tensors are left out; all with findings are above." in text
    assert 200 < text.count('<svg class="map"') < 1000
    assert "This page has no room left for the picture" in text


def test_the_command_line_writes_it(tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    assert run(REAL / "fsdp2_4r_hole", "--output", target, "-qq").returncode == 1
    assert target.read_text(encoding="utf-8").startswith("<!doctype html>")


# ---------------------------------------------------------------- in a real browser

OVERFLOWING = """
const out = [];
for (const e of document.querySelectorAll('body *')) {
  if (e.closest('.scroll') && !e.matches('.scroll') || e.closest('.defs')) continue;
  const box = e.getBoundingClientRect();
  if (box.width && (box.right > innerWidth + 0.5 || box.left < -0.5)) out.push(e.outerHTML.slice(0, 120));
}
return out;
"""

PALE = """
function rgb(text) { return text.match(/[\\d.]+/g).map(Number); }
function light(c) {
  const [r, g, b] = c.map(v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
const pale = {};
for (const e of document.querySelectorAll('body *')) {
  const own = [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim());
  if (!own || e.tagName === 'title' || !e.getClientRects().length) continue;
  const svg = e.namespaceURI.endsWith('svg');
  let ground = e;
  while (ground && (rgb(getComputedStyle(ground).backgroundColor)[3] === 0)) ground = ground.parentElement;
  const back = rgb(getComputedStyle(ground || document.body).backgroundColor).slice(0, 3);
  const front = rgb(svg ? getComputedStyle(e).fill : getComputedStyle(e).color).slice(0, 3);
  const [a, b] = [light(front), light(back)].sort((x, y) => y - x);
  const ratio = (a + 0.05) / (b + 0.05);
  if (ratio < 4.5) pale[e.tagName + '.' + (e.getAttribute('class') || '')] = ratio.toFixed(2);
}
return pale;
"""

SHOWN = ["fsdp2_4r", "fsdp2_4r_hole", "overlap_and_gap_same_volume", "out_of_bounds", "boundary_mismatch"]
SHOWN += ["metadata_malicious", "megatron_tp2_pp2", "megatron_moe_ep_offset_lost"]
LOOKED_AT = [SHOWN[0], "several", "hostile"]
"""Pages that show all that the others do: one of a pass, one of all together, one of hostile names."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A headless Chromium that logs its console."""
    programs = shutil.which("chromium"), shutil.which("chromedriver")
    if None in programs:
        pytest.skip("needs chromium and chromedriver (Debian: apt-get install chromium chromium-driver)")
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium, which the ci extra brings")
    options = webdriver.ChromeOptions()
    options.binary_location = str(programs[0])
    flags = ["headless=new", "no-sandbox", "disable-gpu", "disable-background-networking", "disable-component-update"]
    flags += ["disable-sync", "no-first-run", "disable-dev-shm-usage"]
    for flag in [*flags, f"user-data-dir={tmp_path_factory.mktemp('profile')}"]:
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(str(programs[1])))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[str]]]:
    """The reports behind a local web server, and the paths that were asked for."""
    folder = tmp_path_factory.mktemp("site")
    for name in SHOWN:
        (folder / f"{name}.html").write_text(rendered(name), encoding="utf-8")
    (folder / "several.html").write_text(rendered(*SHOWN), encoding="utf-8")
    hostile = {f"layers.0.{HOSTILE}": {"shape": [8, 4], "chunks": ["0:4, :"]}, "n" * 300: {"shape": [4], "chunks": []}}
    report = checked({"tensors": hostile}, folder / ("p" * 120))
    (folder / "hostile.html").write_text(html.render(report, Style()), encoding="utf-8")
    asked: list[str] = []

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            asked.append(self.path)

    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()


def visit(browser: Any, url: str, width: int = 1280, scheme: str = "light", media: str = "") -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})
    browser.get(url)


def unfold(browser: Any) -> None:
    browser.execute_script("document.querySelectorAll('details').forEach(d => d.open = true)")


def test_pages_render_without_a_message_or_a_second_request(browser: Any, site: tuple[str, list[str]]) -> None:
    url, asked = site
    for name in [*SHOWN, "several", "hostile"]:
        asked.clear()
        visit(browser, f"{url}/{name}.html")
        unfold(browser)
        assert browser.find_element("tag name", "h1").text in ("Passed", "Failed")
        assert asked == [f"/{name}.html"]
        assert browser.get_log("browser") == []
        assert browser.execute_script("return document.title").startswith("ckptlint: ")


def test_nothing_overflows(browser: Any, site: tuple[str, list[str]]) -> None:
    for width in (400, 800, 1280):
        for name in LOOKED_AT:
            visit(browser, f"{site[0]}/{name}.html", width)
            unfold(browser)
            assert browser.execute_script("return document.scrollingElement.scrollWidth") <= width, (name, width)
            assert browser.execute_script(OVERFLOWING) == [], (name, width)


def test_no_column_is_cut_off_on_a_narrow_screen(browser: Any, site: tuple[str, list[str]]) -> None:
    cut = """
    return [...document.querySelectorAll('table, svg.map, svg.chain')].filter(e => e.checkVisibility()).filter(e =>
      e.scrollWidth > e.clientWidth + 1 || e.getBoundingClientRect().right > innerWidth + 0.5
    ).map(e => e.outerHTML.slice(0, 120));
    """
    for width in (320, 400, 490):
        for name in LOOKED_AT:
            visit(browser, f"{site[0]}/{name}.html", width)
            unfold(browser)
            assert browser.execute_script(cut) == [], (name, width)
    names = "return getComputedStyle(document.querySelector('.chunks td'), '::before').content"
    visit(browser, f"{site[0]}/fsdp2_4r_hole.html", 400)
    assert browser.execute_script(names) == '"region"'
    visit(browser, f"{site[0]}/fsdp2_4r_hole.html", 1280)
    assert browser.execute_script(names) == "none"


def test_only_with_findings_hides_what_has_none(browser: Any, site: tuple[str, list[str]]) -> None:
    visit(browser, f"{site[0]}/several.html")
    unfold(browser)
    shown = "return [...document.querySelectorAll(arguments[0])].filter(e => e.checkVisibility()).length"
    rows, flagged = (browser.execute_script(shown, kind) for kind in (".row", ".row.flagged"))
    parts = browser.execute_script(shown, "section.checkpoint")
    assert rows > flagged > 0
    for box in browser.find_elements("css selector", ".appendix .only"):
        box.click()
    box = browser.find_element("id", "only")
    assert browser.execute_script(shown, "section.checkpoint") == parts == len(SHOWN)
    box.click()
    assert browser.execute_script(shown, "section.checkpoint") == parts - 2
    assert browser.execute_script(shown, ".row") == browser.execute_script(shown, ".row.flagged") == flagged
    box.click()
    assert browser.execute_script(shown, "section.checkpoint") == parts


def test_labels_of_a_plan_are_readable_on_a_narrow_screen(browser: Any, tmp_path: Path) -> None:
    done = run("plan", REAL / "fsdp2_4r", "--to", "dp=300", "--html", tmp_path / "plan.html")
    assert done.returncode == 0
    for width in (400, 1280):
        visit(browser, (tmp_path / "plan.html").as_uri(), width)
        boxes = browser.execute_script(
            "return [...document.querySelectorAll('.bars text')].map(e => e.getBoundingClientRect().toJSON())"
        )
        assert len(boxes) == 5 and all(box["height"] >= 11 for box in boxes)
        assert min(box["left"] for box in boxes) >= 0 and max(box["right"] for box in boxes) <= width
        assert browser.execute_script(OVERFLOWING) == []


def test_text_has_contrast_in_light_and_dark(browser: Any, site: tuple[str, list[str]]) -> None:
    grounds = set()
    for scheme in ("light", "dark"):
        for name in LOOKED_AT:
            visit(browser, f"{site[0]}/{name}.html", scheme=scheme)
            unfold(browser)
            assert browser.execute_script(PALE) == {}, (name, scheme)
        grounds.add(browser.execute_script("return getComputedStyle(document.body).backgroundColor"))
    assert len(grounds) == 2


def test_cells_have_a_tooltip_where_the_pointer_meets_them(browser: Any, site: tuple[str, list[str]]) -> None:
    visit(browser, f"{site[0]}/overlap_and_gap_same_volume.html")
    hit = """
    const svg = document.querySelector('svg.map');
    svg.scrollIntoView({block: 'center'});
    return [...svg.querySelectorAll('rect')].filter(r => !r.matches('.region')).map(r => {
      const box = r.getBoundingClientRect();
      const met = document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2);
      const title = met === r && met.querySelector(':scope > title');
      return title ? title.textContent : met.outerHTML;
    });
    """
    titles = browser.execute_script(hit)
    assert len(titles) == 6
    assert "chunk B [3:7, 0:8] __1_0.distcp, rank 1" in titles[1] and titles[3] == "[7:8, :] in no chunk"
    fills = browser.execute_script(
        "return ['ok', 'gap', 'overlap'].map(k => getComputedStyle(document.querySelector(`svg.map .${k}`)).fill)"
    )
    assert len(set(fills)) == 3 and 'url("#hatch-gap")' in fills[1] and 'url("#hatch-overlap")' in fills[2]


def test_details_fold_and_unfold_by_click_and_by_key(browser: Any, site: tuple[str, list[str]]) -> None:
    visit(browser, f"{site[0]}/fsdp2_4r_hole.html")
    details = browser.find_element("css selector", "article details.page")
    summary, text = details.find_element("tag name", "summary"), details.find_element("tag name", "dl")
    assert not text.is_displayed()
    summary.click()
    assert text.is_displayed()
    summary.click()
    assert not text.is_displayed()
    summary.send_keys("\ue007")  # Enter
    assert text.is_displayed()
    summary.send_keys(" ")
    assert not text.is_displayed()


def test_everything_that_opens_is_reached_by_tab(browser: Any, site: tuple[str, list[str]]) -> None:
    visit(browser, f"{site[0]}/overlap_and_gap_same_volume.html")
    reached = set()
    for _ in range(60):
        browser.switch_to.active_element.send_keys("\ue004")
        reached.add(browser.execute_script("return document.activeElement.outerHTML"))
    seen = "[...document.querySelectorAll('a, summary, .scroll')].filter(e => e.checkVisibility())"
    wanted = browser.execute_script(f"return {seen}.map(e => e.outerHTML)")
    assert wanted and set(wanted) <= reached


def test_a_link_opens_the_page_of_the_rule(browser: Any, site: tuple[str, list[str]]) -> None:
    visit(browser, f"{site[0]}/several.html")
    link = browser.find_element("css selector", "p.about a")
    target = browser.find_element("id", link.get_attribute("href").partition("#")[2])
    assert not target.is_displayed()
    link.click()
    assert target.is_displayed()


def test_print_is_dark_on_white_and_cuts_nothing(browser: Any, site: tuple[str, list[str]]) -> None:
    visit(browser, f"{site[0]}/fsdp2_4r_hole.html", width=700, scheme="dark", media="print")
    style = "const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]"
    assert browser.execute_script(style) == ["rgb(255, 255, 255)", "rgb(0, 0, 0)"]
    assert browser.execute_script(OVERFLOWING) == []
    pdf = base64.b64decode(browser.print_page())
    assert pdf.startswith(b"%PDF-") and len(pdf) > 5000


def test_a_note_of_several_names_is_a_list_and_a_sentence_is_none() -> None:
    page = html.render(ckptlint.check(REAL / "exports/R13_eighth"), Style())
    assert "<ul><li>model.norm.weight</li><li>model.layers.{0-3}.input_layernorm.weight</li><li>" in page
    assert page.count("<ul>") == 1
