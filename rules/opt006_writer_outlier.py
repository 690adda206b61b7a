from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.optimizer.fit import elementwise_states, is_whole, mismatched_params
from ckptlint.analysis.optimizer.inventory import inventory_of
from ckptlint.geometry.writers import saved_by
from ckptlint.model import Checkpoint
from ckptlint.model.text import shape_text
from ckptlint.rule import Finding, Location, Severity, rule
from ckptlint.vocabulary.config_fields import attributes

_ELEMENTWISE = frozenset({"exp_avg_diff", "exp_inf", "grad_avg", "square_avg", "sum", "acc_delta", "momentum"})


@rule("OPT006", "writer-outlier", Severity.WARNING, whole=True, needs=("states",))
def writer_outlier(ckpt: Checkpoint) -> Iterator[Finding]:
    """A state is one chunk while its parameter is split into several.

    What it checks:
        An elementwise state has more than one chunk if its parameter has. It is only info if the one chunk holds as
        many elements as the parameter. Scalars, factored and quantised states, parameters that OPT001 reports, and
        states that Megatron-Core gathers before saving (fully_reshardable) are left out.
    Why it matters:
        Each rank probably saved its own part under one key, and one part was kept.
    Usual causes:
        The state was a plain tensor, not wrapped with the parameter's placement.
    How to fix:
        Wrap it with the parameter's placement, and save again.
    See:
        torch.distributed.checkpoint.planner_helpers._create_write_items
    """
    states = inventory_of(ckpt).states
    exact = {state.tensor.fqn for state in elementwise_states(ckpt)}
    left_out = mismatched_params(ckpt)
    content = attributes(ckpt.common_value("content_metadata"))
    gathered = content.get("distrib_optim_sharding_type") == "fully_reshardable"
    for state in states:
        param = state.param
        if param is None or param in left_out or state.tensor.volume <= 1:
            continue
        if state.tensor.fqn not in exact and state.what not in _ELEMENTWISE:
            continue
        count = int(param.tensor.tiling.live.sum())
        if int(state.tensor.tiling.live.sum()) != 1 or count < 2:
            continue
        is_full = state.tensor.volume == param.tensor.volume
        if is_full and (gathered or not (is_whole(state.tensor.tiling) and is_whole(param.tensor.tiling))):
            continue
        row = int(state.tensor.tiling.live.argmax())
        in_state, of = f"{state.tensor.volume:,}", f"{param.tensor.volume:,}"
        yield Finding(
            f"state{{of}} is 1 chunk, but its parameter is split into {count}",
            at=Location(state.tensor, ranks=saved_by(ckpt, state.tensor)),
            severity=Severity.INFO if is_full else None,
            notes=(
                ("parameter", f"{param.tensor.fqn}: {shape_text(param.tensor.global_shape)} in {count} chunks"),
                ("elements", f"the state holds {in_state}, the parameter {of}"),
                ("written by", ckpt.chunk_file(state.tensor, row) or "no file"),
            ),
            why="the state is complete, so it was gathered or replicated before saving" if is_full else "",
            hint=""
            if is_full
            else "compare its length with what one rank holds; the parts of the other ranks are not stored",
            inferred_from=f"the chunks of {param.tensor.fqn}",
        )
