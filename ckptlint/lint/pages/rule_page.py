"""The page of one rule, and the table of all of them."""

from __future__ import annotations

import inspect
import json
import textwrap
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ckptlint.depth import Depth
from ckptlint.grouping import grouped
from ckptlint.lint.causes import Clause, KnownCause, fixture_of, load_causes
from ckptlint.lint.pages.fixture_cases import case_tables
from ckptlint.lint.registry import FAMILIES
from ckptlint.lint.settings.ignores import to_paste
from ckptlint.lint.settings.selection import find_rule
from ckptlint.model.text import at_most, join_words, table
from ckptlint.model.text import named_ranks as ranks_in_words
from ckptlint.rule import SECTIONS, Rule

_SHOWN = 6  # tensors of a file
_LONGEST = 200
_KINDS = {
    "absent": "a file is absent", "all short": "all files are too short", "axes": "another number of axes",
    "chunk": "two ranks wrote one chunk", "double": "a key in two files", "empty": "an empty tensor",
    "has other entries": "the rank wrote other tensors", "inside": "bytes inside a file",
    "lacking": "keys that no file holds", "list": "two lists under one name", "no entry": "the rank wrote nothing",
    "numbers": "numbered files are absent", "object": "two ranks wrote one object",
    "one stage": "layers of one stage", "part": "one rank's part", "part of another": "another rank's part",
    "records": "bytes as long as a record", "shapeless": "a tensor without a shape",
    "short": "something is too short", "size": "another size", "stages": "stages that number layers from 0",
    "steps": "files at other steps", "times": "files younger than the metadata",
    "total": "another total size", "unlisted": "keys that the index lacks", "whole file": "a whole file",
    "written twice": "experts written twice",
}  # fmt: skip
"""Kinds of findings (`Finding.kind`) that causes ask for, in words."""


def page_of(rules: Sequence[Rule], name: str, width: int = 80) -> str:
    """The page of the rule or the cause of this name or code; raises ConfigError where there is none."""
    causes = {known.name: known for known in load_causes()}
    if cause := causes.get(name.lower()):
        return cause_page(cause, width)
    rule = find_rule(rules, name, causes)
    if rule.fixed or rule.live:
        return page(rule, width)
    lines = ["", "To ignore it for a key or a file, with the reason, in ckptlint.toml:", ""]
    return "\n".join([page(rule, width), *lines, *to_paste("KEY", rule.code)])


def page(rule: Rule, width: int = 80) -> str:
    """The rule's docstring as a page of text."""
    lines = [f"{rule.code} {rule.name}", f"{rule.severity.label}, needs {_needs(rule, '--depth ')}", ""]
    lines += textwrap.wrap(rule.summary, width)
    for heading in SECTIONS:
        lines += _section(heading, rule.section(heading), width)
    if options := rule.options:
        lines += ["", f"Options, to set in ckptlint.toml under [rules.{rule.name}]:"]
        lines += [f"  {name} = {json.dumps(value)}" for name, value in options.items()]
    # rules and fixtures lie beside each other, in the package as in a clone
    cases = _cases(Path(inspect.getfile(rule.check)).parent.parent / "fixtures" / f"{rule.code}.toml")
    for heading, is_bad in (("Bad", True), ("Good", False)):
        lines += _example(heading, [case for case in cases if bool(case.get("expect")) == is_bad], width)
    return "\n".join(lines)


def _section(heading: str, text: str, width: int) -> list[str]:
    wrapped = textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="  ")
    return ["", f"{heading}:", *wrapped] if text else []


def cause_page(known: KnownCause, width: int = 80) -> str:
    """What speaks for a cause, how it comes about, what to do, and an example, as a page of text."""
    lines = [known.name, "a cause: a report names it above the findings that it explains", ""]
    lines += textwrap.wrap(known.summary, width)
    sections = {
        "What speaks for it": [in_words(clause) for clause in (*known.find.values(), *known.also.values())],
        "What speaks against it": [in_words(clause) for clause in known.never.values()],
        "How it comes about": [known.why],
        "What to do": [known.do],
        "See": [known.see],
    }
    for heading, texts in sections.items():
        lines += _section(heading, "; ".join(texts), width)
    return "\n".join([*lines, *_example("Bad", _cases(fixture_of(known))[:1], width)])


def in_words(clause: Clause) -> str:
    """A clause of a cause, as its page says it.

    >>> in_words(Clause(("GEO004", "PAY001"), same=("keys",))), in_words(Clause(("PAY006",), ("inside",), least=2))
    ('GEO004 or PAY001 on the same keys', '2 or more findings of PAY006 (bytes inside a file)')
    """
    text = " or ".join(clause.codes)
    text = f"{clause.least} or more findings of {text}" if clause.least > 1 else text
    text += f" ({join_words(kinds, 'or')})" if (kinds := [_KINDS[kind] for kind in clause.kinds if kind]) else ""
    text += f" on the same {' and '.join(clause.same)}" if clause.same else ""
    return text + (f" on other {' and '.join(clause.other)}" if clause.other else "")


def _needs(rule: Rule, option: str = "") -> str:
    return "a running job" if rule.live else f"{option}{rule.depth}{', --expect' * rule.expects}"


def _example(heading: str, cases: Sequence[dict[str, Any]], width: int) -> Iterator[str]:
    """The first of these cases."""
    for case in cases[:1]:
        yield from ("", f"{heading}: {case['name']}")
        for line in _facts(case):
            yield from textwrap.wrap(line, width, initial_indent="  ", subsequent_indent="    ")


@cache  # a SARIF report has the pages of all rules
def _cases(fixture: Path) -> list[dict[str, Any]]:
    return case_tables(fixture) if fixture.is_file() else []


def _facts(case: dict[str, Any]) -> Iterator[str]:
    """What a case of a fixture holds, a line for each thing, as the page of its rule shows it."""
    for fqn, tensor in case.get("tensors", {}).items():
        chunks = " | ".join(tensor["chunks"]) if "chunks" in tensor else "whole"
        yield f"{fqn} {tensor.get('dtype', 'float32')} {tensor['shape']}: {chunks or 'no chunk'}"
    for fqn, tensor in case.get("reference", {}).items():
        yield f"expected: {fqn} {tensor.get('dtype', 'float32')} {tensor.get('shape', 'of any shape')}"
    for item in case.get("rank_chunks", ()):
        what = f"{item.get('dtype', 'float32') or 'object'} {item['shape']}: {item.get('chunk', 'whole')}"
        what += f", copy {item['replica']}" if item.get("replica", 0) > 0 else ""
        what += f", contents {item['digest']}" if "digest" in item else ""
        verb = "hold" if len(item["ranks"]) > 1 else "holds"
        yield f"{ranks_in_words(item['ranks'])} {verb} {item['fqn']} {what}"
    yield from (f"said: {finding['text'].replace('{of}', '')}" for finding in case.get("rank_findings", ()))
    for name in ("objects", "bytes", "unstored"):
        yield from (f"{fqn}: {name}" for fqn in case.get(name, ()))
    yield from (f"{fqn} is filed under {place}" for fqn, place in case.get("stray", {}).items())
    for rank, items in enumerate(case.get("plans", ())):
        named = (item if isinstance(item, str) else f"{item['fqn']} {item.get('chunk', '')}" for item in items)
        yield f"rank {rank} plans " + ", ".join(named)
    for name, values in case.get("torch", {}).items():
        yield f"{name}: " + ", ".join(_leaves(values))
    yield from (f"{name}: {size}" for name, size in case.get("files", {}).items())
    for name, file in case.get("safetensors", {}).items():
        tensors = [f"{fqn} {t.get('dtype', 'float32')} {t['shape']}" for fqn, t in file.get("tensors", {}).items()]
        yield from (f"{name}: {line}" for line in at_most(tensors, _SHOWN, before="and "))
    for name, content in case.get("raw", {}).items():
        text = " ".join(content.split())
        text = text if text.isprintable() else repr(content)
        yield f"{name}: {text[:_LONGEST]}{' ...' if len(text) > _LONGEST else ''}"


def _leaves(value: Any, path: str = "") -> Iterator[str]:
    """What a torch file holds: places and values."""
    if isinstance(value, dict) and "tensor" in value:
        yield f"{path} {value['tensor']}"
    elif isinstance(value, dict):
        for key, item in (value["state"] if "class" in value else value).items():
            yield from _leaves(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        for number, item in enumerate(value):
            yield from _leaves(item, f"{path}.{number}")
    else:
        yield f"{path} = {value}"


def catalogue(rules: Sequence[Rule], format_: str, width: int = 80) -> str:
    """All rules as a list by family, as a table in Markdown, or as JSON."""
    if format_ == "json":
        rows = []
        for rule in rules:
            row = {"code": rule.code, "name": rule.name, "severity": rule.severity.label}
            needs = {"needs": "live" if rule.live else rule.depth, "default": not (rule.expects or rule.live)}
            rows.append(row | needs | {"summary": rule.summary})
        return json.dumps(rows, indent=2)
    if format_ == "table":
        return "\n".join(_listing(rules, width))
    heads = ("code", "name", "severity", "depth", "finds")
    cells = [(rule.code, rule.name, rule.severity.label, _needs(rule), rule.summary) for rule in rules]
    return table(cells, heads, tablefmt="github")


_RUNNING = "what the ranks of a running job hold: needs ckptlint.live or SaveLint there"


def _listing(rules: Sequence[Rule], width: int) -> Iterator[str]:
    """A row for each rule, wrapped to the width, by family; those of live mode come last.

    The depth stands beside the severity where it is more than the one that `check` reads by default.
    """
    families = grouped(((rule.live, rule.code[:3]), rule) for rule in rules)
    for (is_live, family), members in sorted(families.items(), key=lambda item: (item[0][1] == "LIV", item[0])):
        yield f"{family}  {_RUNNING if is_live else FAMILIES.get(family, 'of a plug-in')}"
        marks = [_mark(rule) for rule in members]
        name_width, mark_width = max(len(rule.name) for rule in members), max(map(len, marks))
        for rule, mark in zip(members, marks, strict=True):
            yield _row(f"  {rule.code}  {rule.name:{name_width}}  {mark:{mark_width}}  ", rule.summary, width)
        yield ""


def _row(line: str, text: str, width: int) -> str:
    """The text behind the beginning of a line, wrapped beside it."""
    room, indent = max(width, len(line) + 12), " " * len(line)
    return textwrap.fill(text, room, initial_indent=line, subsequent_indent=indent, break_on_hyphens=False)


def cause_listing(width: int) -> str:
    """The causes, each with what it says of itself."""
    known = load_causes()
    name_width = max(len(cause.name) for cause in known)
    rows = [_row(f"  {cause.name:{name_width}}  ", cause.summary, width) for cause in known]
    return "\n".join(["Causes, which a report names above the findings that they explain", *rows])


def _mark(rule: Rule) -> str:
    """The severity, and what `check` must be given so that the rule runs."""
    needs = "--expect" if rule.expects else "" if rule.live or Depth.FILES.reaches(rule.depth) else rule.depth
    return f"{rule.severity.label}, {needs}" if needs else rule.severity.label
