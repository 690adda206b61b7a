from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ckptlint.analysis.layers.odd_ones import sees_all
from ckptlint.analysis.optimizer.inventory import inventory_of
from ckptlint.analysis.step_before.leaps import Leap, key_notes, keys_of, kinds_of, leap_of, place_of, ranks_of
from ckptlint.analysis.step_before.step_change import older_name
from ckptlint.depth import Depth
from ckptlint.model import ChangeTable, Checkpoint
from ckptlint.model.text import plural
from ckptlint.model.tiling import BoolArray, distinct
from ckptlint.rule import Finding, NotApplicable, Severity, rule

_NEARLY_ALL, _NEARLY_NONE = 0.9, 0.1
_LEAST, _LEAST_LARGE, _LARGE = 4, 2, 256  # tensors of a rank that stayed; fewer where many elements of each did
_WORDS = {"weight": "weights", "first": "first moments", "second": "second moments", "other": "states"}


@rule("RUN009", "stale-part", Severity.ERROR, depth=Depth.HEADERS, whole=True, needs=("step before",))
def stale_part(ckpt: Checkpoint) -> Iterator[Finding]:
    """A rank, or the optimizer, still has the values of the step before, while the rest changed.

    What it checks:
        No rank has nine of ten of its chunks bit for bit as in the step before (weights, or moments) while chunks of
        other ranks of the same tensors changed, in four tensors or more, or two of 256 elements each; moments did not
        all stay while their weights changed. Experts and tables of tokens are left out. A frozen tensor stays in all
        its chunks.
    Why it matters:
        The part is one or more steps behind: a load mixes two steps without an error.
    Usual causes:
        A rank staged its data before the update, or its asynchronous save wrote an old buffer; an optimizer that is
        saved from a copy that nobody renews.
    How to fix:
        Resume from the step before.
    See:
        torch.distributed.checkpoint.async_save
    """
    table = ckpt.changes
    if table is None:
        raise NotApplicable("the elements of the step before were not read")
    is_seen = np.array([sees_all(follow.key) for follow in table.follows], bool)
    varies = (table.was > 0) & (is_seen[table.follow] if len(table.rows) else False)
    is_same = table.same == table.drawn
    stale = [
        (kind, leap) for kind in _WORDS if (leap := _of_rank(ckpt, table, varies & kinds_of(table, kind), is_same))
    ]
    for rank in dict.fromkeys(leap.rank for _, leap in stale):
        members = [(kind, leap) for kind, leap in stale if leap.rank == rank]
        whole = Leap(members[0][1].title, np.concatenate([leap.rows for _, leap in members]), rank)
        is_large = (table.drawn[whole.rows] >= _LARGE).all()
        if len(keys_of(table, whole.rows)) < (_LEAST_LARGE if is_large else _LEAST):
            continue
        words = " and ".join(_WORDS[kind] for kind, _ in members)
        # a tensor of which the rank saved the only chunk stayed for the same reason
        stayed = np.flatnonzero(is_same & (table.was > 0) & (ranks_of(ckpt, table) == rank))
        what = f"the {words} of rank {rank} are those of {older_name(ckpt)}, bit for bit"
        yield _finding(ckpt, table, whole, what, keys_of(table, stayed))
    moments = varies & kinds_of(table, "first", "second")
    kept = {*keys_of(table, np.flatnonzero(moments & is_same))}
    states = [state for state in inventory_of(ckpt).states if state.tensor.fqn in kept]
    own = {param.tensor.fqn for state in states for param in state.params}  # an average of frozen weights moves on
    weights = varies & np.array([follow.key in own for follow in table.follows], bool)[table.follow]
    if moments.any() and weights.any() and is_same[moments].mean() >= _NEARLY_ALL and is_same[weights].mean() <= 0.5:
        leap = leap_of(ckpt, table, moments, is_same)
        assert leap is not None
        what = f"all moments are those of {older_name(ckpt)}, though the weights changed"
        yield _finding(ckpt, table, leap, what, keys_of(table, leap.rows))


def _of_rank(ckpt: Checkpoint, table: ChangeTable, judged: BoolArray, is_same: BoolArray) -> Leap | None:
    """A rank whose chunks stayed while others of the same tensors changed."""
    changed = np.zeros(len(table.follows), bool)
    changed[table.follow[judged & ~is_same]] = True
    rows = np.flatnonzero(judged)
    rows = rows[changed[table.follow[rows]]]
    rank = ranks_of(ckpt, table)
    shares = {number: float(is_same[rows[rank[rows] == number]].mean()) for number in distinct(rank[rows]).tolist()}
    stale = [number for number, share in shares.items() if number >= 0 and share >= _NEARLY_ALL]
    if len(stale) != 1 or any(share > _NEARLY_NONE for number, share in shares.items() if number not in stale):
        return None
    mine = rows[(rank[rows] == stale[0]) & is_same[rows]]
    return Leap(f"rank {stale[0]}", mine, stale[0]) if len(mine) else None


def _finding(ckpt: Checkpoint, table: ChangeTable, leap: Leap, what: str, keys: tuple[str, ...]) -> Finding:
    older = older_name(ckpt)
    return Finding(
        f"{what}, in {plural(len(leap.rows), 'chunk')}; the rest changed",
        at=place_of(ckpt, table, leap),
        identity=(leap.title, what),
        keys=keys,
        notes=key_notes(keys),
        hint=f"resume from {older}, and find out what the save copies and when",
    )
