from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.fit.key_matching import is_confirmed
from ckptlint.analysis.layers.projections import mismatches, short_name
from ckptlint.model import Checkpoint
from ckptlint.model.text import shape_text
from ckptlint.rule import Finding, Location, Severity, rule


@rule("SHP009", "projection-misfit", Severity.WARNING, whole=True, needs=("params",), yields_to=("SHP002", "SHP004"))
def projection_misfit(ckpt: Checkpoint) -> Iterator[Finding]:
    """The projections of an attention or MLP have sizes that cannot be multiplied.

    What it checks:
        If the hidden size is known: gate and up have one shape, and the second projection of an MLP takes as many
        inputs as the first one gives (or half, if gate and up are one weight). The output of an attention with separate
        weights takes what query, key and value give. A weight that is transposed relative to its partners is named.
        Latent attention, experts in one tensor whose second weight is stored untransposed, and what SHP002, SHP004 or
        SHP005 report are left out.
    Why it matters:
        No model has these shapes, so one of the two weights was truncated, padded or transposed before it was saved.
    Usual causes:
        An export took one rank's part for the whole, or transposed a weight but not its partner, in every layer.
    How to fix:
        Compare both with the configuration of the model, and export again.
    See:
        torch.nn.Linear
    """
    for family, odd, partner, text in mismatches(ckpt):
        if is_confirmed(ckpt, odd) or is_confirmed(ckpt, partner):
            continue
        yield Finding(
            f"weight{{of}} is {shape_text(odd.tensor.global_shape)}, {text}",
            at=Location(odd.tensor),
            notes=(
                ("partner", f"{partner.tensor.fqn}: {shape_text(partner.tensor.global_shape)}"),
                ("hidden", str(family.hidden)),
            ),
            partners=(partner.tensor.fqn,),
            hint="compare both with the configuration of the model, and the same weight in other layers",
            inferred_from=f"{short_name(partner)} and {family.hidden}",
        )
