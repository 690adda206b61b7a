"""Cases of fixtures: read, run with one rule, and worded as the fixture expects them.

For authors of rules and plug-ins: `read_cases` reads a fixture, `run_case` judges one case with one rule. torch is not
needed: the metadata is pickled with classes that only carry torch's names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ckptlint.analysis.ranks.rank_chunks import as_checkpoint
from ckptlint.depth import Depth
from ckptlint.lint.engine import run_rules
from ckptlint.lint.pages.fixture_cases import case_tables
from ckptlint.lint.reading import read_records, with_changes
from ckptlint.lint.registry import load_rules
from ckptlint.lint.report import CheckpointReport
from ckptlint.lint.settings.ignores import KeyIgnore, set_aside
from ckptlint.lint.settings.selection import ignorable
from ckptlint.loaders.checkpoint import open_checkpoint
from ckptlint.loaders.layouts import CheckpointPlace
from ckptlint.loaders.reference import read_reference
from ckptlint.model import Checkpoint, Problem, RankFinding, RankTable, Reference
from ckptlint.payload.reading import default_reading, with_reference
from ckptlint.rule import Finding, Rule, Severity
from ckptlint.storage.local import LocalFolder
from ckptlint.testing.folders import parse_chunk, write_checkpoint, write_reference


@dataclass(frozen=True, slots=True)
class Case:
    """One case of a fixture.

    Attributes:
        name: what it shows.
        table: the checkpoint, as TOML gave it (fixtures/README.md explains the keys).
        expect: what the rule must find, as `described` words it; nothing for a good case.
        says: texts that must appear in the full report.
        others: whether other rules find something worse than a note here.
        yielding: rules that report the same keys when they run alone, and nothing beside the rule of the case.
    """

    name: str
    table: dict[str, Any]
    expect: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    others: bool = False
    yielding: tuple[str, ...] = ()

    @property
    def is_live(self) -> bool:
        """Whether it is about what the ranks of a job hold, not about files."""
        return bool(self.table.keys() & {"rank_chunks", "rank_findings"})


_KEYS = frozenset(
    {"archives", "before", "beside", "bytes", "common", "crash", "depth", "enums_by_name", "expect", "files"}
    | {"ignores", "links", "mcore_data", "megatron", "metadata", "name", "names", "objects", "older", "optimizers"}
    | {"others", "plans", "protocol", "rank_chunks", "rank_files", "rank_findings", "ranks", "raw", "reference"}
    | {"reference_config", "root", "safetensors", "says", "seal", "state", "step", "stray", "tensors", "torch"}
    | {"unstored", "views", "yielding", "younger"}
)
_TENSOR_KEYS = frozenset({"chunks", "dtype", "holds", "records", "shape", "transform"})


def read_cases(path: Path) -> list[Case]:
    """The cases of a fixture file.

    Raises:
        ValueError: a key that nobody knows, which would leave the case without what it says; a `like` that names
            no case; with file and case.
    """
    cases = []
    for table in case_tables(path):
        entries = [(entry, _KEYS) for entry in (table, table.get("before", {}))]
        entries += [(tensor, _TENSOR_KEYS) for tensor in table.get("tensors", {}).values()]
        if unknown := {key for entry, known in entries for key in entry.keys() - known}:
            raise ValueError(f"{path.name}, case {table.get('name')!r}: there is no key {min(unknown)!r}")
        name, expect, says = table.pop("name"), table.pop("expect", ()), table.pop("says", ())
        others, yielding = table.pop("others", False), tuple(table.pop("yielding", ()))
        cases.append(Case(name, table, tuple(expect), tuple(says), others, yielding))
    return cases


def run_case(rule: Rule, case: Case, folder: Path) -> CheckpointReport:
    """Write the case into an empty folder, read it back, and judge it with one rule; or what its ranks hold."""
    depth = depth_of(rule, case)
    ckpt = checkpoint_of_ranks(case.table) if case.is_live else open_case(case, folder, depth)
    return judge_case(rule, case, ckpt, depth)


def depth_of(rule: Rule, case: Case) -> Depth:
    """The depth at which a case of a rule is read and judged."""
    least = Depth.METADATA if case.is_live else Depth.FILES
    return Depth(case.table.get("depth", max(rule.depth, least, key=[*Depth].index)))


def judge_case(rule: Rule, case: Case, ckpt: Checkpoint, depth: Depth) -> CheckpointReport:
    """Judge a case that was read back with one rule, beside the crash and the ignores that the case asks for."""
    rules = [rule, _crashing(case.table["crash"])] if "crash" in case.table else [rule]
    ignores = []
    for table in case.table.get("ignores", ()):
        codes = frozenset[str]().union(*(ignorable(load_rules(), token) for token in table["rules"]))
        ignores.append(KeyIgnore(table["key"], codes, "the case says so", "ckptlint.toml"))
    named = set().union(*(ignore.codes for ignore in ignores))
    rules += [loaded for loaded in load_rules() if loaded.code in named]
    return set_aside([run_rules(ckpt, rules, depth)], rules, ignores)[0]


def open_case(case: Case, folder: Path, depth: Depth = Depth.FILES) -> Checkpoint:
    """Write the case into an empty folder and read it back, with the step before it and its reference."""
    written = write_checkpoint(case.table, folder)
    reference = None
    if case.table.keys() & {"reference", "reference_config"}:
        reference = read_reference(str(write_reference(case.table, folder.with_name(f"{folder.name}-expected"))))
    ckpt = load_folder(written, depth, reference)
    views = [Problem("view", **view) for view in case.table.get("views", ())]
    ckpt = replace(ckpt, reference=reference, problems=[*ckpt.problems, *views])
    if "before" in case.table:
        older = write_checkpoint(case.table["before"], folder)
        ckpt = replace(ckpt, before=load_folder(older, depth))
        if depth.opens_records:
            ckpt = with_changes(LocalFolder(written), ckpt, LocalFolder(older), default_reading(depth))
    return ckpt


def checkpoint_of_ranks(table: Mapping[str, Any]) -> Checkpoint:
    """The `rank_chunks` chunks and the `rank_findings` of a case, as live mode hands them to the rules."""
    rows = [
        ({"dtype": "float32", "replica": 0, "copies": 0, "digest": 0, "view": 0} | item, rank)
        for item in table.get("rank_chunks", ())
        for rank in item["ranks"]
    ]
    fqns = sorted({item["fqn"] for item, _ in rows})
    dtypes = sorted({item["dtype"] for item, _ in rows})
    width = max((len(item["shape"]) for item, _ in rows), default=0)
    boxes = [parse_chunk(item.get("chunk", ", ".join(":" * len(item["shape"]))), item["shape"]) for item, _ in rows]

    def column(values: Iterable[Any], kind: Any = np.int64) -> Any:
        return np.array(list(values), kind)

    def padded(values: Iterable[Sequence[int]], fill: int) -> Any:
        return column((*value, *[fill] * (width - len(value))) for value in values).reshape(len(rows), width)

    ranks = RankTable(
        world_size=1 + max([rank for _, rank in rows], default=3),
        keys=len(fqns),
        fqns=fqns,
        fqn=column((fqns.index(item["fqn"]) for item, _ in rows), np.int32),
        rank=column((rank for _, rank in rows), np.int32),
        is_object=column((item["dtype"] == "" for item, _ in rows), bool),
        dtypes=dtypes,
        dtype=column((dtypes.index(item["dtype"]) if item["dtype"] else -1 for item, _ in rows), np.int16),
        ndim=column((len(item["shape"]) for item, _ in rows), np.int8),
        offsets=padded((offsets for offsets, _ in boxes), 0),
        sizes=padded((sizes for _, sizes in boxes), 1),
        global_shape=padded((item["shape"] for item, _ in rows), 1),
        replica=column(item["replica"] for item, _ in rows),
        copies=column((item["copies"] for item, _ in rows), np.int32),
        strict=column((item.get("writer") == "mcore" for item, _ in rows), bool),
        digest=column(item["digest"] for item, _ in rows),
        view=column(item["view"] for item, _ in rows),
        findings=tuple(RankFinding(**{"rank": -1, "fqn": ""} | finding) for finding in table.get("rank_findings", ())),
    )
    return as_checkpoint(ranks, "state dict")


def _crashing(code: str) -> Rule:
    """A rule that ends in an error of its own."""

    def check(ckpt: Checkpoint) -> Iterator[Finding]:
        yield from ()
        raise IndexError("tuple index out of range")

    return Rule(code, "crashing-rule", Severity.ERROR, check)


def load_folder(folder: Path, depth: Depth = Depth.FILES, reference: Reference | None = None) -> Checkpoint:
    """The checkpoint of a folder that is one, without looking for steps or components, to compare with a reference."""
    ckpt = open_checkpoint(replace(CheckpointPlace.at(LocalFolder(folder)), of_run=True))
    deep = depth.opens_records and ckpt.readable
    return read_records(LocalFolder(folder), ckpt, with_reference(default_reading(depth), reference)) if deep else ckpt


def described(report: CheckpointReport) -> list[str]:
    """The findings as fixtures word them: `level subject region`, the level only where it is below the rule's own."""
    lines = []
    for item in report.diagnostics:
        level = f"{item.severity.label} " if item.severity < item.rule.severity else ""
        region = f" {item.finding.at.region}" if item.finding.at.region else ""
        lines.append(f"{level}{item.fqn or item.finding.at.file or 'checkpoint'}{region}")
    return sorted(lines)


def fixture_cases(folder: Path) -> Iterator[tuple[str, Case]]:
    """Every case of every fixture in a folder, with the code that its file is named for."""
    yield from ((path.stem, case) for path in sorted(folder.glob("*.toml")) for case in read_cases(path))
