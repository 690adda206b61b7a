"""Which tensors are compared with themselves in the step before, and how far the optimizer can have moved them."""

from __future__ import annotations

from math import inf, sqrt

from ckptlint.analysis.optimizer.inventory import moments_of
from ckptlint.analysis.optimizer.pairs import pairs_of
from ckptlint.model import Checkpoint, Follow
from ckptlint.numerics.laws import moment_bound
from ckptlint.numerics.settings import optimizer_settings
from ckptlint.vocabulary.keys import parse, state_name


def follows_of(ckpt: Checkpoint, before: Checkpoint) -> list[Follow]:
    """The weights and states that both steps have in one shape; betas where both steps have the same."""
    updates = updates_between(ckpt, before)
    moments, older = (
        {pair.first: pair for pair in pairs_of(checkpoint) if pair.law == "moments"} for checkpoint in (ckpt, before)
    )
    betas = {key: pair.betas for key, pair in moments.items() if key in older and older[key].betas == pair.betas}
    first_of = {pair.second: key for key, pair in moments.items()}
    rate, decay = _rate(ckpt, before)
    follows = []
    for tensor in ckpt.sound_tensors():
        earlier, key = before.tensors.get(tensor.fqn), tensor.fqn
        if earlier is None or not earlier.is_sound or earlier.global_shape != tensor.global_shape or tensor.volume < 2:
            continue
        if parse(key).kind == "model":
            first = next((state.tensor.fqn for state in moments_of(ckpt).get(key, ()) if state.what == "exp_avg"), "")
            of_weight, reach = betas.get(first), inf
            if of_weight is not None and updates:
                reach = updates * rate * max(1.0, sqrt(moment_bound(of_weight)))
            follows.append(Follow("weight", key, "", of_weight, updates, reach, updates * decay))
        elif key in moments and moments[key].second in before.tensors:
            follows.append(Follow("first", key, moments[key].second, betas.get(key), updates))
        elif key in first_of:
            follows.append(Follow("second", key, "", betas.get(first_of[key]), updates))
        elif state_name(key):
            follows.append(Follow("other", key))
    return follows


def updates_between(ckpt: Checkpoint, before: Checkpoint) -> int:
    """Updates of the optimizer between two steps by its own counters (steps may count epochs); 0 if unknown."""
    both = ckpt, before
    claims = [
        [claim.step for claim in checkpoint.claims if parse(claim.source).kind == "optimizer"] for checkpoint in both
    ]
    steps = [[int(group.step or 0) for group in optimizer_settings(checkpoint)] for checkpoint in both]
    for now, was in (claims, steps):
        if max(now, default=0) and max(was, default=0):
            return max(max(now) - max(was), 0)
    return 0


def _rate(ckpt: Checkpoint, before: Checkpoint) -> tuple[float, float]:
    """The highest rate of both steps, inf where one is not known; and the rate times the decay."""
    groups = [*optimizer_settings(ckpt), *optimizer_settings(before)]
    if not groups or any(group.lr is None for group in groups):
        return inf, 0.0
    rate = max(max(group.lr or 0.0, group.initial_lr or 0.0) for group in groups)
    return rate, rate * max(group.weight_decay or 0.0 for group in groups)
