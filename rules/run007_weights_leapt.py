from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.leaps import Leap, keys_of, leapt_weights, place_of
from ckptlint.analysis.step_change import older_name
from ckptlint.depth import Depth
from ckptlint.model import ChangeTable, Checkpoint
from ckptlint.model.text import plural
from ckptlint.rule import Confidence, Finding, NotApplicable, Severity, rule


@rule(
    "RUN007",
    "weights-leapt",
    Severity.ERROR,
    depth=Depth.HEADERS,
    whole=True,
    needs=("step before",),
    yields_to=("PAY020",),
)
def weights_leapt(ckpt: Checkpoint) -> Iterator[Finding]:
    """Weights are not what training can have made of those of the step before.

    What it checks:
        Elements drawn from both steps: none moved further than n updates of Adam can, n * rate * max(1, sqrt C) plus
        decay, with the highest rate of both steps and C of the betas (OPT011). Where more than a quarter of the chunks
        did, of several ranks, other optimizers and rates explain it: then chunks count that point elsewhere (cosine
        below 0.5) or are twice or half as large. Without a rate and betas, matrices count that point elsewhere while
        nine of ten others hardly turned: a warning.
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
    follow = table.follows[int(table.follow[row])]
    older = older_name(ckpt)
    cosine, scale = float(table.cosine[row]), float(table.now[row] / table.was[row])
    moved = f"{int(table.odd[row]):,} of {int(table.drawn[row]):,} elements"
    if confidence == "certain":
        worst = float(table.worst[leap.rows].max())
        beyond = f"up to {worst:.3g} times as far as {plural(follow.updates, 'update')} can"
        what = f"the weights of {leap.title} moved {beyond} since {older}"
    else:
        what = f"the weights of {leap.title} do not continue {older}, unlike the others"
    return Finding(
        what,
        at=place_of(ckpt, table, leap),
        identity=(leap.title,),
        keys=keys_of(table, leap.rows),
        confidence=confidence,
        notes=(("first", f"{moved} there, cosine {cosine:.2f} with the step before, {scale:.3g} times its size"),),
        hint=f"compare with `ckptlint diff --values`; take these weights from {older}, or resume there",
        inferred_from="" if confidence == "certain" else "the other weights, which hardly turned",
    )
