"""What a rule is, and what it yields."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from importlib import import_module
from typing import Literal, Self, TypeVar

from ckptlint.depth import Depth
from ckptlint.errors import GIT_LFS_POINTER, LINK_AS_TEXT
from ckptlint.model import Checkpoint, Problem, Tensor
from ckptlint.model.lost_files import LostFiles
from ckptlint.model.tiling import Box

SECTIONS = ("What it checks", "Why it matters", "Usual causes", "How to fix", "See")
"""The headings of a rule's docstring, in order; all but the last are required."""


class Severity(IntEnum):
    """How bad a finding is: an error will not load or loads wrong, a warning was probably not meant."""

    INFO = 1
    WARNING = 2
    ERROR = 3

    @property
    def label(self) -> str:
        """The word shown to users."""
        return self.name.lower()


Confidence = Literal["certain", "likely", "possible"]
"""How sure the evidence of a finding is: two independent witnesses are certain, one that infers is likely."""

CEILING: dict[Confidence, Severity] = {"certain": Severity.ERROR, "likely": Severity.WARNING, "possible": Severity.INFO}
"""The highest severity that a finding of a confidence may have."""


class NotApplicable(Exception):  # noqa: N818  a verdict, not an error
    """Raised by a rule that has nothing to judge here, with the reason."""


_T = TypeVar("_T")


def require(value: _T | None) -> _T:
    """The value: what a rule needs, and the depth that it needs, made sure that it is there."""
    assert value is not None
    return value


Note = tuple[str, str]
"""A label (`why`, `mesh`, `hint`, ...) and a sentence."""


@dataclass(frozen=True, slots=True, eq=False)
class Location:
    """Where a finding is; all of it may be unknown.

    Attributes:
        key: the key concerned, or the tensor that is stored under it, which gives chunk map, dtype and shape.
        region: the part of the tensor concerned.
        rows: chunks concerned, as rows of the tensor's table.
        file: the payload file concerned.
        byte_range: first byte and length within `file`.
        label: the line below the title; by default the metadata file with the tensor's dtype and shape.
        ranks: the ranks concerned, where the rule knows them and the file's name does not say so.
    """

    key: str | Tensor | None = None
    region: Box | None = None
    rows: tuple[int, ...] = ()
    file: str = ""
    byte_range: tuple[int, int] | None = None
    label: str = ""
    ranks: tuple[int, ...] = ()

    @classmethod
    def of_chunk(cls, ckpt: Checkpoint, tensor: Tensor, chunk: int, rank: int = -1) -> Self:
        """A row of the tensor's table, and the rank concerned, -1 for several."""
        box, file = tensor.tiling.box(chunk), ckpt.chunk_file(tensor, chunk)
        return cls(tensor, region=box, rows=(chunk,), file=file, ranks=(rank,) if rank >= 0 else ())

    @property
    def fqn(self) -> str | None:
        """The key concerned."""
        return self.key.fqn if isinstance(self.key, Tensor) else self.key

    @property
    def tensor(self) -> Tensor | None:
        """The tensor concerned, where it is stored."""
        return self.key if isinstance(self.key, Tensor) else None


_POINTERS = {
    GIT_LFS_POINTER: ("git fetched the pointer alone, and no loader follows it", "fetch the file: git lfs pull"),
    LINK_AS_TEXT: (
        "git, an archive or a copy wrote the link as text, and no loader follows it",
        "download or copy it again with links followed",
    ),
}
"""What lies where a file should -> why it does, and what to do."""


def pointer_advice(sentence: str) -> tuple[str, str] | None:
    """Why a file holds a pointer, and what to do, where a sentence says that it does; None for other sentences."""
    return next((texts for name, texts in _POINTERS.items() if name in sentence), None)


@dataclass(frozen=True, slots=True, eq=False)
class Finding:
    """One thing a rule found.

    Attributes:
        message: one sentence; `{of}` stands for " of <key>", which machine formats leave out.
        at: where it is: `Location(tensor)`, `Location(key)`, `Location(file=name)`.
        identity: what identifies the finding besides code, key and region; part of the fingerprint.
        keys: further keys concerned, besides that of `at`, at most MOST_KEYS; causes compare them.
        files: further files concerned, in the same way.
        severity: lower than the rule's own, where this fault does less harm.
        confidence: how sure the evidence is; a doubt lowers the severity, too (`CEILING`).
        why: replaces the rule's own sentence.
        hint: what to do now.
        hint_if_damaged: the same where the step has errors too, which a rule cannot know; "" for no other.
        notes: further lines.
        explain: makes lines that cost time; called only for findings that are shown in full.
        group: what findings of one group share; by default the sentence and the role of the key.
        detail: lines of a figure.
        lost_files: all files that are missing, by the ranks that wrote them.
        inferred_from: what it was inferred from ("the shapes of layers 0-3"); empty where the files state it.
        kind: which of the things that its rule finds, in a word that stays; causes look for it, no report prints it.
        of_run: whether it is a fault of the run around a step, for which no step fails.
        partners: keys that may be at fault in place of that of `at`, with which it does not agree.
        is_apart: whether it says something else of its keys than the rules that its own yields to.
    """

    message: str
    at: Location = Location()
    identity: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    severity: Severity | None = None
    confidence: Confidence = "certain"
    why: str = ""
    hint: str = ""
    notes: tuple[Note, ...] = ()
    explain: Callable[[], tuple[Note, ...]] | None = None
    group: str = ""
    detail: tuple[str, ...] = ()
    lost_files: LostFiles = ()
    inferred_from: str = ""
    kind: str = ""
    of_run: bool = False
    partners: tuple[str, ...] = ()
    is_apart: bool = False
    hint_if_damaged: str = ""

    def __reduce__(self) -> tuple[Callable[..., Finding], tuple[object, ...]]:
        """With the lines that cost time made: a function made on the way cannot travel."""
        state = {item.name: getattr(self, item.name) for item in fields(self)} | {"explain": None}
        if self.explain is not None:
            state["notes"] = (*self.notes, *self.explain())
        return Finding, tuple(state.values())

    @classmethod
    def of_problem(cls, problem: Problem) -> Finding:
        """All that a loader says of a problem; `dataclasses.replace` changes what a rule knows better."""
        why, hint = pointer_advice(problem.message) or (problem.why, problem.hint)
        return cls(
            problem.message,
            at=Location(problem.fqn, file=problem.file),
            identity=(problem.file,),
            severity=Severity.INFO if problem.outside_checkpoint else None,
            why=why,
            hint=hint,
            detail=problem.detail,
            lost_files=problem.lost_files,
            of_run=problem.of_run,
        )


MOST_KEYS = 100_000
"""Keys that a finding names: a file of a large save may have millions of entries."""

Option = bool | int | float | str | tuple[str, ...]
"""What a rule's option may be."""

After = Literal["", "rules", "all"]
"""What a rule waits for: nothing, the other rules, or all checkpoints."""

Check = Callable[..., Iterator[Finding]]
"""Judges a checkpoint, its one positional argument; keyword parameters with a default are options of the rule."""


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """A rule: its identity, and the function that judges one checkpoint.

    Attributes:
        code: letters of the family and a number, stable for ever.
        name: the same in words, accepted wherever the code is.
        severity: the highest it may give.
        check: yields findings; raises NotApplicable when there is nothing to judge.
        needs: what a checkpoint must have, as words of `analysis.needs`; elsewhere the rule does not apply.
        yields_to: codes of rules that report the same faults and say more. Of two findings on the same keys the worse
            one is shown, of two that are equally bad theirs.
        depth: the least at which it can judge.
        always: whether it runs although the metadata could not be read.
        whole: whether it needs the metadata of the whole save, and says nothing where it describes a part.
        expects: whether it judges against a reference (`--expect`) and cannot run without one.
        live: whether it judges what the ranks of a running job hold, not files.
        fixed: whether it always runs: nobody can ignore it or lower its severity.
        after: when it runs: with the others, after them (`rules`) on those that crashed, or after all checkpoints
            (`all`) on the ignores that hid nothing; `Checkpoint.problems` then holds these alone.
        values: options that were set otherwise than by default, by the name of the parameter.
    """

    code: str
    name: str
    severity: Severity
    check: Check
    needs: tuple[str, ...] = ()
    yields_to: tuple[str, ...] = ()
    depth: Depth = Depth.METADATA
    always: bool = False
    whole: bool = False
    expects: bool = False
    live: bool = False
    fixed: bool = False
    after: After = ""
    values: Mapping[str, Option] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Callable[..., Rule], tuple[object, ...]]:
        """As the rule of its module, with the severity and options in force: its function is not found by name."""
        return _rule_of, (self.check.__module__, self.check.__qualname__, self.severity, {**self.values})

    @property
    def summary(self) -> str:
        """The first line of the docstring."""
        return (inspect.getdoc(self.check) or "").partition("\n")[0]

    @property
    def options(self) -> dict[str, Option]:
        """The options in force by their names in a settings file: the check's keyword parameters."""
        parameters = list(inspect.signature(self.check).parameters.values())[1:]
        return {p.name.replace("_", "-"): self.values.get(p.name, p.default) for p in parameters}

    def section(self, heading: str) -> str:
        """A section of the docstring as one paragraph; empty when there is none."""
        page = inspect.getdoc(self.check) or ""
        match = re.search(rf"^{heading}:\n((?:[ ]+.*\n?|\n)+)", page, re.MULTILINE)
        return " ".join(match[1].split()) if match else ""


def _rule_of(module: str, name: str, severity: Severity, values: Mapping[str, Option]) -> Rule:
    made: Rule = getattr(import_module(module), name)
    return replace(made, severity=severity, values=values)


def rule(
    code: str,
    name: str,
    severity: Severity,
    *,
    needs: tuple[str, ...] = (),
    yields_to: tuple[str, ...] = (),
    depth: Depth = Depth.METADATA,
    always: bool = False,
    whole: bool = False,
    expects: bool = False,
    live: bool = False,
    fixed: bool = False,
    after: After = "",
) -> Callable[[Check], Rule]:
    """Turn a check function into a Rule; nothing is registered, rules are found by scanning modules."""
    return lambda check: Rule(
        code, name, severity, check, needs, yields_to, depth, always, whole, expects, live, fixed, after
    )
