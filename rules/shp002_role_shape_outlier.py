from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ckptlint.analysis.fit.key_matching import is_confirmed
from ckptlint.analysis.layers.outliers import Outlier, dtype_outliers, shape_outliers
from ckptlint.analysis.layers.projections import mismatches
from ckptlint.analysis.optimizer.inventory import inventory_of
from ckptlint.model import Checkpoint
from ckptlint.model.text import plural, shape_text
from ckptlint.rule import Finding, Location, NotApplicable, Severity, rule


@rule("SHP002", "role-shape-outlier", Severity.ERROR, yields_to=("SHP003", "SHP004"))
def role_shape_outlier(ckpt: Checkpoint) -> Iterator[Finding]:
    """One layer stores a parameter with a shape or dtype different from the layers like it.

    What it checks:
        In layers with the same parameters, each parameter has one shape and one floating-point dtype. A single layer
        that differs from three or more is a warning, and so is one run of at most a fifth of the layers. It is an error
        if the weight does not fit its partner in its own layer either, such as a transposed one. If several modules of
        the layer differ, it is only info: the layer may be wider by design.
    Why it matters:
        The layer was saved differently from its siblings, so a load fails on it or converts it without an error.
    Usual causes:
        A padded or rank-local size on one pipeline stage, mixed precision in one layer, or two merged runs.
    How to fix:
        Compare the code path of this layer with that of its siblings, and save again.
    """
    if not any(param.key.layer is not None for param in inventory_of(ckpt).params):
        raise NotApplicable("no key has a layer number")
    if "heterogeneous" not in ckpt.declared:
        unmatched = {param for _, odd, partner, _ in mismatches(ckpt) for param in (odd, partner)}
        for item in shape_outliers(ckpt):
            if isinstance(item.usual, tuple) and not is_confirmed(ckpt, item.param):
                yield _shape(item, item.usual, item.param in unmatched)
    for item in dtype_outliers(ckpt):
        yield replace(_finding(item, f"dtype{{of}} is {item.param.tensor.dtype}", str(item.usual)), is_apart=True)


def _shape(item: Outlier, usual: tuple[int, ...], is_unmatched: bool) -> Finding:
    shape = item.param.own_shape
    sides = zip(item.param.own_axes, shape, usual, strict=False)
    quotients = [
        f"dim {axis}: {size:,} instead of {usual_size:,}" for axis, size, usual_size in sides if size != usual_size
    ]
    sizes = ", ".join(quotients) if len(shape) == len(usual) else ""
    finding = _finding(item, f"shape{{of}} is {shape_text(shape)}", shape_text(usual), sizes)
    if not is_unmatched or item.changed > 1:
        return finding
    why = "it does not fit its partner in this layer either, so the model has no such shape"
    hint = "take the weight from an earlier step, or save again"
    return replace(finding, severity=Severity.ERROR, why=why, hint=hint)


def _finding(item: Outlier, sentence: str, usual: str, sizes: str = "") -> Finding:
    return Finding(
        f"{sentence}, but {usual} in {plural(item.others, 'other layer')}",
        at=Location(item.param.tensor),
        severity=Severity.WARNING,
        confidence="possible" if item.changed > 1 else "certain",
        notes=(
            ("sizes", sizes),
            ("siblings", f"{usual} in layers {item.agreeing}"),
            ("layer", f"{item.changed} of its modules differ" if item.changed > 1 else ""),
        ),
        hint="check whether this layer is different by design"
        if item.changed > 1
        else "check how the stage or rank of this layer saved it, unless a setting makes the layer different",
        inferred_from=f"layers {item.agreeing}",
    )
