"""The result of a plan: whether the checkpoint loads, the obstacles, and the reads of each rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from ckptlint.model import Checkpoint
from ckptlint.model.files import Names
from ckptlint.model.text import plural
from ckptlint.model.tiling import IntArray
from ckptlint.shown import Shown

Effect = Literal["fails", "drops", "note"]


@dataclass(frozen=True, slots=True)
class Constraint:
    """An obstacle to a load, a loss, or a note.

    Attributes:
        effect: `fails` the load raises; `drops` it loads and something is lost; `note` neither.
        sentence: what and why, without the keys.
        keys: the keys concerned, printable.
        source: where the library says so (library, version, file or function).
        guessed: whether it rests on something that the checkpoint does not say.
    """

    effect: Effect
    sentence: str
    keys: tuple[str, ...] = ()
    source: str = ""
    guessed: bool = False


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A tensor that the job wants in another shape than it is stored in, which torch refuses."""

    key: str
    stored: tuple[int, ...]
    wanted: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Conversion:
    """A tensor that the load converts to another dtype, without a word.

    Attributes:
        loses: whether values may change.
    """

    key: str
    stored: str
    wanted: str
    loses: bool


@dataclass(frozen=True, eq=False)
class Cost:
    """The reads of all ranks. Ranks with equal reads form one kind.

    Attributes:
        kind: int64 [world], the kind of each rank.
        needed: int64 [k], bytes that a rank of each kind needs.
        read: int64 [k], bytes that the reader reads for them: whole records, where it reads whole records.
        requests: int64 [k], read items.
        files: the files that a rank of each kind opens, as rows of `names`, ascending; `.metadata` is not among them.
        names: of the payload files.
        distinct: bytes of the records that any rank reads, each counted once.
        written: rank that saved -> bytes that it wrote, where file names contain the rank.
    """

    kind: IntArray
    needed: IntArray
    read: IntArray
    requests: IntArray
    files: tuple[IntArray, ...]
    names: Names
    distinct: int
    written: dict[int, int]

    @property
    def amplification(self) -> float:
        """Bytes read by bytes needed, over all ranks; 1.0 where nothing is needed."""
        needed = int(self.needed[self.kind].sum())
        return int(self.read[self.kind].sum()) / needed if needed else 1.0

    @cached_property
    def worst(self) -> tuple[int, ...]:
        """The ranks that read the most, in order."""
        return tuple((self.read == self.read.max())[self.kind].nonzero()[0].tolist())


@dataclass(frozen=True, slots=True)
class NodeReads:
    """A node of the job and the files that it must see, `.metadata` left out: every rank reads that.

    Attributes:
        ranks: first and last rank.
        files: the payload files that its ranks open.
        absent: those that another node wrote; empty where all nodes share one disk.
        bytes: of the files.
    """

    ranks: tuple[int, int]
    files: tuple[str, ...]
    absent: tuple[str, ...]
    bytes: int


@dataclass(frozen=True, eq=False, repr=False)
class Plan(Shown):
    """Whether a checkpoint loads into a job, and what each of its ranks would read.

    Attributes:
        checkpoint: what is loaded.
        form: `exact`, as the job's own code says, or `quick`, as sizes of axes imply.
        to: what the user named: `dp=8,tp=2`, or a function.
        world: how many ranks.
        missing: keys that the job wants and the checkpoint has not, in the order in which torch asks.
        unexpected: keys of the checkpoint that no rank asks for; the quick form takes all to be asked for.
        mismatches: tensors of another shape.
        converted: tensors of another dtype.
        constraints: what else a load refuses, loses or should be known; and what was guessed.
        cost: what the ranks read.
        nodes: what each node must see; empty where no nodes were named.
        astray: keys with a part that a node lacks, where each node has only its own files.
        memory: bytes that a rank has; None where none were named.
    """

    checkpoint: Checkpoint
    form: Literal["exact", "quick"]
    to: str
    world: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatches: tuple[Mismatch, ...]
    converted: tuple[Conversion, ...]
    constraints: tuple[Constraint, ...]
    cost: Cost
    nodes: tuple[NodeReads, ...] = ()
    astray: tuple[str, ...] = ()
    memory: int | None = None

    def __repr__(self) -> str:
        return f"<Plan {self.checkpoint.path} into {self.to}: {self.verdict}, {plural(self.world, 'rank')}>"

    def rows(self) -> list[dict[str, Any]]:
        """A row for each key that the load misses, refuses, loses or converts, and for each sentence without a key.

        `effect` is an `Effect`, `missing`, `shape`, `astray`, `converted` or `unexpected`; None is what a row has not.
        """
        shapes = ((item.key, str([*item.stored]), str([*item.wanted])) for item in self.mismatches)
        cells: list[tuple[str, str | None, str | None, str | None, str | None]] = [
            *(("missing", key, None, None, None) for key in self.missing),
            *(("shape", *shape, None) for shape in shapes),
            *(("astray", key, None, None, None) for key in self.astray),
            *(
                (item.effect, key, None, None, item.sentence)
                for item in self.constraints
                for key in item.keys or [None]
            ),
            *(("converted", item.key, item.stored, item.wanted, None) for item in self.converted),
            *(("unexpected", key, None, None, None) for key in self.unexpected),
        ]
        return [dict(zip(("effect", "key", "stored", "wanted", "sentence"), row, strict=True)) for row in cells]

    @property
    def verdict(self) -> Literal["loads", "fails"]:
        """Whether a load comes to its end."""
        refused = self.missing or self.mismatches or self.astray
        return "fails" if refused or any(item.effect == "fails" for item in self.constraints) else "loads"

    @property
    def fits(self) -> bool:
        """Whether the rank that needs the most has memory for it; True where none was named."""
        return self.memory is None or int(self.cost.needed.max(initial=0)) <= self.memory

    @property
    def exit_code(self) -> int:
        """0 it loads, and whole; 1 it does not, or something is lost, or a rank has too little memory."""
        is_lost = any(item.effect == "drops" for item in self.constraints)
        return int(self.verdict == "fails" or is_lost or not self.fits)
