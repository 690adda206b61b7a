from __future__ import annotations

from collections.abc import Iterator
from math import isnan

import numpy as np

from ckptlint.analysis.beside import of_each
from ckptlint.analysis.leaps import are_few, keys_of, kinds_of, leap_of, place_of
from ckptlint.analysis.pairs import breaking_share
from ckptlint.analysis.step_change import older_name
from ckptlint.depth import Depth
from ckptlint.model import Checkpoint
from ckptlint.model.text import plural, verb
from ckptlint.rule import Finding, NotApplicable, Severity, rule

_OFTEN = 0.001  # share of elements that break the law where it does not hold
_OTHERS = 0.05  # share of chunks that break Adam's bound by themselves, where the optimizer is another one


@rule("RUN008", "moments-leapt", Severity.ERROR, depth=Depth.HEADERS, whole=True, needs=("step before",))
def moments_leapt(ckpt: Checkpoint) -> Iterator[Finding]:
    """Moments are not what any gradients can have made of those of the step before.

    What it checks:
        Elements drawn from both steps, n updates apart with the same betas: a second moment keeps at least b2^n of what
        it was; and what the first gained, m - b1^n * m_was, is bounded by what the second gained, as OPT011 bounds the
        moments. First moments did not all become zero. Where more than a quarter of the chunks break it, of several
        ranks, the moments of the step itself must keep Adam's bound: else the optimizer is another one.
    Why it matters:
        The next steps go in a direction, and are of a size, that this run's gradients do not explain.
    Usual causes:
        Moments of another parameter, rank, step or run; a shifted buffer; an optimizer that lost its state.
    How to fix:
        Resume from the step before, or without the optimizer's state.
    See:
        torch.optim.Adam
    """
    yield from of_each(ckpt, _leapt)


def _leapt(ckpt: Checkpoint) -> Iterator[Finding]:
    table = ckpt.changes
    if table is None:
        raise NotApplicable("the elements of the step before were not read")
    updates = np.array([0 if follow.betas is None else follow.updates for follow in table.follows], np.int64)
    judged = kinds_of(table, "first", "second") & (table.was > 0) & (updates[table.follow] > 0)
    is_odd = judged & ((table.odd > _OFTEN * table.drawn) | ((table.now == 0) & kinds_of(table, "first")))
    if not is_odd.any():
        return
    if not are_few(ckpt, table, judged, is_odd) and breaking_share(ckpt, "moments") > _OTHERS:
        raise NotApplicable("the moments do not follow Adam's bound")
    leap = leap_of(ckpt, table, judged, is_odd)
    assert leap is not None
    row, older = int(leap.rows[0]), older_name(ckpt)
    lost = int((table.now[leap.rows] == 0).sum())
    zeros = f"; {lost:,} of {plural(len(leap.rows), 'chunk')} {verb(lost, 'holds')} zeros alone" if lost else ""
    drawn = f"{int(table.odd[row]):,} of {int(table.drawn[row]):,} elements are beyond what any gradients allow"
    cosine = float(table.cosine[row])
    between = plural(int(updates.max()), "update")
    yield Finding(
        f"the moments of {leap.title} cannot come from those of {older} by {between}{zeros}",
        at=place_of(ckpt, table, leap),
        identity=(leap.title,),
        keys=keys_of(table, leap.rows),
        notes=(
            (
                "first",
                f"all {int(table.drawn[row]):,} elements are 0"
                if isnan(cosine)
                else f"{drawn}, cosine {cosine:.2f} with the step before",
            ),
        ),
        hint=f"resume from {older}, or without the optimizer's state and with a warm-up",
    )
