"""No name of a folder, file or key reaches the output of any command in any format as more than text."""

from __future__ import annotations

import io
import itertools
import json
import re
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from markdown_it import MarkdownIt
from support import HOSTILE, examples

from ckptlint.commands.graph import GRAPH_FORMATS as GRAPHS
from ckptlint.commands.main import main
from ckptlint.lint.settings.options import FORMATS
from ckptlint.model.text import printable
from ckptlint.reporters import REPORTERS
from ckptlint.testing import write_checkpoint

SHORT = {kind: name.replace("\0", "").replace("/", "|")[:90] for kind, name in HOSTILE.items() if kind != "surrogate"}
"""Names that a file can have."""
KEYS = {kind: name[:4000] for kind, name in HOSTILE.items()}
"""Keys that are read."""
NAMES = [*SHORT.values()][:: examples(3, 1)]
"""Those that a run has, too: all of them in a sweep."""
TEXTS = {"full", "concise", "text", "table", "statistics", "error", "paths"}
COMMAND = re.compile(r"##[\w.]*\[|::[\w-]+( [^:\n]*)?::")
"""What GitHub, Azure Pipelines and TeamCity take for a command, where they look for it in the whole of a line."""
MARKUP = re.compile(r"injected|evil|script|@user|onerror|</|<img")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs with hostile names, whose newest step is damaged, and one with hostile keys and files."""
    root = tmp_path_factory.mktemp("runs")
    tensors: dict[str, Any] = {}
    for kind, name in KEYS.items():
        tensors |= {name: {"shape": [8], "chunks": ["0:4"]}, f"{kind}.{name}": {"shape": [8], "chunks": ["0:8"]}}
    for number in (1, 2):
        step = root / "all" / f"step-{number}"
        write_checkpoint({"tensors": tensors, "unstored": [f"object {name}" for name in KEYS.values()]}, step)
        for name in SHORT.values():
            (step / f"{name}.pt").write_bytes(b"\x80\x02cos\nsystem\n.")
            (step / f"{name}.json").write_bytes(b"{")
        for place, name in enumerate(HOSTILE.values()):
            module = name.replace("\n", "").encode("utf-8", "surrogatepass")
            (step / f"class {place}.pt").write_bytes(b"\x80\x02c" + module + b"\nsystem\n.")
        hostile = HOSTILE["build servers"]
        (step / "config.json").write_text(json.dumps(dict.fromkeys(("model_type", "architectures", hostile), hostile)))
    write_checkpoint({"tensors": tensors}, root / "keys" / "step-1")  # no command describes what would run code
    whole = {key: {"shape": [8], "chunks": ["0:8"]} for key in tensors}
    write_checkpoint({"tensors": whole | {"w": {"shape": [9], "chunks": ["0:9"]}}}, root / "keys" / "step-2")
    for name in NAMES:
        write_checkpoint({"tensors": {name: {"shape": [8], "chunks": ["0:4"]}}}, root / name / "step-1")
        (root / name / "step-2").mkdir()
        (root / name / "step-2" / ".metadata").write_bytes(b"\x80\x02")
    return root


def assert_prints(arguments: list[str], format_: str = "error") -> str:
    """What a command writes to standard output, in a format, once that and its errors were looked at."""
    out, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(errors), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["ckptlint", *arguments])
        patch.setenv("COLUMNS", "60")
        with suppress(SystemExit):
            main()
    assert out.getvalue() or errors.getvalue()
    if out.getvalue():
        assert_harmless(out.getvalue(), format_)
    assert_harmless(errors.getvalue(), "error")
    return out.getvalue()


def assert_harmless(text: str, format_: str) -> None:
    """Fail where a name is more than text."""
    assert not [char for char in text if not char.isprintable() and char != "\n"]
    text.encode()
    own = r"::(error|warning|notice) (file=[^,:]*,line=1,)?title=[^,:]*::" if format_ == "github" else r"(?!)"
    assert not [line for line in text.splitlines() if line.lstrip().startswith("::") and not re.match(own, line)]
    assert not [line for line in text.splitlines() if COMMAND.search(re.sub(rf"^{own}", "", line))]
    if format_ == "markdown":
        tokens = MarkdownIt("gfm-like", {"linkify": False}).parse(text)
        inline = [child for token in tokens for child in token.children or ()]
        kinds = {token.type for token in [*tokens, *inline]}
        assert not kinds & {"html_block", "html_inline", "link_open", "image", "em_open", "code_block"}
        assert not MARKUP.search(" ".join(child.content for child in inline if child.type == "text"))
    elif format_ == "html":
        page = Page()
        page.feed(text)
        assert not page.found
    elif format_ in ("junit", "graphml"):
        tags = {element.tag.rpartition("}")[2] for element in ET.fromstring(text).iter()}
        assert not tags & {"script", "img", "b", "code"}
    elif format_ == "json" or (format_ in FORMATS and FORMATS[format_].syntax == "json"):
        json.loads(text)
    elif format_ == "jsonl":
        assert [json.loads(line) for line in text.splitlines()]


class Page(HTMLParser):
    """Elements and attributes that only a name could have brought."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what no page of ours has."""
        links = [value for name, value in attrs if name in ("href", "src") and re.match(r"(?!#)", value or "")]
        self.found += [tag] if tag in ("img", "iframe") else []
        self.found += [name for name, _ in attrs if name.startswith("on")]
        self.found += [link for link in links if link and "evil" in link]


@pytest.mark.sweep(share=3)
@pytest.mark.parametrize("format_", REPORTERS)
def test_check(root: Path, format_: str) -> None:
    assert_prints(["check", str(root), "--all-steps", "-v", "--max-per-rule", "0", "--format", format_], format_)


@pytest.mark.parametrize("format_", REPORTERS)
def test_watch(root: Path, format_: str) -> None:
    arguments = ["watch", str(root / SHORT["markup"]), "--once", "--interval", "0.1", "--format", format_]
    assert_prints(arguments, format_ if format_ in TEXTS | {"github", "markdown", "html"} else "text")  # a text a step


@pytest.mark.sweep
@pytest.mark.parametrize("name", NAMES)
def test_commands_on_a_run_of_that_name(root: Path, name: str) -> None:
    run, one = root / name, root / name / "step-1"
    for format_, arguments in {
        "statistics": ["check", str(run), "--statistics"],
        "text": ["latest", str(run)],
        "json": ["latest", str(run), "--format", "json"],
        "jsonl": ["watch", str(run), "--once", "--interval", "0.1", "--jsonl"],
        "error": ["show", str(run)],
    }.items():
        assert_prints(arguments, format_)
    for command, formats in {"show": ("text", "json"), "plan": ("text", "json")}.items():
        for format_ in formats:
            assert_prints([command, str(one), "--format", format_], format_)
    for missing in (["check"], ["show"], ["latest"], ["manifest"], ["plan"], ["graph", str(one)], ["explain"]):
        assert_prints([*missing, str(root / f"{name} is not there")], "error")
    assert_prints(["diff", str(one), str(root / "all" / "step-1")], "text")
    assert_prints(["rules", "--select", name], "error")
    assert_prints(["explain", name], "error")


def test_json_gives_back_what_a_build_server_would_obey(root: Path) -> None:
    key = printable(HOSTILE["build servers"])
    one, other = str(root / "keys" / "step-1"), str(root / SHORT["markup"] / "step-1")
    for arguments in (
        ["check", one, "--format", "json"],
        ["check", one, "--format", "sarif"],
        ["show", one],
        ["diff", one, other],
    ):
        format_ = [] if "--format" in arguments else ["--format", "json"]
        assert key in {*texts_in(json.loads(assert_prints([*arguments, *format_], "json")))}
    assert_prints(["deletable", str(root / "all"), "--keep", "1"], "text")
    assert_prints(["deletable", str(root / "all"), "--keep", "1", "--format", "json"], "json")


def texts_in(value: Any) -> Iterator[str]:
    """The keys and texts in the value of a JSON text."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list):
        for item in value:
            yield from texts_in(item)
    elif isinstance(value, str):
        yield value


@pytest.mark.parametrize("name", ["a ##vso[task.complete]", "::error::b", "a\x1b]8;;"])
def test_a_path_that_a_build_server_would_obey_is_not_the_answer(tmp_path: Path, name: str) -> None:
    write_checkpoint({"tensors": {"w": {"shape": [8], "chunks": ["0:8"]}}}, tmp_path / name / "step-1")
    write_checkpoint({"tensors": {"w": {"shape": [8], "chunks": ["0:8"]}}}, tmp_path / name / "step-2")
    assert assert_prints(["latest", str(tmp_path)], "text") == ""
    (run,) = json.loads(assert_prints(["latest", str(tmp_path), "--format", "json"], "json"))["runs"]
    assert run["step"]["path"] == f"{tmp_path}/{name}/step-2"
    assert assert_prints(["deletable", str(tmp_path), "--keep", "1"], "text") == ""


def test_commands_on_keys_and_files_of_those_names(root: Path, tmp_path: Path) -> None:
    one, other = root / "keys" / "step-1", root / "keys" / "step-2"
    for format_ in ("text", "json"):
        assert_prints(["show", str(one), "--format", format_], format_)
        assert_prints(["diff", str(one), str(other), "--format", format_], format_)
        assert_prints(["plan", str(one), "--format", format_, "--html", str(tmp_path / "page.html")], format_)
        assert_harmless((tmp_path / "page.html").read_text(encoding="utf-8"), "html")
        values = ["diff", str(one), str(other), "--values", "--html", str(tmp_path / "page.html")]
        assert_prints([*values, "--format", format_], format_)
        assert_harmless((tmp_path / "page.html").read_text(encoding="utf-8"), "html")
    assert_prints(["manifest", str(one)], "json")
    for (kind, name), format_ in itertools.product(KEYS.items(), GRAPHS):
        text = assert_prints(["graph", str(one), printable(f"{kind}.{name}"), "--format", format_], format_)
        assert text == assert_prints(["graph", str(one), f"{kind}.{name}", "--format", format_], format_)
        if format_ == "mermaid":
            assert not re.search(r"[<>](?!br/?>|-|\s)", text.replace("<br/>", "").replace("-->", ""))
