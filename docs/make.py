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
from tempfile import TemporaryDirectory

from ckptlint.depth import Depth
from ckptlint.lint.causes import KnownCause, fixture_of, load_causes, with_causes
from ckptlint.lint.engine import run_rules
from ckptlint.lint.registry import load_rules
from ckptlint.lint.rule_page import catalogue, in_words, page
from ckptlint.reporters.full import cause_block
from ckptlint.reporters.style import Style
from ckptlint.rule import Rule
from ckptlint.testing import open_case, read_cases

DOCS = Path(__file__).parent
_UNWRAPPED = 10_000
_CONSOLE = re.compile(r"```console\n\$ (ckptlint [^\n]*fixtures/[^\n]*)\n.*?```", re.DOTALL)
_MERMAID = re.compile(r"\n\n```mermaid\n.*?```", re.DOTALL)
_SECONDS = re.compile(r"\d+\.\d+ s\b")
_SLOWEST = re.compile(r"\n  slowest: .*")
_CAUSES = """\
Several findings often have one cause. Where ckptlint knows it, the report begins with it and lists the findings that it
explains in one line each; `--verbose` shows them in full, and JSON has `causes` besides. A cause is a file of
`rules/causes/`: the codes that must be found, what these findings share (keys, files, ranks), and what must not be
found. It is said where at least two findings speak for it. Where two causes claim one finding, neither is said: no
cause is better than a wrong one. `ckptlint explain NAME` prints one of these. This page is made by `docs/make.py`.
"""
_COUNT = re.compile(r"\b(\d+ of )?\d+ rules\b")  # a number of rules on a page would change with each new rule


def pages() -> dict[Path, str]:
    """Every generated page with its text."""
    rules = load_rules()
    found = {DOCS / "rules" / f"{rule.code}.md": rule_page(rule) for rule in rules}
    found[DOCS / "rules" / "README.md"] = rule_list(rules)
    found[DOCS / "causes.md"] = cause_list()
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


def cause_list() -> str:
    """All causes on one page, each with the beginning of a report."""
    text = ["# Causes\n", _CAUSES]
    for known in load_causes():
        speaks = "; ".join(map(in_words, (*known.find.values(), *known.also.values())))
        against = "; ".join(map(in_words, known.never.values()))
        text += [
            f"## {known.name}\n",
            f"{known.summary} {known.why}\n",
            f"- Speaks for it: {speaks}.",
            *([f"- Speaks against it: {against}."] if against else []),
            f"- What to do: {known.do}.",
            f"- Seen in: {known.see}.\n",
            f"```text\n{_beginning(known)}\n```\n",
        ]
    return "\n".join(text)


def _beginning(known: KnownCause) -> str:
    """How a report on the first case of the cause begins."""
    case = read_cases(fixture_of(known))[0]
    depth = Depth(case.table.get("depth", "files"))
    with TemporaryDirectory() as folder:
        report = with_causes(run_rules(open_case(case, Path(folder) / "case", depth), load_rules(), depth))
        return "\n".join(line for cause in report.causes for line in cause_block(report, cause, Style()))


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
    output = _COUNT.sub("... rules", output).replace("All ... rules", "All rules")
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
