"""The `full` format: per problem a sentence, the place, a chunk map, why it matters and what to do."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from ckptlint.geometry.chunk_map import draw, make_grid
from ckptlint.lint.report import Cause, CheckpointReport, FindingGroup, Report, worst
from ckptlint.lint.steps import JudgedStep, newest_passing, steps_in
from ckptlint.model import Checkpoint, RecordState, StepFile
from ckptlint.model.checkpoint import FORMAT_NAMES
from ckptlint.model.layout import Box
from ckptlint.model.text import braces, human_bytes, plural
from ckptlint.reporters.style import Style, cut, cut_names, inert
from ckptlint.rule import Finding, Note, Severity

_MORE_LIMIT = 12
_UNKNOWN_LIMIT = 6


def render(report: Report, style: Style) -> str:
    """The whole report as text, ending in the verdict."""
    if style.quiet >= 2:
        return ""
    blocks = []
    for part in report.checkpoints:
        texts = [] if style.quiet else [header(part.checkpoint, style)]
        found = _findings(part, style)
        if style.quiet and found and len(report.checkpoints) > 1:
            texts = [style.paint(part.checkpoint.path, "bold")]
        if texts and not found and len(report.checkpoints) > 1 and not part.is_incomplete:
            texts[0] += "\n  " + style.paint("passed", "good")
        texts += found
        if texts:
            blocks.append("\n\n".join(texts))
    if style.verbose:
        blocks.append(_details(report, style))
    if not style.quiet:
        unread = [line for text in report.unread for line in style.wrap(text, "  ", "")]
        files = [file for part in report.checkpoints for file in part.checkpoint.step_files]
        told = style.wrap(account(files), "  ", "") if any(file.state != "read" for file in files) else []
        blocks.append("\n".join([*unread, *told, *verdict(report, style)]))
        if steps := steps_in(report):
            blocks += [
                "",
                step_table(steps),
                *(line for text in step_lines(steps) for line in style.wrap(text, "  ", "")),
            ]
    separator = "\n" if _is_clean(report, style) else "\n\n"
    return inert(separator.join(text for text in blocks if text)) + ("\n" if blocks else "")


def header(ckpt: Checkpoint, style: Style) -> str:
    """What was looked at: path, dialect, counts."""
    told = facts(ckpt)
    unseen = [line for sentence in ckpt.unseen for line in style.wrap(f"not known: {sentence}", "    ", "  ")]
    if len(ckpt.path) + len(told) + 2 <= style.width:
        return "\n".join([style.paint(ckpt.path, "bold") + "  " + told, *unseen])
    return "\n".join([style.paint(ckpt.path, "bold"), *style.wrap(told, "  "), *unseen])


def facts(ckpt: Checkpoint) -> str:
    """Dialect and counts in a line."""
    name = FORMAT_NAMES[ckpt.format] + (f" ({ckpt.writer})" if ckpt.writer else "")
    if ckpt.ranks is not None:
        keys = [plural(ckpt.ranks.keys, "key")] if ckpt.ranks.keys else []
        return "  ".join([name, ", ".join([plural(ckpt.ranks.world_size, "rank"), *keys])])
    counts = [plural(len(ckpt.tensors), "tensor")] if ckpt.readable else []
    if ckpt.readable and (others := len(ckpt.objects) + len(ckpt.byte_objects)):
        counts.append(plural(others, "object"))
    if ckpt.files:
        counts.append(plural(len(ckpt.files), "file"))
    if ckpt.total_bytes:
        counts.append(human_bytes(ckpt.total_bytes))
    return "  ".join([name, ", ".join(counts)] if counts else [name])


def account(files: Sequence[StepFile]) -> str:
    """What became of the files beside the tensors: how many were read, which were known or unknown by their names."""
    read = sum(file.state == "read" for file in files)
    known = [file for file in files if file.state == "known"]
    unknown = braces(file.name for file in files if file.state == "unknown")
    parts = [f"{plural(read, 'file')} read"]
    if known:
        families = ", ".join(sorted({file.family for file in known}))
        parts.append(f"{len(known):,} known and not judged ({families})")
    if unknown:
        more = [f"{len(unknown) - _UNKNOWN_LIMIT:,} more"] if len(unknown) > _UNKNOWN_LIMIT else []
        names = ", ".join([cut(name) for name in unknown[:_UNKNOWN_LIMIT]] + more)
        parts.append(f"{sum(file.state == 'unknown' for file in files):,} unknown ({names})")
    return "Beside the tensors: " + ", ".join(parts) + "."


STEP_COLUMNS = ("step", "written", "holds", "payload", "verdict")


def step_rows(steps: Sequence[JudgedStep]) -> list[tuple[str, ...]]:
    """The cells of a table of steps, below `STEP_COLUMNS`."""
    return [
        (
            step.name,
            time.strftime("%Y-%m-%d %H:%M", time.localtime(step.written)) if step.written else "",
            ", ".join(step.parts),
            human_bytes(step.size) if step.size else "",
            f"{step.verdict} {step.code}".rstrip(),
        )
        for step in steps
    ]


def step_table(steps: Sequence[JudgedStep]) -> str:
    """The steps as a table."""
    from tabulate import tabulate

    return tabulate(step_rows(steps), STEP_COLUMNS, disable_numparse=True, tablefmt="plain")


def step_lines(steps: Sequence[JudgedStep]) -> list[str]:
    """For each run a sentence with its newest step that passes; a path stands last, so that a reader finds it."""
    lines = []
    for run, step in newest_passing(steps).items():
        if step is None:
            lines.append(f"No step of {run} passes.")
        else:
            lines.append(f"The newest step that passes, and needs no other: {step.path}")
    return lines


def _is_clean(report: Report, style: Style) -> bool:
    return not style.verbose and all(not loud_groups(part, style) for part in report.checkpoints)


def loud_groups(part: CheckpointReport, style: Style) -> list[FindingGroup]:
    """The groups to show: notes only with -v or beside something worse, which they may explain."""
    loud = any(item.severity > Severity.INFO for item in part.diagnostics)
    return part.groups if loud or style.verbose else []


def _findings(part: CheckpointReport, style: Style) -> list[str]:
    groups = loud_groups(part, style)
    causes = ["\n".join(cause_block(part, cause, style)) for cause in part.causes] if groups else []
    folded = set() if style.verbose else part.folded
    shown, cut_off = worst([group for group in groups if group not in folded], style.per_rule)
    blocks = causes + ["\n".join(block(part.checkpoint, group, style)) for group in shown]
    blocks += [
        f"{plural(count, 'more group')} of {code} (--max-per-rule 0 shows all)" for code, count in cut_off.items()
    ]
    return blocks


def cause_block(part: CheckpointReport, cause: Cause, style: Style) -> list[str]:
    """The lines of a cause: its sentence, its findings in a line each unless they follow in full, what to do."""
    title = style.wrap(f"cause: {cause.sentence}", "    ", "")
    lines = [title[0].replace("cause", style.paint("cause", "bold"), 1), *title[1:]]
    groups = part.groups_of(cause)
    shown, cut_off = worst([] if style.verbose or len(groups) == 1 else groups, style.per_rule)
    for group in shown:
        lead, more = group.lead, len(group.members) - 1
        text = f"{lead.code} {cut_names(lead.title, lead.fqn)}"
        end = f" (+{more:,} more)" if more else ""
        room = style.width - len(f"  --> {lead.severity.label} ") - len(end)
        text = text if len(text) <= room else f"{text[: room - 3]}..."
        lines.append(f"  --> {style.paint(lead.severity.label, lead.severity.label)} {text}{end}")
    lines += [f"  --> {plural(count, 'more group')} of {code}" for code, count in cut_off.items()]
    return lines + style.wrap(f"{cause.do}; `ckptlint explain {cause.name}` shows more", "     ", "   = do: ")


def block(ckpt: Checkpoint, group: FindingGroup, style: Style) -> list[str]:
    """The lines of one group: sentence, place, figure, notes, and the names of the others."""
    lead, finding = group.lead, group.lead.finding
    label = f"{lead.severity.label}[{lead.code}]"
    title = style.wrap(f"{label} {lead.rule.name}: {cut_names(lead.title, lead.fqn)}", "    ", "")
    lines = [title[0].replace(label, style.paint(label, lead.severity.label), 1), *title[1:]]
    lines += style.wrap(finding.at.label or place_of(ckpt, finding), "      ", "  --> ")
    lines += [f"   | {line}".rstrip() for line in _figure(ckpt, finding, style)]
    for name, text in notes(group):
        lines += style.wrap(text, "     ", f"   = {name}: ")
    return lines


def notes(group: FindingGroup) -> list[Note]:
    """Why it matters, every note of the one shown, and the names of the others."""
    listed = [("why", group.lead.why), *group.lead.all_notes()]
    if len(group.members) > 1:
        listed.append(("also", also(group)))
    return [note for note in listed if note[1]]


def place_of(ckpt: Checkpoint, finding: Finding) -> str:
    """What the line below the title names: the tensor as stored, the bytes, or the file."""
    if finding.at.tensor is not None:
        tensor = finding.at.tensor
        chunks = len(tensor.chunks) + len(tensor.malformed)
        shape = "[" + ", ".join(map(str, tensor.global_shape)) + "]"
        return f"{ckpt.metadata_file}: {tensor.dtype} {cut(shape)}, {plural(chunks, 'chunk')}"
    if finding.at.byte_range is not None:
        start, length = finding.at.byte_range
        return f"{finding.at.file}: bytes {start:,}-{start + length:,}"
    return finding.at.file or ckpt.metadata_file


def _figure(ckpt: Checkpoint, finding: Finding, style: Style) -> list[str]:
    if finding.detail:
        return list(finding.detail)
    if finding.at.tensor is None or finding.at.region is None:
        return []
    grid = make_grid(finding.at.tensor, finding.at.region)
    return [] if grid is None else draw(ckpt, grid, finding.at.region, style.ascii_only, style.width - 5)


def also(group: FindingGroup) -> str:
    """The other members of a group, their names folded."""
    names = braces(dict.fromkeys(item.fqn or item.finding.at.file for item in group.members[1:]))
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
        for group in part.ignored_groups:
            lines += style.wrap(_ignored(group), "      ", "  ignored ")
        slow = sorted(part.seconds.items(), key=lambda pair: -pair[1])[:3]
        lines.append("  slowest: " + ", ".join(f"{code} {seconds:.3f} s" for code, seconds in slow))
    lines += [
        line for text in report.fixed_since_baseline for line in style.wrap(f"no longer occurs: {text}", "    ", "")
    ]
    return "\n".join(lines)


def _ignored(group: FindingGroup) -> str:
    lead, more = group.lead, len(group.members) - 1
    ignored = lead.ignored
    why = ignored.reason or "in the baseline" if ignored else ""
    return f"{lead.code} {cut_names(lead.title, lead.fqn)}" + (f" (+{more:,} more)" if more else "") + f": {why}"


def _set_aside(report: Report) -> str:
    """How many findings do not count, in brackets; "" for none."""
    hidden = Counter(item.ignored.by for item in report.ignored if item.ignored)
    ignored, baselined = hidden["per-key-ignores"], hidden["baseline"]
    parts = [f"{plural(ignored, 'finding')} ignored by config"] if ignored else []
    parts += [f"{baselined:,} baselined"] if baselined else []
    return f" ({', '.join(parts)})" if parts else ""


def verdict(report: Report, style: Style) -> list[str]:
    """The last lines: what was found, by how many rules, what could not be judged, and whose settings were used."""
    *lines, last = _verdict(report, style)
    return [*lines, last + (f" Settings: {report.settings}." if report.settings else "")]


def _verdict(report: Report, style: Style) -> list[str]:
    counts = [plural(report.counts[level], level) for level in ("error", "warning") if report.counts[level]]
    remarks = report.counts["info"]
    rules = len(report.rules)
    selected = {rule.code for rule in report.rules}
    silent = {code for part in report.checkpoints for code in part.not_run} & selected
    failed = {code for part in report.checkpoints for code in part.failed}
    if not report.checkpoints:
        return ["nothing to check" if not report.unreadable else "1 path could not be read"]
    lines = []
    if counts:
        where = f" in {plural(len(report.checkpoints), 'checkpoint')}" if len(report.checkpoints) > 1 else ""
        totals = f"{plural(rules, 'rule')}, {_judged(report)}, {report.seconds:.2f} s"
        kind = "error" if report.counts["error"] else "warning"
        if blocked := [part for part in report.checkpoints if not part.checkpoint.readable]:
            missing = blocked[0].checkpoint.metadata_file
            totals = f"{len(blocked[0].not_run.keys() & selected)} of {rules} rules could not run: they need {missing}"
        lines.append(style.paint(f"{', '.join(counts)}{where}{_set_aside(report)}.", kind) + f" {totals}.")
        first = next(g.lead.code for part in report.checkpoints for g in part.groups if g.lead.severity > Severity.INFO)
        lines.append(f"`ckptlint explain {first}` tells more.")
    if failed:
        verb = "rule did not finish" if len(failed) == 1 else "rules did not finish"
        sentence = f"{len(failed)} {verb}: {', '.join(sorted(failed))}. The verdict is incomplete."
        lines.append(style.paint(sentence, "error"))
    elif report.is_incomplete and not report.fails:
        lines.append(style.paint("The verdict is incomplete.", "error"))
    if not counts and not failed and not report.is_incomplete:
        extra = f", {plural(remarks, 'note')} (-v)" if remarks and not style.verbose else ""
        of = f"{rules - len(silent)} of {rules} rules" if silent else f"All {rules} rules"
        passed = style.paint(f"{of} passed", "good")
        lines.append(f"{passed} in {report.seconds:.2f} s{extra}{_set_aside(report)}. {_unread(report)}")
    elif report.depth.opens_records and (limits := _limits(report)):
        lines.append(limits)
    return lines


def _judged(report: Report) -> str:
    """How much was judged: tensors, or the keys of a running job."""
    if report.is_live:
        return plural(
            sum(part.checkpoint.ranks.keys for part in report.checkpoints if part.checkpoint.ranks is not None), "key"
        )
    return plural(sum(len(part.checkpoint.tensors) for part in report.checkpoints), "tensor")


def _unread(report: Report) -> str:
    """What the depth leaves out."""
    if report.is_live:
        return "Files were not looked at."
    if not report.depth.looks_at_files:
        return "Tensor bytes were not read and files were not looked at (--depth files)."
    if not report.depth.opens_records:
        return "Tensor bytes were not read (--depth headers, --depth data)."
    whole = "Every record was read." if report.depth.reads_all else "Tensor bytes were not read (--depth data)."
    return _limits(report) or whole


def _limits(report: Report) -> str:
    """Which records were not opened though the depth asks for it; "" when all were."""
    payloads = [part.checkpoint.payload for part in report.checkpoints if part.checkpoint.payload is not None]
    texts = [f"Only a sample was read: {payload.sample}." for payload in payloads if payload.sample]
    for state, is_scanned, why in (
        (RecordState.TRANSFORMED, False, "went through a stream transform and were not opened"),
        (RecordState.RAW, True, "have no archive around them: their values were read, and there is no checksum"),
        (RecordState.RAW, False, "have no archive around them and were not checked"),
    ):
        if count := sum(int(((p.state == state) & (p.scanned == is_scanned)).sum()) for p in payloads):
            texts.append(f"{plural(count, 'record')} {why}.")
    return " ".join(texts)


def region_text(region: Box) -> str:
    """A region as slices without blanks, for one-line formats."""
    return str(region).replace(" ", "")
