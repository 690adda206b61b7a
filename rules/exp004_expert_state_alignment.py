from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.optimizer.inventory import inventory_of
from ckptlint.model import Checkpoint
from ckptlint.model.text import shape_text
from ckptlint.rule import Finding, Location, NotApplicable, Severity, rule
from ckptlint.vocabulary.keys import MOMENTS


@rule("EXP004", "expert-state-alignment", Severity.INFO)
def expert_state_alignment(ckpt: Checkpoint) -> Iterator[Finding]:
    """A moment has a different number of experts from its weight.

    What it checks:
        Where OPT001 finds a moment of a different size: whether only the expert axis differs.
    Why it matters:
        The moments of whole experts are missing or belong to other experts.
    Usual causes:
        The job restored the expert axis of the weights before saving, but not that of the optimizer state.
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
        shape, expected = state.tensor.global_shape, param.tensor.global_shape
        differing = [axis for axis in range(len(expected)) if shape[axis : axis + 1] != expected[axis : axis + 1]]
        if state.what in MOMENTS and len(shape) == len(expected) and differing == [param.expert_axis]:
            here, there = shape[param.expert_axis], expected[param.expert_axis]
            message = f"the state{{of}} has {here} experts, but its weight has {there}"
            notes = (("weight", f"{param.key.fqn} {shape_text(expected)}"),)
            hint = "compare with the expert-parallel size: the state is probably one rank's part"
            yield Finding(message, at=Location(state.tensor), identity=(str(here), str(there)), notes=notes, hint=hint)
