"""The `html` format: one self-contained page, without network and without JavaScript.

The page is `report.html.jinja` with `report.css`; here is what it shows. Every text is escaped, by jinja2 or in `svg`.
"""

from __future__ import annotations

import hashlib
import time
from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptlint._version import __version__
from ckptlint.analysis.ranks.contents import rank_contents_of
from ckptlint.analysis.step_before.movement import movements_of
from ckptlint.analysis.step_before.step_change import older_name
from ckptlint.geometry.chunk_graph import axis_graph, axis_name
from ckptlint.geometry.chunk_map import Grid, make_grid, marked_boxes
from ckptlint.geometry.record_states import NOT_CHECKED, STATES, chunk_states
from ckptlint.grouping import grouped
from ckptlint.lint.report import Cause, CheckpointReport, Diagnostic, FindingGroup, Report
from ckptlint.lint.steps.trust import step_around, steps_in
from ckptlint.model import Checkpoint
from ckptlint.model.facts import fact
from ckptlint.model.text import human_bytes, named_ranks, plural, ranges, shape_text
from ckptlint.model.tiling import Box, Tiling
from ckptlint.patterns import lazy_pattern
from ckptlint.reporters import full
from ckptlint.reporters.contents import ranks
from ckptlint.reporters.html import svg
from ckptlint.reporters.html.movement import movement_map
from ckptlint.reporters.style import Style, cut, cut_names
from ckptlint.rule import SECTIONS, Finding, Note, Severity
from ckptlint.vocabulary.dtypes import nbytes
from ckptlint.vocabulary.keys import numbers_in, role
from ckptlint.vocabulary.metadata_files import rank_of
from ckptlint.vocabulary.strict_toml import own_file

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

STRIP_LIMIT = 2000
"""Tensors shown in the appendix, over all checkpoints; those that a finding concerns come first."""

PICTURE_LIMIT = 5_000_000
"""Characters of markup for pictures and chunk tables; later findings have their sentences and notes only."""

_LISTS = ("tensors", "keys", "modules")  # labels of notes that are names
_BETWEEN = lazy_pattern(r"\([^()]*\)|, | (?=and [\d,]+ more )")  # a name may have a comma in its parentheses
_MATRIX = 48  # cells across
_CHUNK_LIMIT = 16
_MARK_LIMIT = 64
_GRAPH_LIMIT = 4096  # chunks of a tensor: the graph is made of Python objects
_SAME_ROLE = 6  # tensors of one role in one layer that are not folded away
_FEWEST_MOVED = 4  # weights that make a map
_CELL = 160  # characters of a cell of it
_OPEN_LIMIT = 60  # tensors in the layers with findings, up to which these are open from the start
_LEGEND = {
    "gap": "in no chunk",
    "overlap": "in several chunks",
    "lost-missing": "in a chunk whose bytes are missing",
    "lost-cut": "in a chunk that is cut short",
    "lost-failed": "in a chunk that failed its check",
    "outside": "outside the tensor",
    "boundary": "a cut of other chunks",
    "region": "what the finding is about",
    "mark": "what a finding is about",
}
_VERDICTS = {"pass": ("✓", "Passed"), "fail": ("✕", "Failed"), "incomplete": ("?", "Incomplete")}
_STEP_LEVELS = {"fails": "error", "passes": "good"}
_LET_PASS = "!", "Errors, and exit 0"  # --exit-zero or --fail-on never


def render(report: Report, style: Style) -> str:
    """The whole report as one HTML page; it is never cut by `style`."""
    work = _Work()
    room = STRIP_LIMIT
    parts = []
    for number, part in enumerate(report.checkpoints, 1):
        parts.append(_checkpoint(part, f"c{number}", room, work))
        room -= parts[-1]["appendix"]["shown"]
    is_let_pass = _is_let_pass(report)
    checkpoints = [part.checkpoint for part in report.checkpoints]
    return (
        environment()
        .get_template("report.html.jinja")
        .render(
            **frame(),
            verdict="incomplete" if is_let_pass else report.verdict,
            shown=_LET_PASS if is_let_pass else _VERDICTS[report.verdict],
            sentence=_sentence(report),
            unread=full.left_unread(report),
            counts=[(level, report.counts[level]) for level in ("error", "warning", "info")],
            totals=[
                ("checkpoints", f"{len(checkpoints):,}"),
                ("tensors", f"{sum(len(ckpt.tensors) for ckpt in checkpoints):,}"),
                ("payload", human_bytes(sum(ckpt.total_bytes for ckpt in checkpoints))),
                ("rules that ran", f"{report.rule_counts.ran:,}"),
                ("not run", f"{report.rule_counts.not_run:,}"),
                ("depth", report.depth),
            ],
            origin=[
                ("date", f"{time.strftime('%Y-%m-%d %H:%M %z')}, checked in {report.seconds:.2f} s"),
                *([("command", report.command)] if report.command else []),
                ("version", f"ckptlint {__version__}"),
                ("settings", report.settings or "no settings file"),
            ],
            steps=_steps(report, parts),
            messages=[*report.unreadable, *report.not_found],
            parts=parts,
        )
    )


def summary(report: Report) -> list[str]:
    """The verdict in a word or two, and the sentences of the head and of the causes."""
    causes = (f"cause: {cause.sentence}. Do: {cause.do}" for part in report.checkpoints for cause in part.causes)
    verdict = _LET_PASS if _is_let_pass(report) else _VERDICTS[report.verdict]
    return [verdict[1], _sentence(report), full.left_unread(report), *report.unread, *causes]


def group_rows(report: Report) -> list[dict[str, Any]]:
    """A row for each group of findings, as the table of the page has it."""
    return [
        {
            "level": group.lead.severity.label,
            "rule": group.lead.code,
            "finding": cut_names(group.lead.title, group.lead.fqn),
            "rank": ranges(_ranks(group.members)),
            "keys": group.key_count,
            "hint": "; ".join(text for label, text in _notes(part, group) if label in ("hint", "explained")),
        }
        | ({"checkpoint": part.checkpoint.path} if len(report.checkpoints) > 1 else {})
        for part in report.checkpoints
        for group in part.groups
    ]


def _is_let_pass(report: Report) -> bool:
    return report.verdict == "pass" and report.counts["error"] > 0


def frame() -> dict[str, Any]:
    """What every page has: its style, the policy that allows nothing else, the version."""
    css = own_file(Path(__file__).with_name("report.css"), str)
    digest = b64encode(hashlib.sha256(css.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"
    return {"policy": policy, "css": markup(css), "version": __version__}


@cache
def environment() -> Environment:
    """The templates of this folder, which escape every text."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("ckptlint.reporters.html", "")
    return Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)


@dataclass(slots=True)
class _Work:
    """What is made once for a page.

    Attributes:
        room: what is left of PICTURE_LIMIT.
        pages: code -> id of the group that shows the rule's page.
        strips: the strip of a tiling with its marks; tensors that are cut alike share it.
    """

    room: int = PICTURE_LIMIT
    pages: dict[str, str] = field(default_factory=dict)
    strips: dict[tuple[Tiling, tuple[tuple[int, int, str], ...]], str] = field(default_factory=dict)


@fact
def _most_cut(tiling: Tiling) -> tuple[int, int]:
    """The axis with the most intervals, and how many it has; axis -1 for a tensor without axes."""
    counts = [(len(tiling.intervals(axis)), -axis) for axis in range(len(tiling.shape))]
    count, axis = max(counts, default=(0, 1))
    return -axis, count


# ---------------------------------------------------------------- the head


def _sentence(report: Report) -> str:
    if not report.checkpoints:
        return "Nothing was checked."
    amounts = [plural(report.counts[level], level) for level in ("error", "warning") if report.counts[level]]
    where = plural(len(report.checkpoints), "checkpoint")
    blind = sum(not part.checkpoint.readable for part in report.checkpoints)
    unfinished = {code for part in report.checkpoints for code in part.failed}
    sentences = [f"{' and '.join(amounts)} in {where}." if amounts else f"No rule found anything wrong in {where}."]
    if blind:
        whose = "Its tensors" if len(report.checkpoints) == 1 else f"The tensors of {blind} of them"
        sentences.append(f"{whose} could not be read, so most rules could not run.")
    if unfinished:
        sentences.append(f"Rules that did not finish: {', '.join(sorted(unfinished))}.")
    if report.unreadable:
        sentences.append("Some paths or files could not be opened.")
    return " ".join(sentences)


def _steps(report: Report, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the page shows of steps, with links to their checkpoints, and the parts in no step."""
    steps, strip = steps_in(report), []
    around = [step_around(part.checkpoint) for part in report.checkpoints]
    rows, others = [], list(parts)
    for step, cells in zip(steps, full.step_rows(steps), strict=True):
        of_step = [part for part, at in zip(parts, around, strict=True) if at is not None and at[0] == step.path]
        others = [part for part in others if part not in of_step]
        level = "warning" if step.hidden else _STEP_LEVELS.get(step.verdict, "warning")
        first = min(of_step, key=lambda part: not part["worst"], default=None)
        target, worst = (first["id"], first["worst"]) if first is not None else ("", step.verdict)
        strip.append((level, step.verdict, cells[0], target, worst))
        links = [(part["id"], part["path"].removeprefix(step.path).strip("/") or cells[0], part) for part in of_step]
        rows.append((cells, links))
    return {
        "strip": sorted(strip, key=lambda mark: ("error", "warning", "good").index(mark[0])),
        "columns": full.STEP_COLUMNS,
        "rows": rows,
        "others": others,
        "lines": full.step_lines(steps, report.lenient) if steps else [],
    }


# ---------------------------------------------------------------- one checkpoint


def _checkpoint(part: CheckpointReport, anchor: str, room: int, work: _Work) -> dict[str, Any]:
    """What the template needs of a checkpoint: facts, findings by rule, rules that did not run."""
    ckpt = part.checkpoint
    others = [full.other_files_line(ckpt.step_files).rstrip(".")] if ckpt.step_files else []
    codes = {item.code for item in part.diagnostics}
    return {
        "id": anchor,
        "path": ckpt.path,
        "facts": full.facts(ckpt) + others,
        "topology": [(axis, size.size, size.source) for axis, size in ckpt.topology.items()],
        "groups": [_group(part, group, f"{anchor}-{group.number}", work) for group in part.groups],
        "causes": [_cause(part, cause, anchor) for cause in part.causes],
        "worst": part.groups[0].lead.severity.label if part.groups else "incomplete" if part.is_incomplete else "",
        "holdings": _holdings(ckpt, work),
        "movement": _movement(part, anchor, work),
        "appendix": _appendix(part, room, work),
        "rules": [("did not finish", [*part.failed.items()]), ("not run", [*part.silent.items()])],
        "ran": [(code, code in codes) for code in part.passed],
    }


def _holdings(ckpt: Checkpoint, work: _Work) -> dict[str, Any] | None:
    """The matrix of ranks or files and layers, a row for all that look the same; None for a job, or without columns."""
    contents = rank_contents_of(ckpt) if ckpt.ranks is None and work.room > 0 else None
    if contents is None or not contents.columns:
        return None
    shown, left = ranks.folded(contents)
    heads, places, legend = ranks.places_of(contents.columns, _MATRIX, True)
    middle = [
        np.median([values[rows] for values in (contents.size, contents.model, contents.optimizer)], 1)
        for _, rows in shown
    ]
    most = max(1, *(size for size, _, _ in middle))
    rows, used, kinds = [], set[int](), set[str]()
    for (label, members), (size, model, optimizer) in zip(shown, middle, strict=True):
        cells = ranks.cells_of(contents, members[0], places)
        used.update(cells)
        counts = ((cells.count(i), name) for i, name in enumerate(ranks.STATE_NAMES))
        words = f"{label}: {', '.join(f'{count} {name}' for count, name in counts if count)}"
        sizes = ranks.sizes_of(contents, members)
        amounts = {"model": model, "optimizer": optimizer, "others": max(size - model - optimizer, 0)}
        shares = [(f"share-{kind}", amount / most) for kind, amount in amounts.items() if amount > 0]
        kinds.update(kind for kind, amount in amounts.items() if amount > 0)
        bar = svg.size_bar(shares, f"{label}: {sizes[0]}") if shares else ""
        rows.append((label, markup(svg.matrix_row(cells, words)), markup(bar), *sizes, *[""] * (3 - len(sizes))))
    work.room -= len(str(rows))
    return {
        "heads": markup(svg.matrix_heads(heads)),
        "rows": rows,
        "left": left,
        "legend": legend,
        "signs": [
            *((svg.CELL_KINDS[i], ranks.STATE_NAMES[i]) for i in sorted(used - {-1})),
            *((f"share-{kind}", f"bytes of {kind}") for kind in ("model", "optimizer", "others") if kind in kinds),
        ],
        "sentences": list(ranks.sentences(contents)),
    }


def _movement(part: CheckpointReport, anchor: str, work: _Work) -> dict[str, Any] | None:
    """The map of how far weights moved since the step before, with links to findings; None where few were compared."""
    ckpt = part.checkpoint
    movements = movements_of(ckpt) if work.room > 0 else []
    if len(movements) < _FEWEST_MOVED or ckpt.changes is None:
        return None
    marked: dict[str, str] = {}
    for group in part.groups:
        if group.lead.severity > Severity.INFO and group.lead.rule.depth.opens_records:  # on numbers
            for key in (key for item in group.members for key in item.keys):
                marked.setdefault(key, f"{anchor}-{group.number}")
    made = movement_map(f"How far the weights moved since {older_name(ckpt)}", movements, marked)
    drawn, whole = len(ckpt.changes.rows), ckpt.changes.chunks
    if drawn < whole:
        made["sentences"].append(f"By elements of {drawn:,} of {plural(whole, 'chunk')} of weights and states.")
    work.room -= _CELL * sum(len(cells) for _, cells in made["rows"])
    return made


def _cause(part: CheckpointReport, cause: Cause, anchor: str) -> dict[str, Any]:
    """A cause with a link to the first of its findings of each rule."""
    groups = grouped((group.lead.code, f"{anchor}-{group.number}") for group in part.groups_of(cause))
    firsts = [(code, anchors[0]) for code, anchors in groups.items()]
    return {"name": cause.name, "sentence": cause.sentence, "do": cause.do, "groups": firsts}


def _notes(part: CheckpointReport, group: FindingGroup) -> list[Note]:
    """The notes of a group; of one that a cause explains it says so, not what a fault of its own would ask for."""
    listed = full.notes(group)
    if group not in part.folded:
        return listed
    explained = "explained", f"by the cause {part.folded[group].name} above"
    return [note for note in listed if note[0] not in ("why", "hint")] + [explained]


def _group(part: CheckpointReport, group: FindingGroup, anchor: str, work: _Work) -> dict[str, Any]:
    """What the template needs of a group of findings; pictures only while there is room for them."""
    ckpt, lead, finding = part.checkpoint, group.lead, group.lead.finding
    before, has_name, after = finding.message.partition("{of}")
    page = work.pages.setdefault(lead.code, anchor)
    pictures: dict[str, Any] = {}
    if is_shown := work.room > 0:
        tensor, region = finding.at.tensor, finding.at.region
        grid = make_grid(tensor, region) if tensor and region else None
        marked = marked_boxes(tensor, region, finding.at.rows) if tensor and region and grid else []
        pictures["map"] = None if grid is None or finding.detail else _map(ckpt, grid, marked)
        pictures |= {"chunks": _chunks(ckpt, finding, grid), "graphs": _graphs(ckpt, finding)}
        work.room -= len(str(pictures))
    return {
        "id": anchor,
        "level": lead.severity.label,
        "code": lead.code,
        "name": lead.rule.name,
        "sentence": (cut_names(before, lead.fqn), cut(lead.fqn or "") if has_name else "", cut_names(after, lead.fqn)),
        "place": finding.at.label or full.place_in_words(ckpt, finding),
        "keys": group.key_count,
        "ranks": ranges(_ranks(group.members)),
        "missing": _missing_from([lead]),
        "detail": finding.detail,
        "is_shown": is_shown,
        "notes": [(label, _items(label, text)) for label, text in _notes(part, group)],
        **pictures,
        "page": page if page != anchor else "",
        "summary": lead.rule.summary,
        "sections": [(heading, text) for heading in SECTIONS if (text := lead.rule.section(heading))],
    }


def _ranks(diagnostics: Iterable[Diagnostic]) -> set[int]:
    """The ranks that findings concern: those that they name, or the one in the file's name."""
    named: set[int] = set()
    for at in (item.finding.at for item in diagnostics):
        ranks = at.ranks or (rank_of(at.file),)
        named.update(rank for rank in ranks if rank is not None)
    return named


def _missing_from(diagnostics: Sequence[Diagnostic]) -> str:
    """Which ranks should hold what is missing, in words; "" where that is not known, or nothing is missing."""
    lacking = _ranks(item for item in diagnostics if _is_gap(item.finding))
    return f"missing from {named_ranks(lacking)}" if lacking else ""


def _is_gap(finding: Finding) -> bool:
    """Whether a finding is about a region that no chunk holds."""
    tensor, region = finding.at.tensor, finding.at.region
    return tensor is not None and region is not None and svg.region_kind(tensor.tiling, region) == "gap"


def _items(label: str, text: str) -> str | list[str]:
    """A note of several names as a list, one of a single name or of a sentence as it is."""
    if label not in _LISTS:
        return text
    items = _BETWEEN.sub(lambda match: match[0] if match[0].startswith("(") else "\0", text).split("\0")
    return items if len(items) > 1 else text


def _map(ckpt: Checkpoint, grid: Grid, marked: Sequence[Box]) -> dict[str, Any]:
    """The chunk map with what its colours mean and how much is marked."""
    picture, volume = svg.chunk_map(ckpt, grid, marked), sum(box.volume for box in marked)
    count = nbytes(grid.tensor.dtype, volume)
    place = str(marked[0]) if len(marked) == 1 else plural(len(marked), "chunk")
    facts = [place, plural(volume, "element"), *([human_bytes(count)] if count is not None else [])]
    return {"svg": markup(picture), "facts": facts, "legend": _legend([picture])}


def _legend(pictures: Sequence[str]) -> list[tuple[str, str]]:
    """The classes that pictures use, with what they mean."""
    return [(kind, text) for kind, text in _LEGEND.items() if any(f'class="{kind}"' in picture for picture in pictures)]


def _chunks(ckpt: Checkpoint, finding: Finding, grid: Grid | None) -> dict[str, Any]:
    """The chunks of the map, or of the finding: letter, region, file, rank, bytes."""
    tensor = finding.at.tensor
    if tensor is None:
        return {"rows": [], "more": 0}
    letters = {} if grid is None else grid.legend
    is_gap = _is_gap(finding)  # the chunks beside a hole are healthy
    named = dict.fromkeys([*letters, *(row for row in finding.at.rows if 0 <= row < len(tensor.chunks))])
    rows, states = [], chunk_states(ckpt, tensor)
    for row in list(named)[:_CHUNK_LIMIT]:
        record = int(tensor.chunks.record[row])
        file, offset, length = ckpt.byte_range_of(record) if record >= 0 else ("", 0, 0)
        rank = rank_of(file)
        rows.append(
            {
                "letter": letters.get(row, ""),
                "region": str(tensor.tiling.box(row)),
                "file": cut(file) or "stored nowhere",
                "rank": "" if rank is None else str(rank),
                "bytes": f"{offset:,}-{offset + length:,}" if record >= 0 and ckpt.locates_bytes else "",
                "lost": STATES[states[row]] if states[row] > NOT_CHECKED else "",
                "is_concerned": row in finding.at.rows and not is_gap,
            }
        )
    return {"rows": rows, "more": len(named) - len(rows)}


def _graphs(ckpt: Checkpoint, finding: Finding) -> list[dict[str, Any]]:
    """The graphs of at most two axes that are cut: those on which the region is a part, else the most cut one."""
    tensor, region = finding.at.tensor, finding.at.region
    if tensor is None or region is None or not tensor.is_sound or len(tensor.chunks) > _GRAPH_LIMIT:
        return []
    tiling, shape = tensor.tiling, tensor.global_shape
    axes = [a for a in range(len(shape)) if (region.offsets[a], region.ends[a]) != (0, shape[a])][:2]
    if not axes and _most_cut(tiling)[1] > 1:
        axes = [_most_cut(tiling)[0]]
    drawn = []
    for axis in axes:
        graph = axis_graph(tiling, axis)
        name = axis_name(ckpt, axis, len(graph))
        label = f"{name}: {plural(len(graph), 'interval')}, {plural(graph.number_of_edges(), 'link')}"
        drawn.append({"label": label, "svg": markup(svg.axis_chain(ckpt, tensor, graph, region, axis, label))})
    return drawn


# ---------------------------------------------------------------- the appendix


def _appendix(part: CheckpointReport, room: int, work: _Work) -> dict[str, Any]:
    """The tensors by layer and by role, at most `room` of them, those that a finding concerns first."""
    ckpt, tensors = part.checkpoint, part.checkpoint.tensors
    flags = grouped((key, item) for group in part.groups for item in group.members for key in item.keys)  # worst first
    concerned = [fqn for fqn in flags if fqn in tensors]
    shown = list(dict.fromkeys([*concerned, *tensors]))[:room]
    layers: dict[tuple[str, int], dict[str, list[dict[str, Any]]]] = {}
    for fqn in sorted(shown, key=lambda fqn: (role(fqn), numbers_in(fqn))):
        numbers = numbers_in(fqn)
        layer = (role(fqn).partition("*")[0], numbers[0]) if numbers else ("", 0)
        layers.setdefault(layer, {}).setdefault(role(fqn), []).append(_row(ckpt, fqn, flags.get(fqn, []), work))
    flagged = [roles for roles in layers.values() if any(row["level"] for rows in roles.values() for row in rows)]
    is_few = sum(len(rows) for roles in flagged for rows in roles.values()) <= _OPEN_LIMIT
    sections = [
        {
            "name": f"{head}{number}" if head else "Outside of numbered layers",
            "count": sum(map(len, roles.values())),
            "flags": [row["level"] for rows in roles.values() for row in rows if row["level"]],
            "is_open": is_few and any(row["level"] for rows in roles.values() for row in rows),
            "loose": [row for rows in roles.values() if len(rows) <= _SAME_ROLE for row in rows],
            "roles": [
                (cut(name), rows, sum(bool(row["level"]) for row in rows))
                for name, rows in roles.items()
                if len(rows) > _SAME_ROLE
            ],
        }
        for (head, number), roles in sorted(layers.items())
    ]
    return {
        "sections": sections,
        "legend": _legend([row["svg"] for roles in layers.values() for rows in roles.values() for row in rows]),
        "shown": len(shown),
        "left_out": len(tensors) - len(shown),
        "is_mixed": 0 < len(concerned) < len(shown),
        "has_all_flagged": 0 < len(concerned) <= len(shown),
    }


def _row(ckpt: Checkpoint, fqn: str, diagnostics: list[Diagnostic], work: _Work) -> dict[str, Any]:
    """What the template needs of a tensor in the table of all."""
    tensor = ckpt.tensors[fqn]
    row: dict[str, Any] = {
        "name": cut(tensor.fqn),
        "kind": f"{tensor.dtype} {cut(shape_text(tensor.global_shape))}",
        "level": diagnostics[0].severity.label if diagnostics else "",
        "codes": list(dict.fromkeys(item.code for item in diagnostics)),
        "svg": "",
        "cut": plural(len(tensor.chunks), "chunk"),
        "missing": "",
    }
    if not tensor.is_sound or not tensor.volume or not tensor.global_shape:
        return row
    tiling = tensor.tiling
    axis, count = _most_cut(tiling)
    here = [item for item in diagnostics if item.fqn == fqn]  # of others the region lies in another tensor
    places = ((item.finding.at.region, item.finding.at.rows) for item in here)
    boxes = dict.fromkeys(box for region, rows in places if region for box in marked_boxes(tensor, region, rows))
    marks = (
        *((r.offsets[axis], r.ends[axis], svg.region_kind(tiling, r)) for r in list(boxes)[:_MARK_LIMIT]),
        *svg.lost_marks(tensor, chunk_states(ckpt, tensor), axis),
    )
    if (tiling, marks) not in work.strips:
        label = f"{plural(len(tensor.chunks), 'chunk')}, dim {axis} in {plural(count, 'part')}"
        work.strips[tiling, marks] = svg.strip(tiling, axis, marks, label)
    more = f", dim {axis} in {count:,}" if count > 1 else ""
    strip = markup(work.strips[tiling, marks])
    return row | {"svg": strip, "cut": row["cut"] + more, "missing": _missing_from(here)}


def markup(text: str) -> Markup:
    """Text that is markup already: a file of this package, or made by `svg`, which escapes what it is given."""
    from markupsafe import Markup

    return Markup(text)  # noqa: S704
