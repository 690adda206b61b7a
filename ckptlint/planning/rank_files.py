"""Obstacles to loading rank files into a job of another shape, from the table of layouts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ckptlint.loaders.layouts import layout_of
from ckptlint.model import Checkpoint
from ckptlint.planning.outcome import Constraint


def refusals(ckpt: Checkpoint, to: Mapping[str, int], world: int) -> Iterator[Constraint]:
    """The obstacles to a load of rank files, which their libraries do not reshard.

    Args:
        to: sizes of axes that the job has; one that is not named is 1.
        world: ranks of the job.
    """
    layout = layout_of(ckpt.format)
    if layout is None or ckpt.rank_files is None:
        return
    saved = {axis: size.size for axis, size in ckpt.topology.items()}
    asked = {axis: to.get(axis, 1) for axis in saved}
    asked |= {"world": world, "dp": to.get("dp", 1) * to.get("dp_replicate", 1)}
    kinds = {file.kind for file in ckpt.rank_files.files}
    for fixed in layout.fixed:
        others = {axis: saved[axis] for axis in fixed.axes if saved.get(axis, asked.get(axis)) != asked.get(axis)}
        if others and (not fixed.only_with or fixed.only_with in kinds):
            axis = next(iter(others))
            changes = ", ".join(f"{name} {size} to {asked[name]}" for name, size in others.items())
            s = "" if others[axis] == 1 else "s"
            sentence = fixed.sentence.format(saved=others[axis], s=s, asked=asked[axis], changes=changes)
            yield Constraint("fails", sentence, source=fixed.source)
    changed = [axis for axis in layout.unsure_axes if saved.get(axis, 1) != to.get(axis, 1)]
    if changed:
        title = layout.formats[ckpt.format]
        sentence = f"ckptlint does not know whether {title} loads with a different {' and '.join(changed)}"
        yield Constraint("note", sentence, guessed=True)
