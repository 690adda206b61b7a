"""Writes the generated pages: `docs/rules/`, what the commands of three pages print, and the picture of the README.

It also writes `tests/rules/messages.txt`: every sentence that a user can meet, to be read from top to bottom.

Run it from anywhere. With codes of rules it writes their pages and sentences alone, in seconds; the whole takes half a
minute.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory

import click

import ckptlint
from ckptlint import sandbox
from ckptlint.commands.main import cli, command
from ckptlint.depth import Depth
from ckptlint.lint.causes import KnownCause, fixture_of, load_causes, with_causes
from ckptlint.lint.engine import run_rules
from ckptlint.lint.pages.rule_page import catalogue, in_words, page
from ckptlint.lint.registry import FAMILIES, load_rules
from ckptlint.lint.report import CheckpointReport
from ckptlint.reporters import full
from ckptlint.reporters.style import Style
from ckptlint.rule import Rule
from ckptlint.testing import fixture_cases, open_case, read_cases, run_case

DOCS = Path(__file__).parent
MESSAGES = DOCS.parent / "tests" / "rules" / "messages.txt"
_SOURCES = DOCS.parent / "ckptlint"
_DATA = {
    "mesh",
    "keys",
    "tensors",
    "bytes",
    "modules",
    "chunks",
    "record",
    "parameter",
    "parameters",
    "expected",
    "sizes",
}
_DATA |= {
    "stored",
    "siblings",
    "fields",
    "copies",
    "rows",
    "dtypes",
    "plan",
    "starts",
    "source",
    "held",
    "grid",
    "ratio",
}
_PLACE = re.compile(r"/\S+/(?=case-)")
_FOR_AUTHORS = ("testing", "vocabulary", "pickles")
_VARIES = re.compile(r"\d+|[^\s,:;()]*[\w\]][._/\[][\w\[][^\s,:;()]*")
_UNWRAPPED = 10_000
_CONSOLE = re.compile(r"```console\n\$ (ckptlint [^\n]*fixtures/[^\n]*)\n.*?```", re.DOTALL)
_MERMAID = re.compile(r"\n\n```mermaid\n.*?```", re.DOTALL)
_SECONDS = re.compile(r"\d+\.\d+ s\b")
_SLOWEST = re.compile(r"\n *slowest: .*")
_SCENE = re.compile(r"(<!-- run\n(.*?)-->\n```console\n)(.*?)```", re.DOTALL)
_FILE = re.compile(r"^```\w+\n# ([\w.]+\.(?:py|toml))\n(.*?)^```", re.DOTALL | re.MULTILINE)
_DATE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d")
_COUNTS = (  # a number of rules, or a list of them, would change a page with each new rule
    (re.compile(r"\b\d+ rules\b"), "N rules"),
    (re.compile(r"\b\d+(?=\s+did\s+not\s+apply)"), "N"),
    (re.compile(r"(--depth\s+\w+) \d+\b"), r"\1 N"),
    (re.compile(r"\n  (?:not run|did not apply):.*\n(?:  .*\n)*"), "\n  ...\n"),
)
_BLIND = re.compile(r"(<!-- made from tests/loaders/cannot.toml -->)\n.*?(<!-- end -->)", re.DOTALL)
_WAY = re.compile(r"(<!-- what a check calls -->\n).*?(<!-- end -->)", re.DOTALL)
_CALLS = DOCS / "way_of_a_check.py"
_PASSING = "fixtures/real/fsdp2_4r"
_PICTURED = "fixtures/real/fsdp2_4r_hole"
_COLUMN, _LINE = 8.4, 19
_COLOUR = re.compile(r"\x1b\[([0-9;]*)m")
_COLOURS = {"31;1": "error", "33;1": "warning", "36": "info", "32": "good", "1": "bold"}
_SVG_STYLE = """\
text { font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: #d7dce2;
  white-space: pre }
.error { fill: #ff8a7a; font-weight: bold } .warning { fill: #f0b452; font-weight: bold } .info { fill: #7db7f5 }
.good { fill: #6fce93 } .bold { fill: #ffffff; font-weight: bold }"""
_DAMAGES = {
    "missing": "a lost file",
    "swapped": "two files that exchanged their names",
    "of an older save": "a file of an older save, of the same size",
    "zeroed": "an end of zeros",
    "bit in the data": "a flipped bit in a tensor, even at depth data",
}
_CAUSES = """\
Several findings often have one cause. Where ckptlint knows it, the report begins with it and lists the findings that it
explains in one line each; `--verbose` shows them in full, and JSON has `causes` besides. A cause is a file of
`rules/causes/`: the codes that must be found, what these findings share (keys, files, ranks), and what must not be
found. It is said where at least two findings speak for it. Where two causes claim one finding, neither is said: no
cause is better than a wrong one. `ckptlint explain NAME` prints one of these. This page is made by `docs/make.py`.
"""


def pages() -> dict[Path, str]:
    """Every generated page with its text."""
    rules = load_rules()
    found = {DOCS / "rules" / f"{family}.md": family_page(family, rules) for family in FAMILIES}
    found[DOCS / "rules" / "README.md"] = rule_list(rules)
    found[DOCS / "causes.md"] = cause_list()
    found[DOCS / "limits.md"] = _BLIND.sub(_cannot, (DOCS / "limits.md").read_text(encoding="utf-8"))
    found[DOCS / "design.md"] = _WAY.sub(_way, (DOCS / "design.md").read_text(encoding="utf-8"))
    for name in ("tour.md", "questions.md", "gates.md"):
        print(f"docs/{name}: runs its commands", file=sys.stderr)  # noqa: T201
        found[DOCS / name] = played(printed((DOCS / name).read_text(encoding="utf-8")))
    found[DOCS / "finding.svg"] = finding_picture()
    return found


def _way(found: re.Match[str]) -> str:
    """Which modules a check enters, in their order and below their callers."""
    done = subprocess.run([sys.executable, _CALLS], cwd=DOCS.parent, capture_output=True, encoding="utf-8", check=True)  # noqa: S603
    return f"{found[1]}\n```text\n{done.stdout.rstrip()}\n```\n\n{found[2]}"


def _cannot(found: re.Match[str]) -> str:
    """What the tests of each layout say that it cannot tell, as a table."""
    with (DOCS.parent / "tests" / "loaders" / "cannot.toml").open("rb") as file:
        layouts = tomllib.load(file)
    rows = []
    for own in layouts.values():
        for entry in own["cannot"]:
            files = " of " + ", ".join(f"`{name}`" for name in entry["files"]) if "files" in entry else ""
            rows.append(f"| {own['title']} | {_DAMAGES[entry['damage']]}{files} | {entry['why']} |")
    return "\n".join([found[1], "", "| layout | passes | why |", "|---|---|---|", *rows, "", found[2]])


def family_page(family: str, rules: Sequence[Rule]) -> str:
    """The rules of a family on one page, each below a heading that `#code-name` leads to."""
    own = [rule for rule in rules if rule.code.startswith(family)]
    about = "`ckptlint explain CODE` prints one of these. `docs/make.py` makes this page."
    return "\n".join([f"# {family}: {FAMILIES[family]}\n\n{about}\n", *map(rule_section, own)])


def rule_section(rule: Rule) -> str:
    """The page of `ckptlint explain` as Markdown: sections begin with their names, examples are blocks."""
    title, about, _, *lines = page(rule, _UNWRAPPED).splitlines()
    text = [f"## {title}", "", f"{about[0].upper()}{about[1:]}.", ""]
    is_example, heading = False, ""
    for line in lines:
        if is_example and line.startswith("  "):
            text.append(line.removeprefix("  "))
            continue
        if is_example:
            text.append("```")
        if example := re.match(r"(Bad|Good): (.*)", line):
            text += [f"**{example[1]}:** {_plain(example[2])}", "", "```text"]
        elif re.fullmatch(r"[A-Z][\w ]*:", line):
            heading = f"**{line[:-1]}.** "
        else:
            text.append(heading + _plain(line.strip()))
            heading = ""
        is_example = example is not None
    return "\n".join([*text, "```"] if is_example else text).rstrip() + "\n"


def _plain(text: str) -> str:
    """The text with what means something to Markdown escaped, but for what stands between backticks."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"([*_<>\[\]|])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)


def rule_list(rules: tuple[Rule, ...]) -> str:
    """All rules in a table for each family, each linked to its place."""
    text = "# Rules\n\nOne page per family, made from the docstrings and fixtures of its rules by `docs/make.py`.\n"
    for family, about in FAMILIES.items():
        own = [rule for rule in rules if rule.code.startswith(family)]
        about = f"running jobs; {about}" if any(rule.live for rule in own) else about
        text += f"\n## {family}: {about}\n\n{catalogue(own, 'markdown')}\n"
    return re.sub(r"^\| (([A-Z]{3})\d{3}) +\| ([\w-]+)", _linked, text, flags=re.MULTILINE)


def _linked(row: re.Match[str]) -> str:
    return f"| [{row[1]}]({row[2]}.md#{row[1].lower()}-{row[3]}) | {row[3]}"


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
        return "\n".join(line for cause in report.causes for line in full.cause_block(report, cause, Style()))


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
    output = _settled(done.stdout + done.stderr).rstrip()
    block = f"```console\n$ {command}\n{output}\n```"
    return f"{block}\n\n```mermaid\n{_settled(done.stdout).rstrip()}\n```" if "--format mermaid" in command else block


def played(text: str) -> str:
    """A page with what the commands below each `<!-- run` comment print now.

    The comment is a script that sets a folder up for them, with `$REAL` for `fixtures/real`; blocks of the page that
    begin with `# name.py` or `# name.toml` are files in it. All files there are two hours old.
    """
    files = dict(_FILE.findall(text))
    return _SCENE.sub(lambda match: f"{match[1]}{_played(match[2], match[3], files)}```", text)


def _played(setup: str, block: str, files: Mapping[str, str]) -> str:
    commands = re.findall(r"^\$ (.*)", block, re.MULTILINE)
    with tempfile.TemporaryDirectory() as work:
        folder, tools = Path(work, "work"), Path(work, "bin")
        folder.mkdir()
        tools.mkdir()
        for name, module in (("ckptlint", "ckptlint"), ("torchrun", "torch.distributed.run")):
            (tools / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -P -m {module} "$@"\n')
            (tools / name).chmod(0o755)
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("CKPTLINT_", "NO_COLOR", "FORCE_COLOR"))}
        clean |= {"PATH": os.pathsep.join((str(tools), clean["PATH"]))}
        clean |= {"PYTHONPATH": str(DOCS.parent), "PYTHONIOENCODING": "utf-8", "COLUMNS": "80"}
        clean |= {"OMP_NUM_THREADS": "1", "REAL": str(DOCS.parent / "fixtures" / "real")}

        def shell(script: str) -> str:
            done = subprocess.run(  # noqa: S603  the commands stand in this repository
                ["bash", "-c", f"exec 2>&1\n{script}"],  # noqa: S607
                cwd=folder,
                env=clean,
                capture_output=True,
                encoding="utf-8",
                check=False,
            )
            return done.stdout

        assert not (said := shell(f"set -e\n{setup}")), said
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
        written = time.time() - 7200
        for path in folder.rglob("*"):
            os.utime(path, (written, written))
        shown = [f"$ {command}\n{_settled(shell(command))}".rstrip() + "\n" for command in commands]
    return "\n".join(shown)


def _settled(output: str) -> str:
    """What a command printed, without what changes by itself or with the catalogue."""
    output = _DATE.sub("2026-11-22 09:00", _SECONDS.sub("0.05 s", _SLOWEST.sub("", output)))
    for number, text in _COUNTS:
        output = number.sub(text, output)
    return output


def finding_picture() -> str:
    """A pass and a finding as a terminal shows them, as SVG, without what changes: time and number of rules."""
    style, text = Style(color=True, ascii_only=False, width=80), ""
    for path in (_PASSING, _PICTURED):
        report = replace(ckptlint.check(DOCS.parent / path), seconds=0.1)
        text += f"\x1b[32m$\x1b[0m ckptlint {path}\n{full.render(report, style)}\n"
    return _terminal(re.sub(r"\d+ rules ran", "N rules ran", text.replace(f"{DOCS.parent.as_posix()}/", "")))


def _terminal(text: str) -> str:
    """Text with colour codes as the picture of a terminal; each run of one colour stands at its own column."""
    lines = text.rstrip("\n").split("\n")
    width = round(max(len(_COLOUR.sub("", line)) for line in lines) * _COLUMN) + 48
    height = len(lines) * _LINE + 58
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f"<title>ckptlint {_PICTURED}</title><style>{_SVG_STYLE}</style>",
        f'<rect width="{width}" height="{height}" rx="10" fill="#14181d"/>',
        *(f'<circle cx="{22 + 18 * i}" cy="20" r="5.5" fill="#3a424c"/>' for i in range(3)),
    ]
    for number, line in enumerate(lines):
        column, kind = 0, ""
        for i, run in enumerate(_COLOUR.split(line)):
            if i % 2:
                kind = _COLOURS.get(run, "")
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


def messages() -> str:
    """What the rules say about all cases, what `--help` prints, and the errors: what tests compare part by part."""
    print("tests/rules/messages.txt: judges all cases", file=sys.stderr)  # noqa: T201
    return "\n".join([*sentences_of(()).values(), help_texts(), error_texts()])


def sentences_of(codes: Collection[str]) -> dict[str, str]:
    """The sentences of these rules (all without any) about their cases, by code."""
    rules = {rule.code: rule for rule in load_rules()}
    reports: dict[str, list[CheckpointReport]] = {}
    sandbox.in_children = False  # of our own cases; a child for each takes five times as long
    with TemporaryDirectory() as work:
        for number, (code, case) in enumerate(fixture_cases(DOCS.parent / "fixtures")):
            if not codes or code in codes:
                (folder := Path(work, str(number))).mkdir()
                reports.setdefault(code, []).append(run_case(rules[code], case, folder / "case"))
    return {code: sentences(code, of_code) for code, of_code in reports.items()}


def of_rules(codes: Sequence[str]) -> dict[Path, str]:
    """The pages that show these rules, and all sentences, of which theirs are new."""
    rules = load_rules()
    if unknown := sorted({*codes} - {rule.code for rule in rules}):
        sys.exit(f"no rule has the code {unknown[0]}")
    made = {DOCS / "rules" / f"{code[:3]}.md": family_page(code[:3], rules) for code in codes}
    said = MESSAGES.read_text(encoding="utf-8").split("\n# ")
    by_head = {part.partition("\n")[0].removeprefix("# "): part for part in said}
    by_head |= {code: text.removeprefix("# ").rstrip("\n") + "\n" for code, text in sentences_of(codes).items()}
    order = [rule.code for rule in rules] + ["help", "errors"]
    text = "\n# ".join(by_head[head].removeprefix("# ") for head in order if head in by_head)
    return made | {DOCS / "rules" / "README.md": rule_list(rules), MESSAGES: f"# {text}"}


def sentences(code: str, reports: Iterable[CheckpointReport]) -> str:
    """Each sentence of a rule once, in the order of its cases; names and numbers make no other sentence."""
    lines, seen = [f"# {code}\n"], set()
    for item in (item for report in reports for item in report.diagnostics if item.code == code):
        for label, text in ((item.severity.label, item.title), ("why", item.why), *item.all_notes()):
            text = _PLACE.sub("", text)
            key = _VARIES.sub("0", text)
            if text and label not in _DATA and key not in seen:
                lines.append(f"{label}: {text}\n")
            seen.add(key)
    return "".join(lines)


def help_texts() -> str:
    """What `--help` says about each option and command, unwrapped."""
    lines = ["# help\n"]
    for name, shown in [("ckptlint", cli), *((name, command(name)) for name in sorted(cli.commands))]:
        lines.append(f"{name}: {' '.join((shown.help or '').split())}\n")
        options = [param for param in shown.params if isinstance(param, click.Option)]
        helps = [f"    {option.opts[-1]}: {' '.join(option.help.split())}\n" for option in options if option.help]
        lines += [line for line in helps if line not in lines]
    return "".join(lines)


def error_texts() -> str:
    """The sentences of the errors and problems that each module raises, with `{}` for what they fill in."""
    lines = ["# errors\n"]
    for path in sorted(_SOURCES.rglob("*.py")):
        if set(_FOR_AUTHORS) & set(path.parts):
            continue
        nodes = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
        named = _named(nodes)
        calls = [node for node in nodes if isinstance(node, ast.Call)]
        raised = [call for call in calls if re.search(r"Error$|^Problem$|^NotApplicable$", _called(call))]
        texts = [text for call in raised for text in _texts(call, named) if " " in text]
        lines += [f"{path.relative_to(_SOURCES).as_posix()}: {text}\n" for text in dict.fromkeys(texts)]
    return "".join(lines)


def _named(nodes: Iterable[ast.AST]) -> dict[str, list[ast.expr]]:
    """Name -> what a module gives it, in whichever function."""
    named = defaultdict(list)
    for node in nodes:
        for target in node.targets if isinstance(node, ast.Assign) else ():
            several = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
            for name, value in zip(target.elts, node.value.elts, strict=False) if several else [(target, node.value)]:
                if isinstance(name, ast.Name):
                    named[name.id].append(value)
    return named


def _called(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")


def _texts(call: ast.Call, named: Mapping[str, list[ast.expr]]) -> Iterator[str]:
    """The literal arguments of a call, and those that have a name."""
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    for value in (value for argument in arguments for value in named.get(getattr(argument, "id", ""), [argument])):
        parts = value.values if isinstance(value, ast.JoinedStr) else [value]
        texts = [str(part.value) if isinstance(part, ast.Constant) else "{}" for part in parts]
        yield " ".join("".join(texts).split())


def write(made: Mapping[Path, str]) -> None:
    """Write pages."""
    for path, text in made.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


def remove_others(made: Mapping[Path, str], docs: Path = DOCS) -> None:
    """Remove the pages of families that are gone."""
    for path in (docs / "rules").glob("*.md"):
        if path not in made:
            path.unlink()


if __name__ == "__main__":
    if sys.argv[1:]:
        write(of_rules(sys.argv[1:]))
    else:
        write(made := pages() | {MESSAGES: messages()})
        remove_others(made)
