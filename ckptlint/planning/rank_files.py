"""Obstacles to loading what each rank saved for itself, files or objects, into a job of another shape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ckptlint.analysis.ranks.numbered_files import exact_ranks, numbered_files
from ckptlint.grouping import grouped
from ckptlint.loaders.layouts import layout_of
from ckptlint.model import Checkpoint
from ckptlint.model.text import plural
from ckptlint.patterns import lazy_pattern
from ckptlint.planning.outcome import Constraint
from ckptlint.vocabulary.parts import part_of_file

_OF_DP_RANK = lazy_pattern(r"(.*)\bdp_rank_(\d+)")
_TORCHTITAN = "torchtitan 0.3, components/dataloader.py, ParallelAwareDataloader.load_state_dict"


def refusals(ckpt: Checkpoint, to: Mapping[str, int], world: int) -> Iterator[Constraint]:
    """The obstacles to a load of rank files, which their libraries do not reshard, into `world` ranks."""
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


def lost_by_dp_ranks(ckpt: Checkpoint, to: Mapping[str, int]) -> Iterator[Constraint]:
    """The obstacles from what each data parallel rank saved for itself, objects or files: where its data stood."""
    asked = to.get("dp", 1) * to.get("dp_replicate", 1)
    keys = ((match[1], item.fqn) for item in ckpt.byte_objects if (match := _OF_DP_RANK.fullmatch(item.fqn)))
    for name, of_ranks in grouped(keys).items():
        if len(of_ranks) != asked:
            rest = f"; else those of ranks {asked} to {len(of_ranks) - 1} are dropped" if asked < len(of_ranks) else ""
            saved = f"{name.rstrip('._') or 'a state'} was saved by each of {len(of_ranks)} data parallel ranks"
            sentence = f"{saved}, and the job has {asked}: torchtitan stops at it{rest}"
            yield Constraint("fails", sentence, tuple(of_ranks), _TORCHTITAN)
    for files in numbered_files(ckpt):
        ranks = len(files.files)
        count = min([ranks, *exact_ranks(ckpt, "dp").values()])  # more were left by a larger job
        is_whole = ranks > 1 and max(files.files) == ranks - 1
        if files.axis == "dp" and is_whole and part_of_file(files.what) == "dataloader" and count != asked:
            names = tuple(files.files[number].name for number in range(count))
            rest = f"{plural(count - asked, 'position')} dropped" if asked < count else "other ranks begin anew"
            sentence = f"{count} data parallel ranks saved where their data stood, and the job has {asked}: {rest}"
            yield Constraint("drops", sentence, names)
