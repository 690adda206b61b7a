"""Writes the generated pages: `docs/rules/`, and what the commands of the tour and the recipes print.

Run it from anywhere.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from ckptlint.lint.registry import load_rules
from ckptlint.lint.rule_page import catalogue, page
from ckptlint.rule import Rule

DOCS = Path(__file__).parent
_UNWRAPPED = 10_000
_CONSOLE = re.compile(r"```console\n\$ (ckptlint [^\n]*fixtures/[^\n]*)\n.*?```", re.DOTALL)
_MERMAID = re.compile(r"\n\n```mermaid\n.*?```", re.DOTALL)
_SECONDS = re.compile(r"\d+\.\d+ s\b")
_SLOWEST = re.compile(r"\nslowest: .*")
_COUNTS = (  # a number of rules, or a list of them, would change a page with each new rule
    (re.compile(r"\b\d+ rules\b"), "N rules"),
    (re.compile(r"\b\d+ had nothing(?=\s+to\s+judge)"), "N had nothing"),
    (re.compile(r"(--depth\s+\w+) \d+\b"), r"\1 N"),
    (re.compile(r"\n  (?:not run|nothing to judge):.*\n(?:  .*\n)*"), "\n  ...\n"),
)


def pages() -> dict[Path, str]:
    """Every generated page with its text."""
    rules = load_rules()
    found = {DOCS / "rules" / f"{rule.code}.md": rule_page(rule) for rule in rules}
    found[DOCS / "rules" / "README.md"] = rule_list(rules)
    for name in ("tour.md", "recipes.md"):
        found[DOCS / name] = printed((DOCS / name).read_text(encoding="utf-8"))
    return found


def rule_page(rule: Rule) -> str:
    """The page of `ckptlint explain` as Markdown: sections become headings, examples blocks."""
    title, about, _, *lines = page(rule, _UNWRAPPED).splitlines()
    text = [f"# {title}", "", f"{about}. `ckptlint explain {rule.code}` prints this page.", ""]
    is_example = False
    for line in lines:
        if is_example and line.startswith("  "):
            text.append(line.removeprefix("  "))
            continue
        if is_example:
            text.append("```")
        if example := re.match(r"(Bad|Good): (.*)", line):
            text += [f"**{example[1]}:** {_plain(example[2])}", "", "```text"]
        else:
            text.append(f"## {line[:-1]}\n" if re.fullmatch(r"[A-Z][\w ]*:", line) else _plain(line.strip()))
        is_example = example is not None
    return "\n".join([*text, "```"] if is_example else text).rstrip() + "\n"


def _plain(text: str) -> str:
    """The text with what means something to Markdown escaped, but for what stands between backticks."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"([*_<>\[\]|])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)


def rule_list(rules: tuple[Rule, ...]) -> str:
    """All rules in a table, each linked to its page."""
    table = catalogue(rules, "markdown")
    for rule in rules:
        table = table.replace(f"| {rule.code} ", f"| [{rule.code}]({rule.code}.md) ", 1)
    return f"# Rules\n\nOne page per rule, made from its docstring and its fixture by `docs/make.py`.\n\n{table}\n"


def printed(text: str) -> str:
    """A page with what its commands print now; a graph for mermaid is drawn below its text."""
    return _CONSOLE.sub(_printed, _MERMAID.sub("", text))


def _printed(match: re.Match[str]) -> str:
    command = match[1]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("CKPTLINT_", "NO_COLOR", "FORCE_COLOR"))}
    done = subprocess.run(  # noqa: S603  the commands stand in this repository
        [sys.executable, "-m", "ckptlint", *shlex.split(command)[1:]],
        cwd=DOCS.parent,
        env=clean | {"COLUMNS": "80", "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    output = _SECONDS.sub("0.05 s", _SLOWEST.sub("", done.stdout + done.stderr)).rstrip()
    for number, text in _COUNTS:
        output = number.sub(text, output)
    block = f"```console\n$ {command}\n{output}\n```"
    return f"{block}\n\n```mermaid\n{output}\n```" if "--format mermaid" in command else block


def write(made: Mapping[Path, str], docs: Path = DOCS) -> None:
    """Write every generated page, and remove the pages of rules that are gone."""
    for path, text in made.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for path in (docs / "rules").glob("*.md"):
        if path not in made:
            path.unlink()


if __name__ == "__main__":
    write(pages())
