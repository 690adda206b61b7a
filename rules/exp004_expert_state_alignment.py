"""EXP004: moments cover the experts that the weights have."""

from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.inventory import MOMENTS, inventory_of
from ckptlint.model import Checkpoint
from ckptlint.rule import Finding, Location, NotApplicable, Severity, rule


@rule("EXP004", "expert-state-alignment", Severity.INFO)
def expert_state_alignment(ckpt: Checkpoint) -> Iterator[Finding]:
    """A moment has another number of experts than its weight.

    What it checks:
        Where OPT001 finds a moment of another size: whether only the expert axis differs.
    Why it matters:
        It says that the moments of whole experts are missing or belong to other experts.
    Usual causes:
        The expert axis was restored for the weights before saving, and not for the optimizer.
    How to fix:
        Restore it for the optimizer state too, and save again.
    See:
        torch.distributed.checkpoint.state_dict.get_optimizer_state_dict
    """
    states = [s for s in inventory_of(ckpt).states if s.param is not None and s.param.expert_axis is not None]
    if not states:
        raise NotApplicable("no optimizer state belongs to stacked experts")
    for state in states:
        param = state.param
        assert param is not None and param.expert_axis is not None
        own, expected = state.tensor.global_shape, param.tensor.global_shape
        differing = [axis for axis in range(len(expected)) if own[axis : axis + 1] != expected[axis : axis + 1]]
        if state.what in MOMENTS and len(own) == len(expected) and differing == [param.expert_axis]:
            here, there = own[param.expert_axis], expected[param.expert_axis]
            yield Finding(
                f"the state{{of}} has {here} experts, the weight has {there}",
                at=Location.of(state.tensor),
                missing=(str(here), str(there)),
                notes=(("weight", f"{param.key.fqn} {list(expected)}"),),
                hint="compare with the expert-parallel size: the state may be one rank's part",
            )
