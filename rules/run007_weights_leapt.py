from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.step_before.leap_causes import cause_of, copied_from_here, moments_that_leapt_along
from ckptlint.analysis.step_before.leaps import Leap, key_notes, keys_of, leapt_weights, place_of
from ckptlint.analysis.step_before.step_change import older_name
from ckptlint.depth import Depth
from ckptlint.model import ChangeTable, Checkpoint
from ckptlint.model.text import plural, verb
from ckptlint.rule import Confidence, Finding, NotApplicable, Severity, rule

_NEEDS = ("step before",)


@rule("RUN007", "weights-leapt", Severity.ERROR, depth=Depth.HEADERS, whole=True, needs=_NEEDS, yields_to=("PAY020",))
def weights_leapt(ckpt: Checkpoint) -> Iterator[Finding]:
    """Weights are not what training can have made of those of the step before.

    What it checks:
        Elements drawn from both steps: none moved further than n updates of Adam can, n * rate * max(1, sqrt C) plus
        decay, with the highest rate of both steps and C of the betas (OPT011). Where more than a quarter of the chunks
        did, of several ranks, other optimizers and rates explain it, and where many moments leapt, another branch of
        the run: then chunks count that point elsewhere (cosine below 0.5) or are twice or half as large. Without a rate
        and betas, matrices count that point elsewhere while nine of ten others hardly turned: a warning. The chunks are
        then compared with other tensors, experts, layers and ranks of the step before, with themselves transposed,
        times a number, or with rows or columns in another order.
    Why it matters:
        These weights are not of this run's training: the model computes something else there.
    Usual causes:
        A rank saved its part of another step or run; experts, layers or ranks were exchanged; a tensor was transposed,
        scaled, initialised anew; a bit flipped.
    How to fix:
        Take the part from the step before, or resume there.
    See:
        torch.optim.Adam
    """
    table = ckpt.changes
    if table is None:
        raise NotApplicable("the elements of the step before were not read")
    certain, likely = leapt_weights(ckpt)
    if certain is not None:
        yield _finding(ckpt, table, certain, "certain")
    if likely is not None:
        yield _finding(ckpt, table, likely, "likely")


def _finding(ckpt: Checkpoint, table: ChangeTable, leap: Leap, confidence: Confidence) -> Finding:
    row = int(leap.rows[0])
    along = moments_that_leapt_along(ckpt) if confidence == "certain" else None
    words = "weights" if along is None else "weights and moments"
    cause = cause_of(ckpt, table, leap, words)
    follow = table.follows[int(table.follow[row])]
    older = older_name(ckpt)
    cosine, scale = float(table.cosine[row]), float(table.now[row] / table.was[row])
    moved = f"{int(table.odd[row]):,} of {int(table.drawn[row]):,} elements"
    what, notes = f"the {words} of {leap.title} do not continue {older}, unlike the others", []
    if confidence == "certain":
        worst = float(table.worst[leap.rows].max())
        far = f"moved up to {worst:.3g} times as far as {plural(follow.updates, 'update')} can"
        zeros = int((table.now[leap.rows] == 0).sum())
        some = (
            "they hold" if zeros == len(leap.rows) else f"{zeros:,} of {len(leap.rows):,} chunks {verb(zeros, 'holds')}"
        )
        alone = f"; {some} zeros alone" if zeros else ""
        what = f"the weights of {leap.title} {far} since {older}{alone}"
        if along is not None:
            what = f"the {words} of {leap.title} do not continue {older}: the weights {far}"
        if cause:
            notes.append(("how far", f"weights {far}"))
    if along is not None and (lost := int((table.now[along.rows] == 0).sum())):
        notes.append(("moments", f"{lost:,} of {plural(len(along.rows), 'chunk')} {verb(lost, 'holds')} zeros alone"))
    like = f"cosine {cosine:.2f} with the step before, {scale:.3g} times its size" if scale else "all are 0"
    notes.append(("first", f"{moved} there, {like}"))
    return Finding(
        cause or what,
        at=place_of(ckpt, table, leap),
        identity=(leap.title,),
        keys=keys_of(table, leap.rows),
        confidence=confidence,
        notes=(*notes, *key_notes(keys_of(table, leap.rows))),
        partners=copied_from_here(table, leap) if cause else (),  # PAY020 says it of this step alone
        hint=f"compare with `ckptlint diff --values`; take these {words} from {older}, or resume there",
        inferred_from="" if confidence == "certain" else "the other weights, which hardly turned",
    )
