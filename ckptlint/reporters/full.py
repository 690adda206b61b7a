"""The `full` format: per problem a sentence, the place, a chunk map, why it matters and what to do."""

from __future__ import annotations

from ckptlint.boxes import Box
from ckptlint.chunkmap import draw, human_bytes, make_grid
from ckptlint.keys import braces
from ckptlint.model import Checkpoint
from ckptlint.report import CheckpointReport, Group, Report, worst
from ckptlint.reporters.style import Style, cut, plural
from ckptlint.rule import Finding, Severity

FORMAT_NAMES = {
    "dcp": "DCP",
    "dcp-per-rank": "DCP, one metadata file per rank",
    "torch_dist": "Megatron torch_dist",
    "fsdp_dtensor": "Megatron fsdp_dtensor",
    "torch_dcp": "Megatron torch_dcp",
    "incomplete": "incomplete",
    "unsupported": "not supported",
}
_MORE_LIMIT = 12


def render(report: Report, style: Style) -> str:
    """The whole report as text, ending in the verdict."""
    if style.quiet >= 2:
        return ""
    blocks = []
    for part in report.checkpoints:
        block = [] if style.quiet else [header(part.checkpoint, style)]
        found = _findings(part, style)
        if block and not found and len(report.checkpoints) > 1 and not part.is_incomplete:
            block[0] += "\n  " + style.paint("passed", "good")
        block += found
        if block:
            blocks.append("\n\n".join(block))
    if style.verbose:
        blocks.append(_details(report, style))
    if not style.quiet:
        unread = [line for text in (*report.refused, *report.nothing) for line in style.wrap(text, "  ", "")]
        blocks.append("\n".join([*unread, *_verdict(report, style)]))
    separator = "\n" if _is_clean(report, style) else "\n\n"
    return separator.join(block for block in blocks if block) + ("\n" if blocks else "")


def header(ckpt: Checkpoint, style: Style) -> str:
    """What was looked at: path, dialect, counts."""
    name = FORMAT_NAMES[ckpt.format] + (f" ({ckpt.writer})" if ckpt.writer else "")
    counts = [plural(len(ckpt.tensors), "tensor")] if ckpt.readable else []
    if ckpt.readable and (others := len(ckpt.objects) + len(ckpt.byte_objects)):
        counts.append(plural(others, "object"))
    if ckpt.files:
        counts.append(plural(len(ckpt.files), "file"))
    if ckpt.total_bytes:
        counts.append(human_bytes(ckpt.total_bytes))
    facts = "  ".join([name, ", ".join(counts)] if counts else [name])
    if len(ckpt.path) + len(facts) + 2 <= style.width:
        return style.paint(ckpt.path, "bold") + "  " + facts
    return "\n".join([style.paint(ckpt.path, "bold"), *style.wrap(facts, "  ")])


def _is_clean(report: Report, style: Style) -> bool:
    return not style.verbose and all(not _shown(part, style) for part in report.checkpoints)


def _shown(part: CheckpointReport, style: Style) -> list[Group]:
    """The groups to show: notes only with -v or beside something worse, which they may explain."""
    loud = any(item.severity > Severity.INFO for item in part.diagnostics)
    return part.groups if loud or style.verbose else []


def _findings(part: CheckpointReport, style: Style) -> list[str]:
    shown, cut_off = worst(_shown(part, style), style.per_rule)
    blocks = ["\n".join(_group(part.checkpoint, group, style)) for group in shown]
    blocks += [
        f"{plural(count, 'more group')} of {code} (--max-per-rule 0 shows all)" for code, count in cut_off.items()
    ]
    return blocks


def _group(ckpt: Checkpoint, group: Group, style: Style) -> list[str]:
    lead, finding = group.lead, group.lead.finding
    label = f"{lead.severity.label}[{lead.code}]"
    title = style.wrap(f"{label} {lead.rule.name}: {cut_names(lead.title, lead.fqn)}", "    ", "")
    lines = [title[0].replace(label, style.paint(label, lead.severity.label), 1), *title[1:]]
    lines += style.wrap(finding.place or place_of(ckpt, finding), "      ", "  --> ")
    lines += [f"   | {line}".rstrip() for line in _figure(ckpt, finding, style)]
    notes = [("why", lead.why), *lead.all_notes()]
    if len(group.members) > 1:
        notes.append(("also", also(group)))
    for name, text in notes:
        if text:
            lines += style.wrap(text, "     ", f"   = {name}: ")
    return lines


def cut_names(title: str, fqn: str | None) -> str:
    """The title with a very long name shortened."""
    return title.replace(fqn, cut(fqn)) if fqn else title


def place_of(ckpt: Checkpoint, finding: Finding) -> str:
    """What the line below the title names: the tensor as stored, the bytes, or the file."""
    if finding.tensor is not None:
        tensor = finding.tensor
        chunks = len(tensor.chunks) + len(tensor.malformed)
        shape = "[" + ", ".join(map(str, tensor.global_shape)) + "]"
        return f"{ckpt.metadata_file}: {tensor.dtype} {cut(shape)}, {plural(chunks, 'chunk')}"
    if finding.byte_range is not None:
        start, length = finding.byte_range
        return f"{finding.file}: bytes {start:,}-{start + length:,}"
    return finding.file or ckpt.metadata_file


def _figure(ckpt: Checkpoint, finding: Finding, style: Style) -> list[str]:
    if finding.detail:
        return list(finding.detail)
    if finding.tensor is None or finding.region is None:
        return []
    grid = make_grid(finding.tensor, finding.region)
    return [] if grid is None else draw(ckpt, grid, finding.region, style.ascii_only, style.width - 5)


def also(group: Group) -> str:
    """The other members of a group, their names folded."""
    names = braces(dict.fromkeys(item.fqn or item.finding.file for item in group.members[1:]))
    more = f", and {len(names) - _MORE_LIMIT:,} more patterns" if len(names) > _MORE_LIMIT else ""
    count = plural(len(group.members) - 1, "more key" if group.lead.fqn else "more file")
    same = "the same" if len({item.message for item in group.members}) == 1 else "alike"
    return f"{count}, {same}: " + ", ".join(cut(name) for name in names[:_MORE_LIMIT]) + more


def _details(report: Report, style: Style) -> str:
    lines = []
    for part in report.checkpoints:
        lines.append(f"{part.checkpoint.path}: {plural(len(part.passed), 'rule')} ran")
        for axis, size in part.checkpoint.topology.items():
            lines.append(f"  {axis} = {size.size} ({size.source})")
        for what, reasons in (("not run", part.not_run), ("not applicable", part.not_applicable)):
            for code, reason in reasons.items():
                lines += style.wrap(f"{code}: {reason}", "      ", f"  {what} ")
        slow = sorted(part.seconds.items(), key=lambda pair: -pair[1])[:3]
        lines.append("  slowest: " + ", ".join(f"{code} {seconds:.3f} s" for code, seconds in slow))
    return "\n".join(lines)


def _verdict(report: Report, style: Style) -> list[str]:
    counts = [plural(report.counts[level], level) for level in ("error", "warning") if report.counts[level]]
    notes = report.counts["info"]
    rules = len(report.rules)
    selected = {rule.code for rule in report.rules}
    silent = {code for part in report.checkpoints for code in part.not_run} & selected
    failed = {code for part in report.checkpoints for code in part.failed}
    if not report.checkpoints:
        return ["nothing to check" if not report.refused else "1 path could not be read"]
    lines = []
    if counts:
        where = f" in {plural(len(report.checkpoints), 'checkpoint')}" if len(report.checkpoints) > 1 else ""
        tensors = sum(len(part.checkpoint.tensors) for part in report.checkpoints)
        totals = f"{plural(rules, 'rule')}, {plural(tensors, 'tensor')}, {report.seconds:.2f} s"
        kind = "error" if report.counts["error"] else "warning"
        if blocked := [part for part in report.checkpoints if not part.checkpoint.readable]:
            missing = blocked[0].checkpoint.metadata_file
            totals = f"{len(blocked[0].not_run.keys() & selected)} of {rules} rules could not run: they need {missing}"
        lines.append(style.paint(f"{', '.join(counts)}{where}.", kind) + f" {totals}.")
        first = next(g.lead.code for part in report.checkpoints for g in part.groups if g.lead.severity > Severity.INFO)
        lines.append(f"`ckptlint explain {first}` tells more.")
    if failed:
        verb = "rule did not finish" if len(failed) == 1 else "rules did not finish"
        sentence = f"{len(failed)} {verb}: {', '.join(sorted(failed))}. The verdict is incomplete."
        lines.append(style.paint(sentence, "error"))
    elif report.is_incomplete and not report.fails:
        lines.append(style.paint("The verdict is incomplete.", "error"))
    if not counts and not failed and not report.is_incomplete:
        unread = "" if report.depth == "files" else " and files were not looked at (--depth files)"
        extra = f", {plural(notes, 'note')} (-v)" if notes and not style.verbose else ""
        of = f"{rules - len(silent)} of {rules} rules" if silent else f"All {rules} rules"
        passed = style.paint(f"{of} passed", "good")
        lines.append(f"{passed} in {report.seconds:.2f} s{extra}. Tensor bytes were not read{unread}.")
    return lines


def region_text(region: Box) -> str:
    """A region as slices without blanks, for one-line formats."""
    return str(region).replace(" ", "")
