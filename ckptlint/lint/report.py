"""From findings to a verdict: diagnostics, groups of like ones, fingerprints, exit code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from ckptlint.depth import Depth
from ckptlint.errors import CheckpointError, ConfigError
from ckptlint.grouping import grouped
from ckptlint.model import Checkpoint
from ckptlint.model.text import plural, ranges
from ckptlint.rule import MOST_KEYS, Finding, Location, Note, Rule, Severity
from ckptlint.shown import Shown
from ckptlint.vocabulary.frameworks import number_of
from ckptlint.vocabulary.keys import role
from ckptlint.vocabulary.metadata_files import rank_of

FailOn = Literal["info", "warning", "error", "never"]
_PROPER_NAMES = ("Megatron", "PyTorch", "DCP")

Verdict = Literal["pass", "fail", "incomplete"]

UNREADABLE = "needs {}"
"""Why a rule is not run where the metadata, whose file is named here, could not be read."""


@dataclass(frozen=True, slots=True)
class Ignored:
    """Why a finding does not count: the settings say so and give a reason, or an earlier report has it."""

    by: Literal["per-key-ignores", "baseline"]
    reason: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Diagnostic:
    """A finding together with the rule that made it; where it does not count, with why (`ignored`)."""

    rule: Rule
    finding: Finding
    severity: Severity
    ignored: Ignored | None = None

    def __repr__(self) -> str:
        return f"<Diagnostic {self.code} {self.severity.label}: {self.title}>"

    @property
    def code(self) -> str:
        return self.rule.code

    @property
    def fqn(self) -> str | None:
        """The key concerned."""
        return self.finding.at.fqn

    @property
    def keys(self) -> tuple[str, ...]:
        """All keys concerned, each once, in the order of the rule; at most `rule.MOST_KEYS` of a rule's list."""
        return tuple(dict.fromkeys(filter(None, (self.fqn, *self.finding.keys))))

    @property
    def region(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Offsets and sizes of the part concerned."""
        return (region.offsets, region.sizes) if (region := self.finding.at.region) else None

    @property
    def message(self) -> str:
        """The sentence without the key's name, for formats that give the name apart."""
        return self.finding.message.replace("{of}", "")

    @property
    def title(self) -> str:
        """The sentence with the key's name."""
        return self.finding.message.replace("{of}", f" of {self.fqn}" if self.fqn else "")

    @property
    def why(self) -> str:
        """Why it matters, in one sentence."""
        if self.finding.why:
            return self.finding.why
        text = self.rule.section("Why it matters").partition(". ")[0].rstrip(".")
        first = text.partition(" ")[0]
        return text if "-" in first or first in _PROPER_NAMES else text[:1].lower() + text[1:]

    @property
    def confidence_note(self) -> Note:
        """How sure the finding is, and what it was inferred from; without a text where the files state it."""
        inferred = f"from {self.finding.inferred_from}" if self.finding.inferred_from else ""
        if self.finding.confidence == "certain":
            return "inferred", inferred
        return "confidence", self.finding.confidence + (inferred and f", inferred {inferred}")

    def all_notes(self) -> list[Note]:
        """Every note, those that cost time included; the hint comes last."""
        finding = self.finding
        more = finding.explain() if finding.explain else ()
        notes = [*finding.notes, *more, self.confidence_note, ("hint", finding.hint)]
        return sorted((note for note in notes if note[1]), key=lambda note: note[0] == "hint")

    @property
    def fingerprint(self) -> str:
        """Identity across steps of a run: code, key, region and `identity`; no path, step or file."""
        import hashlib

        finding = self.finding
        facts = (self.code, self.fqn, self.region, finding.identity or (self.message if self.fqn is None else ()))
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, eq=False)
class FindingGroup:
    """Like findings: one is shown in full, the others by name."""

    number: int
    members: list[Diagnostic]

    @property
    def lead(self) -> Diagnostic:
        """The one to show."""
        return self.members[0]

    @property
    def key_count(self) -> str:
        """How many keys the members concern, for a table; "" where they name none."""
        count = len({key for item in self.members for key in item.keys})
        is_cut = any(len(item.finding.keys) >= MOST_KEYS for item in self.members)
        return f"{count:,}{' or more' * is_cut}" if count else ""


@dataclass(frozen=True, slots=True)
class RuleCounts:
    """What became of the rules; every report format takes its numbers from here.

    Attributes:
        ran: they came to their end, with or without findings.
        not_run: those of `CheckpointReport.silent`.
        failed: they ended in an error.
    """

    ran: int
    not_run: int
    failed: int


@dataclass(frozen=True, slots=True, eq=False)
class Cause:
    """What explains several findings at once.

    Attributes:
        name: accepted by `ckptlint explain`.
        sentence: what happened, with the codes of the findings that speak for it.
        do: what to do now.
        findings: those that it explains, in the order in which they were found.
    """

    name: str
    sentence: str
    do: str
    findings: tuple[Diagnostic, ...]

    @property
    def codes(self) -> tuple[str, ...]:
        """The codes of the findings, in order."""
        return tuple(sorted({item.code for item in self.findings}))


@dataclass(frozen=True, eq=False, repr=False)
class CheckpointReport:
    """The findings on one checkpoint, and what became of each rule.

    Attributes:
        diagnostics: the findings that count.
        ignored: those set aside by the settings or a baseline; they count nowhere, machine formats list them.
        passed: codes of rules that ran to their end, with or without findings.
        not_run: code -> why a rule could not judge (depth, unreadable metadata).
        not_applicable: code -> why there was nothing to judge.
        failed: code -> the error a rule ended in.
        seconds: code -> time the rule took.
        causes: what explains several of the findings at once, the worst first.
    """

    checkpoint: Checkpoint
    diagnostics: list[Diagnostic] = field(default_factory=list)
    passed: list[str] = field(default_factory=list)
    not_run: dict[str, str] = field(default_factory=dict)
    not_applicable: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    ignored: list[Diagnostic] = field(default_factory=list)
    causes: tuple[Cause, ...] = ()

    def __repr__(self) -> str:
        return f"<CheckpointReport {self.checkpoint.path}: {_counted(self.counts)}>"

    @cached_property
    def counts(self) -> Counter[str]:
        """Problems by severity: a group of like findings counts once."""
        return Counter(group.lead.severity.label for group in self.groups)

    def without(self, why: Callable[[Diagnostic], Ignored | None]) -> CheckpointReport:
        """The report with the findings that have a reason not to count set aside."""
        judged = [(item, why(item)) for item in self.diagnostics]
        hidden = [replace(item, ignored=reason) for item, reason in judged if reason]
        if not hidden:
            return self
        counting = [item for item, reason in judged if not reason]
        return replace(self, diagnostics=counting, ignored=[*self.ignored, *hidden])

    @cached_property
    def groups(self) -> list[FindingGroup]:
        """Findings of one rule, severity and sentence about names of one role; worst first, then by code."""
        return _grouped(self.diagnostics, 1)

    def groups_of(self, cause: Cause) -> list[FindingGroup]:
        """The groups that hold a finding that the cause explains."""
        explained = {*cause.findings}
        return [group for group in self.groups if not explained.isdisjoint(group.members)]

    @cached_property
    def folded(self) -> dict[FindingGroup, Cause]:
        """The groups that a cause explains together with others: a line of each below the cause is enough."""
        explained = {item for cause in self.causes for item in cause.findings}
        several = ((cause, groups) for cause in self.causes if len(groups := self.groups_of(cause)) > 1)
        return {group: cause for cause, groups in several for group in groups if explained.issuperset(group.members)}

    @cached_property
    def ignored_groups(self) -> list[FindingGroup]:
        """The same of the ignored findings, each group with one reason; numbered after the others."""
        return _grouped(self.ignored, len(self.groups) + 1)

    @cached_property
    def silent(self) -> dict[str, str]:
        """Code -> why the rule says nothing: not part of this run, the depth, unreadable metadata, nothing to judge."""
        return dict(sorted({**self.not_run, **self.not_applicable}.items()))

    @property
    def blocked(self) -> list[str]:
        """Codes of the rules that could not run because the metadata could not be read."""
        reason = UNREADABLE.format(self.checkpoint.metadata_file)
        return [code for code, why in self.not_run.items() if why == reason]

    @property
    def needing_the_rest(self) -> list[str]:
        """Codes of the rules that could not run because files of the save are missing or not read."""
        reason = self.checkpoint.partial_because
        return [code for code, why in self.not_applicable.items() if reason and why == reason]

    @property
    def is_incomplete(self) -> bool:
        """Whether a rule ended in an error, or something could not be judged; findings that fail the run go first."""
        ckpt = self.checkpoint
        unread = any(p.kind == "unread" or (p.kind == "container" and p.blocks) for p in ckpt.problems)
        return bool(self.failed) or not ckpt.readable or unread


@dataclass(frozen=True, eq=False, repr=False)
class Report(Shown):
    """The outcome of one run.

    Attributes:
        checkpoints: one report each, in the order they were named.
        rules: the rules that were selected.
        not_found: for each path without a checkpoint, the sentence that says so.
        unreadable: reads that the operating system or network refused.
        unread_steps: path and number of each step of which something was not found or read, and why; in the lists above
            too.
        lenient: the options that leave rules out or make errors less severe, by which a step may pass.
        seconds: the whole run.
        fixed_since_baseline: the findings of the baseline that no longer occur, as sentences.
        settings: the settings file that was used, "" without one.
        command: the command line, "" for a call from Python.
    """

    checkpoints: list[CheckpointReport]
    rules: tuple[Rule, ...]
    depth: Depth = Depth.FILES
    fail_on: FailOn = "error"
    not_found: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()
    unread_steps: tuple[tuple[str, int, str], ...] = ()
    lenient: tuple[str, ...] = ()
    seconds: float = 0.0
    fixed_since_baseline: tuple[str, ...] = ()
    settings: str = ""
    command: str = ""

    def __repr__(self) -> str:
        what = plural(len(self.checkpoints), "checkpoint")
        why = f", {self.unread[0]}" if self.unread else ""
        return f"<Report {what}: {self.verdict}, {_counted(self.counts)}{why}>"

    @cached_property
    def diagnostics(self) -> tuple[Diagnostic, ...]:
        """All findings of all checkpoints that count."""
        return tuple(item for part in self.checkpoints for item in part.diagnostics)

    @cached_property
    def ignored(self) -> tuple[Diagnostic, ...]:
        """The findings that settings or a baseline set aside; `Diagnostic.ignored` says why."""
        return tuple(item for part in self.checkpoints for item in part.ignored)

    def rows(self) -> list[dict[str, Any]]:
        """A row for each finding that counts; None for what it does not have.

        `rank` is the only rank that it concerns; `ranks` all of them as text (`0-3,7`).
        `keys` is how many keys it concerns: `Diagnostic.keys` names them.
        """
        return [
            {
                "code": item.code,
                "rule": item.rule.name,
                "severity": item.severity.label,
                "confidence": item.finding.confidence,
                "fqn": item.fqn,
                "keys": len(item.keys),
                "rank": ranks[0] if len(ranks) == 1 else None,
                "ranks": ranges(ranks) or None,
                "file": item.finding.at.file or None,
                "message": item.title,
                "hint": item.finding.hint or None,
                "checkpoint": part.checkpoint.path,
                "fingerprint": item.fingerprint,
            }
            for part in self.checkpoints
            for item in part.diagnostics
            for ranks in [ranks_named(part.checkpoint, item.finding.at)]
        ]

    @cached_property
    def counts(self) -> Counter[str]:
        """Problems by severity: a group of like findings counts once."""
        return sum((part.counts for part in self.checkpoints), Counter[str]())

    @cached_property
    def rule_counts(self) -> RuleCounts:
        """What became of the rules; one that ran on any of the checkpoints ran."""
        return self.rule_counts_of(*self.checkpoints)

    def rule_counts_of(self, *parts: CheckpointReport) -> RuleCounts:
        """The same on some of the checkpoints."""
        failed = {code for part in parts for code in part.failed}
        ran = {code for part in parts for code in part.passed} - failed
        silent = {code for part in parts for code in part.silent} - failed - ran
        return RuleCounts(len(ran), len(silent), len(failed))

    def added_by(self, depth: Depth) -> int:
        """How many of the selected rules need this depth or a lesser one, and more than those that ran."""
        ran = Depth.HEADERS if self.draws else self.depth
        return sum(depth.reaches(rule.depth) and not ran.reaches(rule.depth) for rule in self.rules)

    @property
    def draws(self) -> bool:
        """Whether numbers were drawn from some records, at a depth that opens none."""
        return not self.depth.opens_records and any(part.checkpoint.payload is not None for part in self.checkpoints)

    def is_failing(self, item: Diagnostic) -> bool:
        """Whether a finding makes the run fail: at or above `fail_on`, and always for errors of fixed rules.

        That a rule crashed never does, nor a warning of what was not read: they make the verdict incomplete.
        """
        least = Severity.ERROR + 1 if self.fail_on == "never" else Severity[self.fail_on.upper()]
        unsafe = item.rule.fixed and item.severity == Severity.ERROR
        unread = item.rule.fixed and item.severity == Severity.WARNING and self.is_incomplete
        return item.rule.after != "rules" and not unread and (item.severity >= least or unsafe)

    @property
    def is_live(self) -> bool:
        """Whether it is about a running job, not about files."""
        return any(part.checkpoint.ranks is not None for part in self.checkpoints)

    @property
    def fails(self) -> bool:
        """Whether findings alone make the run fail."""
        return any(map(self.is_failing, self.diagnostics))

    @property
    def unread(self) -> tuple[str, ...]:
        """A sentence for each path or file that gave no checkpoint to judge."""
        return (*self.unreadable, *self.not_found)

    @cached_property
    def is_incomplete(self) -> bool:
        """Whether some rule or file could not be judged."""
        return bool(self.unreadable) or any(part.is_incomplete for part in self.checkpoints)

    @property
    def exit_code(self) -> int:
        """1 findings, 4 incomplete, 3 nothing there, 0 otherwise; the first that applies."""
        if self.fails:
            return 1
        if self.is_incomplete:
            return 4
        return 3 if self.not_found or not self.checkpoints else 0

    @property
    def verdict(self) -> Verdict:
        """`pass` goes with exit 0 alone."""
        return "pass" if self.passed else "fail" if self.fails else "incomplete"

    @property
    def passed(self) -> bool:
        """Whether everything was judged and nothing fails; the truth of a report, too."""
        return self.exit_code == 0

    def __bool__(self) -> bool:
        return self.passed

    def raise_for_findings(self, level: str | None = None) -> None:
        """Raise unless everything was judged and no finding that counts fails, or reaches the level.

        >>> import ckptlint
        >>> ckptlint.check("fixtures/real/metadata_missing").raise_for_findings()  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ckptlint.errors.CheckpointError: fixtures/real/metadata_missing: COM001 .metadata is missing, ...

        Raises:
            CheckpointError: with the first finding and its checkpoint, or with what could not be judged.
            ConfigError: there is no such level.
        """
        levels = {severity.label: severity for severity in Severity}
        if level is not None and level not in levels:
            raise ConfigError(f"there is no level {level!r}: {', '.join(levels)}")
        for part in self.checkpoints:
            for item in part.diagnostics:
                if self.is_failing(item) if level is None else item.severity >= levels[level]:
                    raise CheckpointError(f"{part.checkpoint.path}: {item.code} {item.title}")
        if self.is_incomplete or self.not_found or not self.checkpoints:
            raise CheckpointError("; ".join((*self.not_found, *self.unreadable)) or "the verdict is incomplete")


def ranks_named(ckpt: Checkpoint, at: Location) -> list[int]:
    """The ranks that a rule names; without any the one in the name of the file."""
    if at.ranks:
        return sorted(set(at.ranks))
    rank, counted = rank_of(at.file), number_of(at.file.rpartition("/")[2])
    if rank is None and counted is not None and counted[0].counted_by == "rank":
        rank = counted[1]
    if rank is None and ckpt.rank_files is not None:
        rank = next((file.numbers.get("rank") for file in ckpt.rank_files.files if file.name == at.file), None)
    return [] if rank is None else [rank]


def _counted(counts: Counter[str]) -> str:
    nouns = {"error": "error", "warning": "warning", "info": "note"}
    return ", ".join(plural(counts[level], noun) for level, noun in nouns.items() if counts[level]) or "no findings"


def _grouped(diagnostics: list[Diagnostic], first: int) -> list[FindingGroup]:
    def alike(item: Diagnostic) -> tuple[Any, ...]:
        group = item.finding.group or (item.message, role(item.fqn) if item.fqn else item.finding.at.file)
        return -item.severity, item.code, group, item.ignored

    ordered = sorted(grouped((alike(item), item) for item in diagnostics).items(), key=lambda pair: pair[0][:2])
    return [FindingGroup(i, members) for i, (_, members) in enumerate(ordered, first)]


def worst(groups: list[FindingGroup], per_rule: int) -> tuple[list[FindingGroup], Counter[str]]:
    """At most so many groups per rule (0 = all), and how many were left out by code."""
    shown, seen, cut = [], Counter[str](), Counter[str]()
    for group in groups:
        seen[group.lead.code] += 1
        if per_rule and seen[group.lead.code] > per_rule:
            cut[group.lead.code] += 1
        else:
            shown.append(group)
    return shown, cut
