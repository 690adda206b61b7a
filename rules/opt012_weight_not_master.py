from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.optimizer.pairs import breaking
from ckptlint.depth import Depth
from ckptlint.model import Checkpoint
from ckptlint.model.text import plural
from ckptlint.rule import Finding, Location, Severity, require, rule


@rule(
    "OPT012", "weight-not-master", Severity.ERROR, depth=Depth.HEADERS, needs=("states", "pairs"), yields_to=("RUN009",)
)
def weight_not_master(ckpt: Checkpoint) -> Iterator[Finding]:
    """A weight is not its master copy rounded.

    What it checks:
        Elements drawn from a weight and from its master copy in the optimizer (`param`, `fp32_param`, `main_param`,
        `master_param`, DeepSpeed's flat groups) are the same within one unit of the last place of the narrower dtype,
        so that stochastic rounding passes. A chunk is judged where four of five tensors like it, or the other ranks,
        agree.
    Why it matters:
        The first step after a resume overwrites the weight with its master copy: the model jumps to other values.
    Usual causes:
        The weights or the master copies of one rank are those of another step, rank or tensor; weights were edited or
        averaged after the save, and their copies were not.
    How to fix:
        Go back to a step where both agree; after an edit of the weights, drop the optimizer.
    See:
        megatron.core.optimizer.distrib_optimizer.DistributedOptimizer
    """
    pairs = require(ckpt.pairs)
    for row in breaking(ckpt, "copy").tolist():
        pair, chunk = pairs.pairs[int(pairs.pair[row])], int(pairs.chunk[row])
        at = Location.of_chunk(ckpt, ckpt.tensors[pair.first], chunk)
        message = (
            f"{int(pairs.odd[row]):,} of {plural(int(pairs.drawn[row]), 'value')} in chunk {at.region}{{of}} differ "
            f"from its master copy {pair.second}, by up to {float(pairs.worst[row]):.3g} times what rounding does"
        )
        hint = "go back to a step where both agree, or load the weights without the optimizer if they were edited"
        yield Finding(message, at=at, hint=hint, group=f"copy {at.file}", partners=(pair.second,))
