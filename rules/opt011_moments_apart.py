from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.optimizer.beside import of_each
from ckptlint.analysis.optimizer.pairs import breaking
from ckptlint.depth import Depth
from ckptlint.model import Checkpoint, Pair
from ckptlint.model.text import plural
from ckptlint.model.tiling import Box
from ckptlint.numerics.laws import moment_bound
from ckptlint.rule import Finding, Location, Severity, require, rule

_ABSURD = 1e6  # m^2 / v that says no more than that v is lost


@rule("OPT011", "moments-apart", Severity.ERROR, depth=Depth.HEADERS, needs=("moments", "pairs"), yields_to=("RUN008",))
def moments_apart(ckpt: Checkpoint) -> Iterator[Finding]:
    """The first moment is larger than the second allows, so the two are not of one parameter, part or step.

    What it checks:
        Elements drawn from `exp_avg` (m) and `exp_avg_sq` (v) keep m * m <= C * v, with C = (1 - b1)^2 /
        ((1 - b2) * (1 - b1^2 / b2)) of the betas of their group: for Adam's moments that holds after any gradients
        (Cauchy-Schwarz), with room for the rounding of their dtypes. Without betas only v = 0 beside another m counts.
        A chunk is judged where four of five tensors like it, or the other ranks, keep the bound: where many break it,
        the optimizer is another one, such as SOAP, ADOPT or LaProp, or its betas changed.
    Why it matters:
        The resume divides one parameter's gradient by the square root of another's: steps far too large or too small.
    Usual causes:
        Two ranks, parameters or buckets were exchanged or shifted in one of the two moments; one was saved at an
        earlier step, or lost and filled with zeros.
    How to fix:
        Go back to a step whose moments agree.
    See:
        torch.optim.Adam
    """
    yield from of_each(ckpt, _apart)


def _apart(ckpt: Checkpoint) -> Iterator[Finding]:
    pairs = require(ckpt.pairs)
    for row in breaking(ckpt, "moments").tolist():
        pair, chunk = pairs.pairs[int(pairs.pair[row])], int(pairs.chunk[row])
        tensor = ckpt.tensors[pair.first]
        box, name = tensor.tiling.box(chunk), ckpt.chunk_file(tensor, chunk)
        if box.sizes:  # the rows between which they lie
            begin, end = int(pairs.begin[row]), int(pairs.end[row])
            box = Box((begin, *box.offsets[1:]), (end - begin, *box.sizes[1:]))
        odd, drawn = int(pairs.odd[row]), int(pairs.drawn[row])
        yield Finding(
            f"{odd:,} of {plural(drawn, 'value')} in {box}{{of}} {_beyond(pair, float(pairs.worst[row]))}",
            at=Location(tensor, region=box, rows=(chunk,), file=name),
            hint="go back to a step whose moments agree, or resume with both moments of these keys reset to zero",
            group=f"moments {name}",
            partners=(pair.second,),
        )


def _beyond(pair: Pair, worst: float) -> str:
    if pair.betas is None:
        return f"are not 0 where {pair.second} is"
    betas, bound = "{:g} and {:g}".format(*pair.betas), moment_bound(pair.betas)
    most = bound * worst
    here = f"here up to {most:.3g}" if most < _ABSURD else "here v is next to 0"
    return f"are too large for {pair.second}: m^2 / v is at most {bound:.3g} at betas {betas}, {here}"
