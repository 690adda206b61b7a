from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from fractions import Fraction

from ckptlint.analysis.optimizer.inventory import Param, inventory_of
from ckptlint.grouping import grouped
from ckptlint.model import Checkpoint
from ckptlint.model.text import first_few, ranges, shape_text
from ckptlint.rule import Finding, Location, NotApplicable, Severity, rule
from ckptlint.vocabulary.keys import COPIES


@rule("SHP008", "copy-differs", Severity.WARNING, whole=True)
def copy_differs(ckpt: Checkpoint) -> Iterator[Finding]:
    """A second copy of the model differs from the model in shape, or lacks keys in some layers.

    What it checks:
        Every key under `ema.`, `ema_model.`, `model_ema.`, `teacher.`, `ref_model.` and `target.` has the global shape
        of the model's key, and what the copy has in some layers it has in all layers of the model. Missing layers
        (frozen ones, or another depth) and other dtypes are only info. Copies of another architecture are left out:
        the model has fewer than half of their keys, or half of the shapes differ.
    Why it matters:
        The copy is loaded into the same architecture, where the load fails or uses one rank's shard as the whole.
    Usual causes:
        The job saved the copy with placements different from the model's, or left its keys out of the map of
        placements.
    How to fix:
        Save model and copy through the same code.
    """
    inventory = inventory_of(ckpt)
    if not inventory.copies:
        raise NotApplicable("no second copy of the model is stored")
    model = {(param.key.scope, param.key.path): param for param in inventory.params}
    for name, copies in inventory.copies.items():
        pairs = [(model[at], copy) for copy in copies if (at := _place(copy)) in model]
        shapes = [pair for pair in pairs if pair[0].tensor.global_shape != pair[1].tensor.global_shape]
        if 2 * len(pairs) < len(copies) or 2 * len(shapes) >= len(pairs):
            continue
        for pair in shapes:
            yield _shape(name, *pair)
        yield from _absent(name, inventory.params, copies)
        yield from _dtypes(name, pairs)


def _place(copy: Param) -> tuple[tuple[str, ...], str]:
    """Where the model has what the copy has."""
    return tuple(name for name in copy.key.scope if name not in COPIES), copy.key.path


def _shape(name: str, param: Param, copy: Param) -> Finding:
    sizes, copy_sizes = param.tensor.global_shape, copy.tensor.global_shape
    pairs = enumerate(zip(sizes, copy_sizes, strict=False))
    quotients = [f"dim {axis}: {Fraction(b, a)}" for axis, (a, b) in pairs if a != b and a]
    return Finding(
        f"copy{{of}} in {name} is {shape_text(copy_sizes)}, but {shape_text(sizes)} in the model",
        at=Location(copy.tensor),
        notes=(
            ("model", f"{param.tensor.fqn}: {param.tensor.dtype} {shape_text(sizes)}"),
            ("share", ", ".join(quotients) if len(copy_sizes) == len(sizes) else ""),
        ),
        hint="give the copy the placement of the model's tensor, and save both again",
        inferred_from=f"the shape of {param.tensor.fqn}",
    )


def _absent(name: str, params: list[Param], copies: list[Param]) -> Iterator[Finding]:
    """Keys of the model that the copy lacks, of the roles that it has in other layers."""
    copied = {_place(copy) for copy in copies}
    roles = {(_place(copy)[0], copy.key.role) for copy in copies if copy.key.layer is not None}
    layers = {(_place(copy)[0], copy.key.block, copy.key.layer) for copy in copies}
    lost: dict[tuple[str, bool], list[Param]] = defaultdict(list)
    for param in params:
        key = param.key
        if key.layer is not None and (key.scope, key.role) in roles and (key.scope, key.path) not in copied:
            in_layer = (key.scope, key.block, key.layer) in layers
            lost[key.role if in_layer else key.block, in_layer].append(param)
    for (what, in_layer), absent in lost.items():
        numbers = [param.key.layer for param in absent if param.key.layer is not None]
        text = f"{what} in" if in_layer else f"all of {what} in"
        yield Finding(
            f"copy {name} lacks {text} layer{'s'[: len(set(numbers)) != 1]} {ranges(numbers)}, which the model has",
            at=Location(absent[0].tensor.fqn),
            identity=tuple(param.key.path for param in absent),
            confidence="certain" if in_layer else "possible",
            notes=(("absent", first_few([param.key.path for param in absent], 4)),),
            why="" if in_layer else "the copy may cover only the trained layers, or have another depth",
            hint="find out which filter drops these keys from the copy" if in_layer else "",
            inferred_from="the keys of the model",
        )


def _dtypes(name: str, pairs: list[tuple[Param, Param]]) -> Iterator[Finding]:
    differing = grouped(
        ((param.tensor.dtype, copy.tensor.dtype), copy)
        for param, copy in pairs
        if param.tensor.dtype != copy.tensor.dtype
    )
    for (theirs, dtype), members in differing.items():
        yield Finding(
            f"copy {name} holds {len(members):,} of {len(pairs):,} tensors as {dtype}, the model as {theirs}",
            at=Location(members[0].tensor.fqn),
            severity=Severity.INFO,
            why="a copy in another precision is common; a load converts it",
            inferred_from="the dtypes of the model",
        )
