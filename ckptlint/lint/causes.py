"""Causes: what explains several findings of a checkpoint at once, and is said before them.

A cause is data, one file of `rules/causes/`: which findings it asks for, what these share, which speak against it, its
sentence and what to do. It looks at codes, keys, files, ranks and kinds of findings, never at their words.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from ckptlint.grouping import grouped
from ckptlint.lint.registry import load_rules, rules_package
from ckptlint.lint.report import Cause, CheckpointReport, Diagnostic
from ckptlint.model.text import at_most, fold_names, join_words, plural, ranges
from ckptlint.patterns import lazy_pattern
from ckptlint.rule import Severity
from ckptlint.vocabulary.metadata_files import ranks_in
from ckptlint.vocabulary.strict_toml import made_of, own_file, toml_table

InCommon = Literal["keys", "files", "ranks"]
"""What findings may have in common."""

_SHOWN = _LISTED_RANKS = 3
_PLACEHOLDER = lazy_pattern(r"\{([a-z+]+)\.([a-z]+)(?::([a-z ]+))?\}")
_OPTIONAL = lazy_pattern(r"\[([^\[\]]*)\]")


@dataclass(frozen=True, slots=True)
class Clause:
    """Findings of one sort.

    Attributes:
        codes: their rule is one of these.
        kinds: their `kind` is one of these; () for any.
        severity: the lowest that counts.
        same: what each shares with one of the findings of the first clause.
        other: what each shares with none of them.
        least: how many there must be.
        ranks: of how many ranks they may be; 0 for any number.
    """

    codes: tuple[str, ...]
    kinds: tuple[str, ...] = ()
    severity: Literal["info", "warning", "error"] = "info"
    same: tuple[InCommon, ...] = ()
    other: tuple[InCommon, ...] = ()
    least: int = 1
    ranks: int = 0


@dataclass(frozen=True, slots=True)
class KnownCause:
    """A cause as its file describes it.

    Attributes:
        name: that of the file, accepted by `ckptlint explain`.
        summary: one sentence that is true of every checkpoint it fires on.
        sentence: `{clause.what}` stands for what the findings of a clause (or of several, `a+b`) name: codes, keys,
            files, ranks, identity, regions, count; `{clause.what:noun}` puts the noun before it, or after a count. What
            stands in square brackets is left out where a placeholder in it names nothing.
        do: what to do, as an order.
        why: how it comes about.
        see: where it was met.
        find: clauses that must all be met; those of the first are the ones that others share something with.
        also: clauses whose findings belong to it where there are any.
        never: clauses of which none may be met; where one of their rules did not judge, the cause is not said.
        over: names of causes that are not said where this one is, since it says more.
    """

    name: str
    summary: str
    sentence: str
    do: str
    why: str
    see: str
    find: Mapping[str, Clause]
    also: Mapping[str, Clause] = field(default_factory=dict)
    never: Mapping[str, Clause] = field(default_factory=dict)
    over: tuple[str, ...] = ()


def fixture_of(known: KnownCause) -> Path:
    """The cases of a cause."""
    return Path(rules_package().__path__[0]).parent / "fixtures" / "causes" / f"{known.name}.toml"


@cache
def load_causes() -> tuple[KnownCause, ...]:
    """All causes, by name; raises OwnFileError, with file and entry, where a file is not as this module has it."""
    folder = Path(rules_package().__path__[0]) / "causes"
    return tuple(own_file(path, partial(read_cause, path.name)) for path in sorted(folder.glob("*.toml")))


def read_cause(file: str, text: str) -> KnownCause:
    """One file.

    Raises:
        ValueError: an entry that nobody knows, one that is missing, or a value of another form; with file and place.
    """
    known = made_of(KnownCause, file, toml_table(file, text), name=Path(file).stem)
    codes = {rule.code for rule in load_rules()}
    for section, clauses in {"find": known.find, "also": known.also, "never": known.never}.items():
        for name, clause in clauses.items():
            if unknown := [code for code in clause.codes if code not in codes]:
                raise ValueError(f"{file}: {section}.{name}.codes has {unknown[0]!r}, which is not a rule")
    return known


def with_causes(report: CheckpointReport) -> CheckpointReport:
    """The report with the causes that explain several of the findings that count; none rather than a wrong one."""
    if not any(item.severity > Severity.INFO for item in report.diagnostics):
        return report
    counting = grouped((item.code, item) for item in report.diagnostics)
    # what was set aside speaks against a cause still
    at_all = grouped((item.code, item) for item in (*report.diagnostics, *report.ignored))
    judged = {*report.passed, *report.not_applicable}
    matched = [
        (known, by_clause)
        for known in load_causes()
        if judged.issuperset(code for clause in known.never.values() for code in clause.codes)
        and (by_clause := _match(known, counting, at_all))
    ]
    beaten = {name for known, _ in matched for name in known.over}
    matched = [(known, by_clause) for known, by_clause in matched if known.name not in beaten]
    claims = Counter(number for _, by_clause in matched for number in _members(by_clause))
    causes = []
    for known, by_clause in matched:
        members = _members(by_clause)
        if all(claims[number] == 1 for number in members):  # of two causes of one finding none is sure
            findings = tuple(item for item in report.diagnostics if id(item) in members)
            causes.append(Cause(known.name, _filled(known.sentence, by_clause), known.do, findings))
    causes.sort(key=lambda cause: -max(item.severity for item in cause.findings))
    return replace(report, causes=tuple(causes)) if causes else report


def _match(
    known: KnownCause, by_code: Mapping[str, list[Diagnostic]], at_all: Mapping[str, list[Diagnostic]]
) -> dict[str, list[Diagnostic]]:
    """Clause -> its findings, where all that must be found is and nothing that must not; {} otherwise."""
    by_clause = {name: _of(clause, by_code) for name, clause in known.find.items()}
    if not all(by_clause.values()):
        return {}
    first = next(iter(known.find))
    leads = by_clause[first]
    for name, clause in known.find.items():
        leads = _sharing(leads, by_clause[name], clause.same)
    for clause in known.never.values():
        against = _of(clause, at_all)
        if clause.same:
            leads = _apart(leads, _sharing(leads, against, clause.same))
        elif _apart(against, _sharing(against, leads, clause.other) if clause.other else []):
            return {}
    by_clause[first] = leads
    for name, clause in {**known.find, **known.also}.items():
        matching = by_clause[name] if name in by_clause else _of(clause, by_code)
        by_clause[name] = _sharing(matching, leads, clause.same)
    for name, clause in known.find.items():
        if len(by_clause[name]) < clause.least or 0 < clause.ranks < len(set().union(*map(_ranks, by_clause[name]))):
            return {}
    is_loud = any(item.severity > Severity.INFO for items in by_clause.values() for item in items)
    return by_clause if is_loud and len(_members(by_clause)) > 1 else {}


def _members(by_clause: Mapping[str, list[Diagnostic]]) -> set[int]:
    """The `id` of every finding."""
    return {id(item) for items in by_clause.values() for item in items}


def _of(clause: Clause, by_code: Mapping[str, list[Diagnostic]]) -> list[Diagnostic]:
    least = Severity[clause.severity.upper()]
    return [
        item
        for code in clause.codes
        for item in by_code.get(code, ())
        if item.severity >= least and (not clause.kinds or item.finding.kind in clause.kinds)
    ]


def _sharing(items: list[Diagnostic], others: list[Diagnostic], same: Sequence[InCommon]) -> list[Diagnostic]:
    """The findings that share something with the others, for each thing that they must share."""
    for what in same:
        names = _NAMES[what]
        known = set().union(*(names(item) for item in others))
        items = [item for item in items if not known.isdisjoint(names(item))]
    return items


def _apart(items: list[Diagnostic], others: list[Diagnostic]) -> list[Diagnostic]:
    """The findings that are not among the others."""
    known = set(map(id, others))
    return [item for item in items if id(item) not in known]


def _files(item: Diagnostic) -> set[str]:
    return {item.finding.at.file, *item.finding.files} - {""}


def _ranks(item: Diagnostic) -> set[int]:
    return {*item.finding.at.ranks, *ranks_in(_files(item))}


_NAMES: dict[InCommon, Callable[[Diagnostic], Set[Any]]] = {
    "keys": lambda item: frozenset(item.keys),
    "files": _files,
    "ranks": _ranks,
}


def _filled(text: str, by_clause: Mapping[str, list[Diagnostic]]) -> str:
    """The text with what the findings name; its optional parts only where they name something."""

    def value(match: re.Match[str]) -> str:
        items = [item for clause in match[1].split("+") for item in by_clause.get(clause, ())]
        return _VALUES[match[2]](items, match[3] or "")

    def part(match: re.Match[str]) -> str:
        return match[1] if all(map(value, _PLACEHOLDER.finditer(match[1]))) else ""

    return _PLACEHOLDER.sub(value, _OPTIONAL.sub(part, text))


def _with_noun(noun: str, count: int, text: str) -> str:
    return " ".join(filter(None, [noun and noun + "s" * (count > 1), text]))


def _some(names: Iterable[str], noun: str) -> str:
    """A few names, and how many more there are."""
    folded = list(names)
    return _with_noun(noun, len(folded), join_words(at_most(folded, _SHOWN)))


def _numbers(values: Iterable[int], noun: str) -> str:
    numbers = sorted(set(values))
    text = join_words([*map(str, numbers)]) if len(numbers) <= _LISTED_RANKS else ranges(numbers)
    return _with_noun(noun, len(numbers), text) if numbers else ""


def _rank_sets(items: Sequence[Diagnostic], noun: str) -> str:
    """The ranks of all findings together, or set by set where findings concern several ranks each."""
    sets = dict.fromkeys(tuple(sorted(ranks)) for item in items if (ranks := _ranks(item)))
    if len(sets) > 1 and any(len(ranks) > 1 for ranks in sets):
        return ", ".join(at_most((_numbers(ranks, noun) for ranks in sets), _SHOWN, "set", "and "))
    return _numbers(set().union(*sets), noun)


def _identity(items: Sequence[Diagnostic], noun: str) -> str:
    names = dict.fromkeys(name for item in items for name in item.finding.identity)
    if all(map(str.isdecimal, names)):
        return _with_noun(noun, len(names), ranges(map(int, names)))
    return _some(names, noun)


_VALUES: dict[str, Callable[[Sequence[Diagnostic], str], str]] = {
    "codes": lambda items, _: ", ".join(sorted({item.code for item in items})),
    "count": lambda items, noun: plural(len(items), noun) if items else "",
    "files": lambda items, noun: _some(sorted(set().union(*map(_files, items))), noun),
    "identity": _identity,
    "keys": lambda items, noun: _some(fold_names(item.fqn for item in items if item.fqn), noun),
    "ranks": _rank_sets,
    "regions": lambda items, noun: _some(
        dict.fromkeys(str(at) for item in items if (at := item.finding.at.region)), noun
    ),
}
