from __future__ import annotations

from collections.abc import Iterator
from math import isnan

from ckptlint.analysis.optimizer.beside import of_each
from ckptlint.analysis.step_before.leap_causes import cause_of, moments_that_leapt_along, params_of
from ckptlint.analysis.step_before.leaps import key_notes, keys_of, leapt_moments, place_of, went_on_from_elsewhere
from ckptlint.analysis.step_before.step_change import older_name
from ckptlint.depth import Depth
from ckptlint.model import Checkpoint
from ckptlint.model.text import plural, verb
from ckptlint.rule import Finding, NotApplicable, Severity, rule

_NEEDS, _YIELDS_TO = ("step before",), ("RUN007", "RUN009")


@rule("RUN008", "moments-leapt", Severity.ERROR, depth=Depth.HEADERS, whole=True, needs=_NEEDS, yields_to=_YIELDS_TO)
def moments_leapt(ckpt: Checkpoint) -> Iterator[Finding]:
    """Moments are not what any gradients can have made of those of the step before.

    What it checks:
        Elements drawn from both steps, n updates apart with the same betas: a second moment keeps at least b2^n of what
        it was; and what the first gained, m - b1^n * m_was, is bounded by what the second gained, as OPT011 bounds the
        moments. First moments did not all become zero. Where more than a quarter of the chunks break it, of several
        ranks, the moments of the step itself must keep Adam's bound: else the optimizer is another one; and it is a
        warning: a run restarted from an older step has two branches. What the moments hold instead is looked for as
        RUN007 does, which also reports moments that leapt with their weights.
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
    if (leap := leapt_moments(ckpt)) is None:
        return
    row, older = int(leap.rows[0]), older_name(ckpt)
    lost = int((table.now[leap.rows] == 0).sum())
    zeros = f"; {lost:,} of {plural(len(leap.rows), 'chunk')} {verb(lost, 'holds')} zeros alone" if lost else ""
    drawn = f"{int(table.odd[row]):,} of {int(table.drawn[row]):,} elements are beyond what any gradients allow"
    cosine = float(table.cosine[row])
    between = plural(max(follow.updates for follow in table.follows if follow.betas is not None), "update")
    along = moments_that_leapt_along(ckpt)
    seconds = {second for follow in table.follow[leap.rows].tolist() if (second := table.follows[follow].second)}
    cause = cause_of(ckpt, table, leap, "moments")
    is_elsewhere = not cause and went_on_from_elsewhere(ckpt)
    perhaps = "; perhaps the run went on from another step" if is_elsewhere else zeros
    yield Finding(
        cause or f"the moments of {leap.title} cannot come from those of {older} by {between}{perhaps}",
        at=place_of(ckpt, table, leap),
        identity=(leap.title,),
        keys=keys_of(table, leap.rows),
        confidence="likely" if is_elsewhere else "certain",
        # RUN007 reports weights and moments, RUN009 the second moments that stayed behind
        partners=tuple(sorted(seconds | (set() if along is None else params_of(ckpt, along)))),
        notes=(
            (
                "first",
                f"all {int(table.drawn[row]):,} elements are 0"
                if isnan(cosine)
                else f"{drawn}, cosine {cosine:.2f} with the step before",
            ),
            *key_notes(keys_of(table, leap.rows)),
        ),
        hint=f"if the run was restarted, remove what the older branch saved; else resume from {older}"
        if is_elsewhere
        else f"resume from {older}, or without the optimizer's state and with a warm-up",
        inferred_from=f"what {between} leave of moments" if is_elsewhere else "",
    )
