"""Compares the statements of the files of a set, and decides how sure it is that they must agree."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple

from ckptlint.grouping import grouped
from ckptlint.model import Checkpoint, Misfit, RankFileSet, Statement
from ckptlint.model.facts import fact
from ckptlint.model.text import plural
from ckptlint.rule import require

_STEP = "step"
_COPIES = ("content", "content of copies", "content of other meshes")
_PART = "local shape"
_FEWER = ("count", "sum")


class Disagreement(NamedTuple):
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


class Compared(NamedTuple):
    """Compares the files of a set with each other.

    Attributes:
        job: disagreements on the job or on tensors.
        steps: disagreements on the step.
        copies: tensors that several files hold whole, with different bytes.
        shapes: parts of tensors whose shape contradicts mesh and placements, or most ranks.
        of_a_part: optimizers with fewer parameters than the model, equally on all ranks.
    """

    job: tuple[Disagreement, ...]
    steps: tuple[Disagreement, ...]
    copies: tuple[Disagreement, ...]
    shapes: tuple[Misfit, ...]
    of_a_part: tuple[Misfit, ...]


@fact
def compared(ckpt: Checkpoint) -> Compared:
    """The disagreements between the files of a set."""
    rank_files = require(ckpt.rank_files)
    disagreements = list(_differing(rank_files.statements))
    odd = {id(item): _shapes(item) for item in disagreements if item.what == _PART}
    judged = {number for number, misfits in odd.items() if misfits}
    others = (item for item in disagreements if item.what not in (_STEP, *_COPIES) and id(item) not in judged)
    return Compared(
        job=tuple(_merged(others)),
        steps=tuple(item for item in disagreements if item.what == _STEP),
        copies=tuple(item for item in disagreements if item.what in _COPIES),
        shapes=(*(item for item in rank_files.misfits if item.what == "shape"), *chain(*odd.values())),
        of_a_part=_on_all_ranks(rank_files),
    )


def _merged(disagreements: Iterable[Disagreement]) -> Iterable[Disagreement]:
    """One disagreement for all keys with the same files on both sides."""
    alike = grouped(((item.what, bool(item.fqns), *(files for _, files in item.says)), item) for item in disagreements)
    return (members[0]._replace(fqns=tuple(fqn for item in members for fqn in item.fqns)) for members in alike.values())


def _differing(statements: Iterable[Statement]) -> Iterator[Disagreement]:
    for (what, _, fqn), items in grouped(((item.what, item.among, item.fqn), item) for item in statements).items():
        files_by_value = grouped((item.value, item.file) for item in items)
        if len(files_by_value) > 1:
            ordered = sorted(files_by_value.items(), key=lambda pair: -len(pair[1]))
            says = tuple((value, tuple(files)) for value, files in ordered)
            # copies that no library synchronises drift apart, in a healthy save too
            yield Disagreement(what, says, (fqn,) if fqn else (), what != "content of other meshes")


def _shapes(item: Disagreement) -> list[Misfit]:
    """The parts of other shapes than most ranks have; none without a majority."""
    (usual, most), *others = item.says
    if len(most) == len(others[0][1]):
        return []
    because = f"{plural(len(most), 'other rank', 'holds')} that shape"
    return [Misfit(item.fqns[0], file, stored, usual, because) for stored, files in others for file in files]


def _on_all_ranks(files: RankFileSet) -> tuple[Misfit, ...]:
    """The optimizers that know fewer parameters than their model, where all ranks' do: the job trains a part of it."""
    short = [item for item in files.misfits if item.what in _FEWER]
    said = {item.file for item in short}
    kinds = {file.kind for file in files.files if file.name in said}
    every = {file.name for file in files.files if file.kind in kinds and file.is_read and not file.inside}
    return tuple(short) if every <= said else ()
