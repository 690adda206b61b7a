"""What the files of a set say differently, and how sure it is that they may not: the one place that compares them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ckptlint.model import Checkpoint, Misfit, Said
from ckptlint.model.facts import fact
from ckptlint.rule import NotApplicable

STEP = "step"
COPIES = ("content", "content of copies", "content of other meshes")
_MAY_DIFFER = ("content of other meshes", "optimizer of other stages")
"""What honest saves hold differently: ranks that drifted apart, stages of which nothing is trained."""


@dataclass(frozen=True, slots=True)
class Disagreement:
    """Files of one set that say different things of what they share.

    Attributes:
        what: it, as a noun (`mesh`, `placements`, `step`, `content`).
        says: (value as text, names of the files that say it), the most files first.
        fqns: the keys concerned; () where it is one thing for the whole file.
        is_sure: whether no honest save looks so.
    """

    what: str
    says: tuple[tuple[str, tuple[str, ...]], ...]
    fqns: tuple[str, ...]
    is_sure: bool

    @property
    def fewest(self) -> tuple[str, ...]:
        """The files of the smallest group, which are probably the odd ones."""
        return self.says[-1][1]


@dataclass(frozen=True, slots=True)
class Compared:
    """The files of a set, held against each other.

    Attributes:
        job: what they say differently of the job or of tensors.
        steps: the steps that they say they are of, where these differ.
        copies: tensors that several hold whole, with other bytes.
    """

    job: tuple[Disagreement, ...]
    steps: tuple[Disagreement, ...]
    copies: tuple[Disagreement, ...]


@fact
def compared(ckpt: Checkpoint) -> Compared:
    """What the files of a checkpoint say differently.

    Raises:
        NotApplicable: it is no set of rank files.
    """
    if ckpt.rank_files is None:
        raise NotApplicable("no set of rank files")
    said = ckpt.rank_files.said
    return Compared(
        job=tuple(_merged(item for item in said if item.what != STEP and item.what not in COPIES)),
        steps=tuple(_disagreement([item]) for item in said if item.what == STEP),
        copies=tuple(_disagreement([item]) for item in said if item.what in COPIES),
    )


def _merged(said: Iterable[Said]) -> Iterable[Disagreement]:
    """One for all keys of which the same files say otherwise than the same others."""
    alike: dict[tuple[object, ...], list[Said]] = {}
    for item in said:
        alike.setdefault((item.what, bool(item.fqn), *(files for _, files in _ordered(item))), []).append(item)
    return map(_disagreement, alike.values())


def _ordered(item: Said) -> list[tuple[str, tuple[str, ...]]]:
    return sorted(item.says, key=lambda group: -len(group[1]))


def _disagreement(said: list[Said]) -> Disagreement:
    fqns = tuple(item.fqn for item in said if item.fqn)
    return Disagreement(said[0].what, tuple(_ordered(said[0])), fqns, said[0].what not in _MAY_DIFFER)


@fact
def on_all_ranks(ckpt: Checkpoint) -> frozenset[Misfit]:
    """The optimizers that know fewer parameters than their model, where those of all ranks do.

    A job that trains or saves only a part looks so; one rank of it does not.
    """
    files = ckpt.rank_files
    short = [item for item in files.misfits if item.what in FEWER] if files is not None else []
    said = {item.file for item in short}
    kinds = {file.kind for file in files.files if file.name in said} if files is not None else set()
    others = {other.file for other in files.other_names} if files is not None else set()
    every = {file.name for file in files.files if file.kind in kinds and file.is_read} - others if files else set()
    return frozenset(short) if every <= said else frozenset()


FEWER = ("count", "sum")
