"""Writes the pictures of the README from what ckptlint really prints: python docs/make_pictures.py.

`finding.svg` is the report on `fixtures/real/fsdp2_4r_hole` as a terminal shows it.
"""

from __future__ import annotations

import re
from dataclasses import replace
from html import escape
from pathlib import Path

import ckptlint
from ckptlint.reporters import full
from ckptlint.reporters.style import Style

REPOSITORY = Path(__file__).parent.parent
PICTURE = REPOSITORY / "docs" / "finding.svg"
CHECKPOINT = "fixtures/real/fsdp2_4r_hole"

_COLUMN, _LINE = 8.4, 19
_CODE = re.compile(r"\x1b\[([0-9;]*)m")
_CLASSES = {"31;1": "error", "33;1": "warning", "36": "info", "32": "good", "1": "bold"}
_STYLE = """\
text { font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: #d7dce2;
  white-space: pre }
.error { fill: #ff8a7a; font-weight: bold } .warning { fill: #f0b452; font-weight: bold } .info { fill: #7db7f5 }
.good { fill: #6fce93 } .bold { fill: #ffffff; font-weight: bold }"""


def finding_picture() -> str:
    """The report as SVG, without what changes by itself: the time is a tenth of a second, rules are not counted."""
    report = replace(ckptlint.check(REPOSITORY / CHECKPOINT), seconds=0.1)
    text = full.render(report, Style(color=True, ascii_only=False, width=80)).replace(f"{REPOSITORY.as_posix()}/", "")
    text = re.sub(r"\d+ rules, ", "", text)
    return terminal(f"\x1b[32m$\x1b[0m ckptlint {CHECKPOINT}\n{text}")


def terminal(text: str) -> str:
    """Text with colour codes as the picture of a terminal; each run of one colour stands at its own column."""
    lines = text.rstrip("\n").split("\n")
    width = round(max(len(_CODE.sub("", line)) for line in lines) * _COLUMN) + 48
    height = len(lines) * _LINE + 58
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f"<title>ckptlint {CHECKPOINT}</title><style>{_STYLE}</style>",
        f'<rect width="{width}" height="{height}" rx="10" fill="#14181d"/>',
        *(f'<circle cx="{22 + 18 * i}" cy="20" r="5.5" fill="#3a424c"/>' for i in range(3)),
    ]
    for number, line in enumerate(lines):
        column, kind = 0, ""
        for i, run in enumerate(_CODE.split(line)):
            if i % 2:
                kind = _CLASSES.get(run, "")
            elif run:
                parts.append(_run(run, column, 54 + number * _LINE, kind))
                column += len(run)
    return "\n".join([part for part in parts if part] + ["</svg>\n"])


def _run(run: str, column: int, y: int, kind: str) -> str:
    shown = run.strip()
    if not shown:
        return ""
    x = 24 + (column + len(run) - len(run.lstrip())) * _COLUMN
    class_ = f' class="{kind}"' if kind else ""
    # the width is given, so that columns stand below each other in whatever font there is
    length = f' textLength="{len(shown) * _COLUMN:.1f}" lengthAdjust="spacingAndGlyphs"'
    return f'<text x="{x:.1f}" y="{y}"{class_}{length}>{escape(shown, quote=False)}</text>'


if __name__ == "__main__":
    PICTURE.write_text(finding_picture(), encoding="utf-8")
