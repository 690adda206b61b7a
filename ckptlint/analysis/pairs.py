"""Which tensors follow from each other: an optimizer's moments, and weights with their master copies."""

from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.inventory import MASTER_COPIES, inventory_of, optimizer_parts, split_state
from ckptlint.model import Checkpoint, Pair, Tensor
from ckptlint.model.payload import PairLaw
from ckptlint.numbers.settings import optimizer_settings
from ckptlint.vocabulary.dtypes import ENCODINGS
from ckptlint.vocabulary.keys import parse

Betas = tuple[float, float] | None

_FOLLOWS: dict[str, tuple[str, PairLaw]] = {
    "exp_avg": ("exp_avg_sq", "moments"),
    "max_exp_avg_sq": ("exp_avg_sq", "maximum"),
}


def pairs_of(ckpt: Checkpoint) -> list[Pair]:
    """The pairs of tensors of one shape; moments are paired by their keys, which differ in the state's name alone."""
    return [*_states(ckpt), *_copies(ckpt)]


def _states(ckpt: Checkpoint) -> Iterator[Pair]:
    groups = optimizer_settings(ckpt)
    everywhere, by_path = {group.betas for group in groups}, dict[str, set[Betas]]()
    for group in groups:
        for name in group.params:
            by_path.setdefault(parse(str(name)).path, set()).add(group.betas)
    for tensor in ckpt.sound_tensors():
        parts = tensor.fqn.split(".")
        for name, (other, law) in _FOLLOWS.items():
            at = parts.index(name) if name in parts else -1
            second = ckpt.tensors.get(".".join([*parts[:at], other, *parts[at + 1 :]])) if at >= 0 else None
            if second is not None and second.is_sound and second.global_shape == tensor.global_shape:
                # the betas of the groups that list the parameter; where none names it, those of all
                betas = by_path.get(_parameter(tensor), everywhere)
                known = next(iter(betas)) if law == "moments" and len(betas) == 1 else None
                yield Pair(law, tensor.fqn, second.fqn, known)


def _parameter(state: Tensor) -> str:
    named = split_state(optimizer_parts(parse(state.fqn))[1].removeprefix("state."))
    return "" if named is None else parse(named[1]).path


def _copies(ckpt: Checkpoint) -> Iterator[Pair]:
    for state in inventory_of(ckpt).states:
        param = state.param
        if param is None or state.what not in MASTER_COPIES or param.tensor.dtype not in ENCODINGS:
            continue
        if param.tensor.global_shape == state.tensor.global_shape:
            yield Pair("copy", param.tensor.fqn, state.tensor.fqn)
