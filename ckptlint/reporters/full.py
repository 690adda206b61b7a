"""The `full` format: per problem a sentence, the place, a chunk map, why it matters and what to do."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, takewhile
from typing import get_args

from ckptlint.depth import Depth
from ckptlint.grouping import grouped
from ckptlint.lint.report import Cause, CheckpointReport, Diagnostic, FindingGroup, Report, worst
from ckptlint.lint.settings.ignores import ignore_of_the_rest
from ckptlint.lint.steps.trust import JudgedStep, StepVerdict, newest_passing, step_around, steps_in, verdict_of
from ckptlint.model import Checkpoint, PayloadTable, RecordState, StepFile
from ckptlint.model.checkpoint import UNFINISHED
from ckptlint.model.text import (
    at_most,
    first_names,
    fold_names,
    human_bytes,
    human_duration,
    join_words,
    plural,
    ranges,
    shape_text,
    table,
    verb,
)
from ckptlint.reporters.agreement import agreement, is_verified
from ckptlint.reporters.style import Style, cut, cut_names
from ckptlint.rule import Finding, Note, Severity

_BYTES_A_SECOND = 250 * 1024**2  # of a local disk, read and summed: docs/benchmarks.md
_MORE_LIMIT = 12
_UNKNOWN_LIMIT = 6
_RUN = 24  # characters of a folder around a step in a table
_REASONS_LIMIT = 175  # characters


def render(report: Report, style: Style) -> str:
    """The whole report as text, ending in the verdict."""
    if style.quiet >= 2:
        return ""
    blocks = []
    steps = [] if style.quiet else steps_in(report)
    tabled = set() if style.verbose else {step.path for step in steps}
    for part in report.checkpoints:
        findings = _findings(part, style)
        around = step_around(part.checkpoint)
        if not (findings or part.is_incomplete or part.checkpoint.not_looked_at) and around and around[0] in tabled:
            continue  # its row in the table says it
        texts = [] if style.quiet else [header(part.checkpoint, style)]
        if style.quiet and findings and len(report.checkpoints) > 1:
            texts = [style.paint(part.checkpoint.path, "bold")]
        if texts and not findings and len(report.checkpoints) > 1 and not part.is_incomplete:
            texts[0] += "\n  " + style.paint("passed", "good")
        texts += findings
        if texts:
            blocks.append("\n\n".join(texts))
    if style.verbose:
        blocks.append(details(report, style))
    if not style.quiet:
        outcomes = list(_outcomes(report, style))
        unread = [line for text in report.unread if not outcomes for line in style.wrap(text, "  ", "")]
        files = [file for part in report.checkpoints for file in part.checkpoint.step_files]
        others = style.wrap(other_files_line(files), "  ", "") if any(file.state != "read" for file in files) else []
        ignore = ignore_of_the_rest(report)
        ignore[:0] = ["If that is meant, say so with the reason in your settings:"] if ignore else []
        blocks.append("\n".join([*unread, *others, *verdict(report, style, wrapped=True), *ignore]))
        if steps:
            lines = [line for text in step_lines(steps, report.lenient) for line in style.wrap(text, "  ", "")]
            blocks += ["", step_table(steps, style.width), *lines]
        blocks.append("\n".join(outcomes))
    elif report.unread:
        blocks.append("\n".join(line for text in report.unread for line in style.wrap(text, "  ", "")))
    separator = "\n\n" if any(groups_to_show(part, style) for part in report.checkpoints) else "\n"
    return separator.join(text for text in blocks if text) + ("\n" if blocks else "")


def _outcomes(report: Report, style: Style) -> Iterator[str]:
    """A line for each of several checkpoints in no table and each path not read, failures last; none if all pass."""
    if len(report.checkpoints) + len(report.unread) < 2:
        return
    tabled = {step.path for step in steps_in(report)}
    rows = [("not read", text) for text in (*report.not_found, *report.unreadable)]
    for part in report.checkpoints:
        step = step_around(part.checkpoint)
        if step is None or step[0] not in tabled:
            outcome = _outcome(report, part)
            rows.append((f"{outcome.verdict} {outcome.code}".rstrip(), part.checkpoint.path))
    if any(word != "passes" for word, _ in rows):
        order = ("passes", "not read", "not judged", f"unfinished {UNFINISHED}")
        width = max(len(word) for word, _ in rows)
        for word, text in sorted(rows, key=lambda row: order.index(row[0]) if row[0] in order else len(order)):
            yield from style.wrap(f"{word:{width}}  {text}", "  ", "")


def _outcome(report: Report, part: CheckpointReport) -> JudgedStep:
    return verdict_of(replace(report, checkpoints=[part], not_found=(), unreadable=()))


def header(ckpt: Checkpoint, style: Style) -> str:
    """What was looked at: path, dialect, counts."""
    about = summary(ckpt)
    unseen = [line for sentence in ckpt.not_looked_at for line in style.wrap(f"not known: {sentence}", "    ", "  ")]
    path = style.paint(ckpt.path, "bold")
    is_short = len(ckpt.path) + len(about) + 2 <= style.width
    return "\n".join([*([f"{path}  {about}"] if is_short else [path, *style.wrap(about, "  ")]), *unseen])


def summary(ckpt: Checkpoint) -> str:
    """Dialect and counts in a line."""
    name, *counts = facts(ckpt)
    return "  ".join([name, ", ".join(counts)] if counts else [name])


def facts(ckpt: Checkpoint) -> list[str]:
    """The dialect, and the counts that are not 0."""
    name = ckpt.title + (f" ({ckpt.writer})" if ckpt.writer else "")
    if ckpt.ranks is not None:
        keys = [plural(ckpt.ranks.keys, "key")] if ckpt.ranks.keys else []
        return [name, plural(ckpt.ranks.world_size, "rank"), *keys]
    counts = [plural(len(ckpt.tensors), "tensor")] if ckpt.readable else []
    if ckpt.readable and (others := len(ckpt.objects) + len(ckpt.byte_objects)):
        counts.append(plural(others, "object"))
    if ckpt.files:
        counts.append(plural(len(ckpt.files), "file"))
    if ckpt.total_bytes:
        counts.append(human_bytes(ckpt.total_bytes))
    return [name, *counts]


def other_files_line(files: Sequence[StepFile]) -> str:
    """What became of the files beside the tensors: how many were read, which were known or unknown by their names."""
    read = sum(file.state == "read" for file in files)
    known = [file for file in files if file.state == "known"]
    unknown = fold_names(file.name for file in files if file.state == "unknown")
    clauses = [f"{plural(read, 'file')} read"]
    if known:
        families = ", ".join(sorted({file.family for file in known}))
        clauses.append(f"{len(known):,} known and not judged ({families})")
    if unknown:
        names = ", ".join(at_most(map(cut, unknown), _UNKNOWN_LIMIT))
        clauses.append(f"{sum(file.state == 'unknown' for file in files):,} unknown ({names})")
    return "Besides the tensors: " + ", ".join(clauses) + "."


STEP_COLUMNS = ("step", "written", "holds", "payload", "verdict")


def step_rows(steps: Sequence[JudgedStep]) -> list[tuple[str, ...]]:
    """The cells of a table of steps, below `STEP_COLUMNS`; steps of several runs are named from the folder above."""
    levels = zip(*(step.path.split("/")[:-1] for step in steps), strict=False)
    above = len([*takewhile(lambda names: len({*names}) == 1, levels)])
    return [
        (
            "/".join([*(cut(name, _RUN) for name in step.path.split("/")[above:-1]), step.name]),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(step.written)) if step.written else "",
            ", ".join(step.parts),
            human_bytes(step.size) if step.size else "",
            f"{step.verdict} {step.code}".rstrip() + (f" ({step.hidden})" if step.hidden else ""),
        )
        for step in steps
    ]


def step_table(steps: Sequence[JudgedStep], width: int) -> str:
    """The steps as a table; what they hold is wrapped, times are left out where names are long or none is known."""
    # a store knows only when a file was uploaded
    rows: list[tuple[str, ...]] = step_rows(steps)
    heads: tuple[str, ...] = STEP_COLUMNS
    least = len("dataloader,")
    if (room := _room_to_hold(rows, heads, width)) < least or not any(step.written for step in steps):
        rows, heads = [(row[0], *row[2:]) for row in rows], (heads[0], *heads[2:])
        room = _room_to_hold(rows, heads, width)
    longest = max(len(row[0]) for row in rows) + min(room - least, 0)
    rows = [(cut(row[0], longest), *row[1:]) for row in rows]
    most = [max(room, least) if head == "holds" else None for head in heads]
    return table(rows, heads, tablefmt="plain", maxcolwidths=most)


def _room_to_hold(rows: Sequence[Sequence[str]], heads: Sequence[str], width: int) -> int:
    """Characters that the other columns leave for `holds`."""
    columns = zip([f"{head}  " for head in heads], *rows, strict=True)  # tabulate leaves two blanks after a head
    return width - sum(max(map(len, cells)) + 2 for cells in columns if cells[0] != "holds  ")


def step_lines(steps: Sequence[JudgedStep], lenient: Sequence[str]) -> list[str]:
    """For each run a sentence with its newest step that passes; a path stands last, so that a reader finds it."""
    lines = []
    options = f" with {join_words([f'--{name}' for name in lenient])}" if lenient else ""
    for run, step in newest_passing(steps).items():
        of_run = [judged for judged in steps if judged.path.rpartition("/")[0] == run]
        newer = of_run if step is None else of_run[: of_run.index(step)]
        doubt = next((judged.name for judged in newer if judged.verdict == "not judged"), "")
        if step is None:
            lines.append(f"No step of {run} passes{f', and {doubt} could not be judged' if doubt else ''}.")
        elif doubt:
            lines.append(f"{step.name} passes, but {doubt} may be a newer good step: no answer.")
        else:
            lines += [f"{step.name}: warning {sentence}" for sentence in step.warnings]
            lines.append(f"The newest step that passes{options}: {step.path}")
    return lines


def groups_to_show(part: CheckpointReport, style: Style) -> list[FindingGroup]:
    """The groups to show: notes only with -v or beside something worse, which they may explain."""
    loud = any(item.severity > Severity.INFO for item in part.diagnostics)
    return part.groups if loud or style.verbose else []


def _findings(part: CheckpointReport, style: Style) -> list[str]:
    groups = groups_to_show(part, style)
    causes = ["\n".join(cause_block(part, cause, style)) for cause in part.causes] if groups else []
    folded = {} if style.verbose else part.folded
    shown, cut_off = worst([group for group in groups if group not in folded], style.per_rule)
    blocks = ["\n".join(block(part.checkpoint, group, style)) for group in shown]
    more = "(--max-per-rule 0 shows all)"
    return causes + blocks + [f"{plural(count, 'more group')} of {code} {more}" for code, count in cut_off.items()]


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
        text = text if len(text) <= room else f"{text[: room - 3].rpartition(' ')[0]} ..."
        lines.append(f"  --> {style.paint(lead.severity.label, lead.severity.label)} {text}{end}")
    lines += [f"  --> {plural(count, 'more group')} of {code}" for code, count in cut_off.items()]
    return lines + style.wrap(cause.do, "     ", "   = do: ")


def block(ckpt: Checkpoint, group: FindingGroup, style: Style) -> list[str]:
    """The lines of one group: sentence, place, figure, notes, and the names of the others."""
    lead, finding = group.lead, group.lead.finding
    label = f"{lead.severity.label}[{lead.code}]"
    title = style.wrap(f"{label} {lead.rule.name}: {cut_names(lead.title, lead.fqn)}", "    ", "")
    lines = [title[0].replace(label, style.paint(label, lead.severity.label), 1), *title[1:]]
    lines += style.wrap(finding.at.label or place_in_words(ckpt, finding), "      ", "  --> ")
    lines += [f"   | {line}".rstrip() for line in _figure(ckpt, finding, style)]
    for note in notes(group):
        lines += style.wrap(note_line(note), "     ", "   = ")
    for whose, names in finding.lost_files if style.verbose else ():
        lines += style.wrap(f"missing{' of ' * bool(whose)}{whose}:", "     ", "   = ")
        lines += [f"     {name}" for name in names]  # one to a line, to copy
    return lines


def notes(group: FindingGroup) -> list[Note]:
    """Why it matters, every note of the one shown, and the names of the others."""
    listed = [("why", group.lead.why), *group.lead.all_notes()]
    if more := len(group.members) - 1:
        names = fold_names(dict.fromkeys(item.fqn or item.finding.at.file for item in group.members[1:]))
        count = plural(more, "more key" if group.lead.fqn else "more file")
        same = "the same" if len({item.message for item in group.members}) == 1 else "alike"
        listed.append(("also", f"{count}, {same}: " + first_names(map(cut, names), _MORE_LIMIT, "pattern")))
    return [note for note in listed if note[1]]


def note_line(note: Note) -> str:
    """A note in one line.

    >>> note_line(("hint", "save again")), note_line(("inferred", "from the shapes of layers 0-3"))
    ('hint: save again', 'inferred from the shapes of layers 0-3')
    """
    label, text = note
    return f"{label} {text}" if label == "inferred" else f"{label}: {text}"


def confidence_text(item: Diagnostic) -> str:
    """How sure a finding is and from what, in brackets, for formats of one line; "" where the files state it."""
    return f" ({note_line(item.confidence_note)})" if item.confidence_note[1] else ""


def place_in_words(ckpt: Checkpoint, finding: Finding) -> str:
    """What the line below the title names: the tensor as stored, the bytes, or the file."""
    if finding.at.tensor is not None:
        tensor = finding.at.tensor
        chunks = len(tensor.chunks) + len(tensor.malformed)
        return f"{ckpt.metadata_file}: {tensor.dtype} {cut(shape_text(tensor.global_shape))}, {plural(chunks, 'chunk')}"
    if finding.at.byte_range is not None:
        start, length = finding.at.byte_range
        return f"{finding.at.file}: bytes {start:,}-{start + length:,}"
    return finding.at.file or ckpt.metadata_file


def _figure(ckpt: Checkpoint, finding: Finding, style: Style) -> list[str]:
    if finding.detail:
        narrow = style._replace(width=style.width - len("   | "))
        return [row for line in finding.detail for row in narrow.wrap(line, "  ", "")]
    if finding.at.tensor is None or finding.at.region is None:
        return []
    from ckptlint.geometry.chunk_map import draw, make_grid

    grid, width = make_grid(finding.at.tensor, finding.at.region), style.width - len("   | ")
    if grid is None:
        return []
    return draw(ckpt, grid, finding.at.region, style.ascii_only, width, style.lost, finding.at.rows)


def details(report: Report, style: Style) -> str:
    """Which rules did not run, by reason; checkpoints of which the same is true share their lines."""
    lines = []
    for texts, parts in grouped((tuple(_part_details(part, style)), part) for part in report.checkpoints).items():
        if len(report.checkpoints) > 1:
            paths = ", ".join(fold_names(part.checkpoint.path for part in parts))
            lines.append(f"{paths}: {plural(report.rule_counts_of(parts[0]).ran, 'rule')} ran")
        lines += texts
    slow = Counter[str]()
    for part in report.checkpoints:
        slow.update(part.seconds)
    if slow:
        lines.append("slowest: " + ", ".join(f"{code} {seconds:.3f} s" for code, seconds in slow.most_common(3)))
    for text in report.fixed_since_baseline:
        lines += style.wrap(f"no longer occurs: {text}", "    ", "")
    return "\n".join(lines)


def _part_details(part: CheckpointReport, style: Style) -> Iterator[str]:
    sizes = grouped((size.source, f"{axis}={size.size}") for axis, size in part.checkpoint.topology.items())
    if sizes:
        yield from style.wrap("; ".join(f"{', '.join(of)} ({source})" for source, of in sizes.items()), "    ", "  ")
    families: dict[str, dict[str, str]] = {}
    for code, reason in part.silent.items():
        families.setdefault(code[:3], {})[code] = re.sub("^there (is|are) no ", "no ", reason)
    if families:
        yield "  not run:"
    for reasons in families.values():
        yield from style.wrap("; ".join(_reasons(reasons)), "    ", "  ")
    for group in part.ignored_groups:
        yield from style.wrap(_ignored(group), "      ", "  ignored ")


def _reasons(reasons: Mapping[str, str]) -> Iterator[str]:
    """Why the rules of one family did not run, in about three lines; every code is named."""
    room, left = _REASONS_LIMIT, dict(reasons)
    for reason, codes in grouped((reason, code) for code, reason in reasons.items()).items():
        room -= len(reason)
        if room < 0:
            yield f"{folded(left)} for other reasons (see --format json)"
            return
        yield f"{folded(codes)} {reason}"
        left = {code: why for code, why in left.items() if why != reason}


def folded(codes: Iterable[str]) -> str:
    """Codes of rules by family, their numbers as ranges.

    >>> folded(["GEO001", "GEO002", "GEO003", "PAY009", "GEO007"])
    'GEO001-003,007 PAY009'
    """
    families = grouped((code[:3], int(code[3:])) for code in codes)
    padded = {family: re.sub(r"\d+", lambda number: number[0].zfill(3), ranges(of)) for family, of in families.items()}
    return " ".join(family + numbers for family, numbers in padded.items())


def _ignored(group: FindingGroup) -> str:
    lead, more = group.lead, len(group.members) - 1
    ignored = lead.ignored
    why = ignored.reason or "in the baseline" if ignored else ""
    return f"{lead.code} {cut_names(lead.title, lead.fqn)}" + (f" (+{more:,} more)" if more else "") + f": {why}"


def _set_aside(report: Report) -> str:
    """How many findings do not count, in brackets; "" for none."""
    hidden = Counter(item.ignored.by for item in report.ignored if item.ignored)
    ignored, baselined = hidden["per-key-ignores"], hidden["baseline"]
    clauses = [f"{plural(ignored, 'finding')} ignored by the settings"] if ignored else []
    clauses += [f"{plural(baselined, 'finding')} known from the baseline"] if baselined else []
    return f" ({', '.join(clauses)})" if clauses else ""


def verdict(report: Report, style: Style, wrapped: bool = False) -> list[str]:
    """The last lines: what was found, by how many rules, what could not be judged, and whose settings were used."""
    sentences = _verdict(report, style.verbose)
    sentences += [("", "", f"Settings: {report.settings}.")] if report.settings else []
    if not wrapped:
        return [style.paint(head, kind) + rest for kind, head, rest in sentences]
    lines = []
    for kind, head, rest in sentences:
        text = "\n".join(style.wrap(head + rest, ""))  # a blank is a line's end now: the head is as long as before
        painted = [style.paint(line, kind) for line in text[: len(head)].splitlines()]
        lines += ("\n".join(painted) + text[len(head) :]).splitlines()
    return lines


def _verdict(report: Report, verbose: bool) -> list[tuple[str, str, str]]:
    """Each sentence as the kind of its colour ("" for none), what is painted so, and the rest."""
    if not report.checkpoints:
        unread = plural(len(report.unreadable), "path")
        return [("", "", f"{unread} could not be read" if report.unreadable else "nothing to check")]
    counts = [plural(report.counts[level], level) for level in ("error", "warning") if report.counts[level]]
    failed = sorted({code for part in report.checkpoints for code in part.failed})
    several = len(report.checkpoints) > 1
    sentences: list[tuple[str, str, str]] = []
    if counts:
        where = f" in {plural(len(report.checkpoints), 'checkpoint')}" if several else ""
        by_outcome = f": {_by_outcome(report)}" if several and report.exit_code else ""
        head = f"{', '.join(counts)}{where}{by_outcome}{_set_aside(report)}."
        kind = "error" if report.counts["error"] else "warning"
        if report.exit_code == 0:  # by an option
            does = verb(report.counts["error"] + report.counts["warning"], "does")
            kind, head = "good", f"Passed: {head.removesuffix('.')} {does} not fail (--fail-on {report.fail_on})."
        sentences.append((kind, head, f" {_ran(report, _judged(report))}."))
        codes = (g.lead.code for part in report.checkpoints for g in part.groups if g.lead.severity > Severity.INFO)
        first = next(chain((cause.name for part in report.checkpoints for cause in part.causes), codes))
        sentences.append(("", "", f"`ckptlint explain {first}` shows more.{_other_steps(report)}"))
    if failed:
        unfinished = f"{plural(len(failed), 'rule')} did not finish: {', '.join(failed)}."
        sentences.append(("error", f"{unfinished} The verdict is incomplete.", ""))
    elif report.is_incomplete and not report.fails:
        by_outcome = f" Of {plural(len(report.checkpoints), 'checkpoint')}: {_by_outcome(report)}." if several else ""
        sentences.append(("error", "The verdict is incomplete.", by_outcome))
    if report.not_found:
        sentences.append(("error", f"{plural(len(report.not_found), 'path')} without a checkpoint.", ""))
    if not sentences:
        head = f"{len(report.checkpoints):,} checkpoints passed" if several else "Passed"
        notes = f"; {plural(report.counts['info'], 'note')} (-v)" if report.counts["info"] and not verbose else ""
        sentences += [("good", head, f": {_ran(report)}{notes}{_set_aside(report)}."), ("", "", left_unread(report))]
    elif report.depth.opens_records and (limits := _limits(report)):
        sentences.append(("", "", limits))
    return [*sentences[:1], *(("", "", sentence) for sentence in _blocked(report)), *sentences[1:]]


def _by_outcome(report: Report) -> str:
    words = {"passes": "passed", "fails": "failed"}
    counts = Counter(_outcome(report, part).verdict for part in report.checkpoints)
    return ", ".join(
        f"{counts[verdict]:,} {words.get(verdict, verdict)}" for verdict in get_args(StepVerdict) if counts[verdict]
    )


def _other_steps(report: Report) -> str:
    """Where to find a step that passes, to follow a sentence; "" where none failed that has others beside it."""
    failed = [part for part in report.checkpoints if any(map(report.is_failing, part.diagnostics))]
    runs = [part.checkpoint.run for part in failed if part.checkpoint.run is not None]
    is_said = any("`ckptlint latest" in item.finding.hint for part in failed for item in part.diagnostics)
    if is_said or not any(len(run.steps) > 1 for run in runs):
        return ""
    # `latest` passes over no step for a warning: it would print this one
    is_skipped = any(_outcome(replace(report, fail_on="error"), part).verdict != "passes" for part in failed)
    command = "latest RUN_DIR" if is_skipped else "RUN_DIR --all-steps"
    return f" `ckptlint {command}` prints the newest step that passes."


def _ran(report: Report, on: str = "") -> str:
    return f"{plural(report.rule_counts.ran, 'rule')} ran{f' on {on}' if on else ''} in {report.seconds:.2f} s"


def _blocked(report: Report) -> Iterator[str]:
    """For each number of rules that could not run a sentence with the checkpoints of which that is true."""
    alike: dict[tuple[int, str], list[str]] = {}
    selected = {rule.code for rule in report.rules}
    for part in report.checkpoints:
        if count := len(selected.intersection(part.blocked)):
            ckpt, need = part.checkpoint, "it needs" if count == 1 else "they need"
            why = f"{need} {'the state dict of every rank' if report.is_live else f'a readable {ckpt.metadata_file}'}"
            why = "not a checkpoint that ckptlint checks" if ckpt.format == "unsupported" else why
            alike.setdefault((count, why), []).append(part.checkpoint.path)
        if count := len(selected.intersection(part.needing_the_rest)):
            alike.setdefault((count, part.checkpoint.partial_because), []).append(part.checkpoint.path)
    for (count, why), paths in alike.items():
        where = f" on {', '.join(cut(path) for path in fold_names(paths))}" if len(report.checkpoints) > 1 else ""
        yield f"{plural(count, 'rule')} could not run{where}: {why}."


def _judged(report: Report) -> str:
    """How much was judged: tensors, or the keys of a running job; "" for none."""
    noun, count = "tensor", sum(len(part.checkpoint.tensors) for part in report.checkpoints)
    if report.is_live:
        noun, count = "key", sum(part.checkpoint.ranks.keys for part in report.checkpoints if part.checkpoint.ranks)
    return plural(count, noun) if count else ""


def left_unread(report: Report) -> str:
    """What matches something from elsewhere, what the depth leaves out, and how many rules a greater one adds."""
    if report.is_live:
        return "Files were not looked at."
    return " ".join(filter(None, [agreement(report), _left_out(report)]))


def _left_out(report: Report) -> str:
    if report.depth.reads_all:
        is_known = all(part.checkpoint.readable for part in report.checkpoints)  # else nobody knows what there was
        every = "Every record was read." if is_known else ""
        return " ".join(filter(None, [_limits(report) or every, _unsummed(report)]))
    if report.depth.opens_records and (limits := _limits(report)):
        return limits
    files = " and files were not looked at" if not report.depth.looks_at_files else ""
    deeper = [(depth, report.added_by(depth)) for depth in Depth if report.added_by(depth)]
    adds = [f"--depth {depth} adds {plural(count, 'rule')}" for depth, count in deeper[:1]]
    more = ", ".join(adds + [f"--depth {depth} {count:,}" for depth, count in deeper[1:]])
    seconds = sum(part.checkpoint.total_bytes for part in report.checkpoints) / _BYTES_A_SECOND
    takes = f", and takes about {human_duration(seconds)}" if more and seconds >= 2 else ""
    unread = f"Tensor bytes were not read{files}"
    if report.draws:
        samples = [payload.sample or "headers and some numbers" for _, payload in _payloads(report)]
        unread = f"Of tensor bytes only {join_words([*dict.fromkeys(samples)])} were read"
    return unread + (f": {more}{takes}." if more else ".")


def _payloads(report: Report) -> list[tuple[Checkpoint, PayloadTable]]:
    read = ((part.checkpoint, part.checkpoint.payload) for part in report.checkpoints)
    return [(ckpt, payload) for ckpt, payload in read if payload is not None]


def _unsummed(report: Report) -> str:
    """What was read without a checksum to compare it with; "" for nothing."""
    payloads = _payloads(report)
    records = sum(
        int((payload.unsummed & (payload.state == RecordState.READ) & ~is_verified(ckpt, payload)).sum())
        for ckpt, payload in payloads
    )
    files = sum(len({*payload.bare}.difference(payload.matched)) for _, payload in payloads)
    counts = [plural(count, noun) for count, noun in ((records, "record"), (files, "other file")) if count]
    have = "has" if records + files == 1 else "have"
    return f"{' and '.join(counts)} {have} no checksum: ckptlint cannot see changed bytes there." if counts else ""


def _limits(report: Report) -> str:
    """Which records were not read though the depth asks for it; "" when all were."""
    payloads = _payloads(report)
    texts = [f"Only a sample was read: {payload.sample}." for _, payload in payloads if payload.sample]
    for state, is_scanned, why in (
        (RecordState.ELSEWHERE, None, "not read because a file is missing or damaged"),
        (RecordState.UNREADABLE, None, "opened and cannot be read"),
        (RecordState.TRANSFORMED, False, "not opened because of a stream transform"),
        (RecordState.RAW, True, "read; this format stores no checksums"),
        (RecordState.RAW, False, "not checked: this format has no record headers"),
    ):
        chosen = [
            (p.state == state)
            & ((state != RecordState.ELSEWHERE) | (ckpt.records.byte_length > 0))  # of an empty one nothing is missed
            & (True if is_scanned is None else p.scanned == is_scanned)
            & ~(is_verified(ckpt, p) & bool(is_scanned))
            for ckpt, p in payloads
        ]
        if count := sum(int(rows.sum()) for rows in chosen):
            noun = "tensor" if state == RecordState.RAW else "record"
            texts.append(f"{plural(count, noun, 'was')} {why}.")
    return " ".join(texts)
