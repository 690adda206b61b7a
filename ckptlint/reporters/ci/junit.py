"""The `junit` format: a test suite per checkpoint, a test case per rule that ran, a property per rule that did not."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections import Counter

from ckptlint.lint.report import CheckpointReport, FindingGroup, Report
from ckptlint.model.text import plural
from ckptlint.patterns import lazy_pattern
from ckptlint.reporters.full import block
from ckptlint.reporters.json_report import sampled
from ckptlint.reporters.style import Style
from ckptlint.rule import Rule

_FORBIDDEN = lazy_pattern("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def render(report: Report, style: Style) -> str:
    """Failed are the rules whose findings make the run fail; findings below that are the output of a passed case.

    Source: The elements that Jenkins and GitLab read: testsuites, testsuite, testcase, failure, error, skipped,
    system-out.
    """
    root = ET.Element("testsuites", name="ckptlint")
    for part in report.checkpoints:
        suite = ET.SubElement(
            root, "testsuite", name=_legal(part.checkpoint.path), time=_time(sum(part.seconds.values()))
        )
        ran = f"{report.rule_counts_of(part).ran:,}"
        entries = [("depth", report.depth), ("sample", sampled(report) or "all"), ("rules that ran", ran)]
        entries += [("settings", report.settings)] if report.settings else []
        entries += [("not known", sentence) for sentence in part.checkpoint.not_looked_at]
        entries += [("cause", f"{cause.sentence}; {cause.do}") for cause in part.causes]
        entries += [(f"not run: {code}", reason) for code, reason in part.silent.items()]
        properties = ET.SubElement(suite, "properties")
        for name, value in entries:
            ET.SubElement(properties, "property", name=name, value=_legal(value))
        for rule in report.rules:
            if rule.code not in part.silent:
                _case(suite, report, part, rule, style)
    if report.unread:
        suite = ET.SubElement(root, "testsuite", name="not read", time=_time(0))
        for sentence in report.unread:
            case = ET.SubElement(suite, "testcase", classname="ckptlint", name=_legal(sentence), time=_time(0))
            ET.SubElement(case, "error", message=_legal(sentence), type="unread")
    for suite in root:
        _count(suite, [suite])
    _count(root, list(root))
    root.set("time", _time(report.seconds))
    ET.indent(root)
    xml = ET.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{xml}\n'


def _case(suite: ET.Element, report: Report, part: CheckpointReport, rule: Rule, style: Style) -> None:
    name, seconds = f"{rule.code} {rule.name}", part.seconds.get(rule.code, 0)
    case = ET.SubElement(suite, "testcase", classname=f"ckptlint.{rule.code[:3]}", name=name, time=_time(seconds))
    groups = [group for group in part.groups if group.lead.code == rule.code]
    failing = [group for group in groups if report.is_failing(group.lead)]
    if rule.code in part.failed:
        _say(case, "error", f"the rule did not finish: {part.failed[rule.code]}", "crash")
    elif failing:
        more = f" (and {plural(len(failing) - 1, 'more problem')})" if len(failing) > 1 else ""
        text = _say(case, "failure", failing[0].lead.title + more, failing[0].lead.severity.label)
        text.text = _text(part, failing, style)
    if others := [group for group in groups if group not in failing]:
        ET.SubElement(case, "system-out").text = _text(part, others, style)


def _say(case: ET.Element, tag: str, message: str, kind: str) -> ET.Element:
    return ET.SubElement(case, tag, message=_legal(message), type=kind)


def _text(part: CheckpointReport, groups: list[FindingGroup], style: Style) -> str:
    """Every group in full, and the sentence of each of its other members."""
    texts = []
    for group in groups:
        lines = [*block(part.checkpoint, group, style), *(f"{item.code} {item.title}" for item in group.members[1:])]
        texts.append("\n".join(lines))
    return _legal("\n" + "\n\n".join(texts) + "\n")


def _count(element: ET.Element, suites: list[ET.Element]) -> None:
    cases = [case for suite in suites for case in suite.findall("testcase")]
    tags = Counter(child.tag for case in cases for child in case)
    totals = {"tests": len(cases), "failures": tags["failure"], "errors": tags["error"], "skipped": tags["skipped"]}
    element.attrib |= {name: str(count) for name, count in totals.items()}


def _time(seconds: float) -> str:
    return f"{seconds:.3f}"


def _legal(text: str) -> str:
    """The text with what XML 1.0 cannot hold, not even escaped, as a visible escape."""
    return _FORBIDDEN.sub(lambda match: match[0].encode("unicode_escape", "surrogatepass").decode(), text)
