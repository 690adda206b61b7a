from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ckptlint.analysis.layers.odd_ones import OddOne, odd_ones
from ckptlint.analysis.optimizer.inventory import moments_of
from ckptlint.analysis.step_before.step_change import older_name
from ckptlint.depth import Depth
from ckptlint.model import Checkpoint
from ckptlint.model.text import plural
from ckptlint.model.tiling import distinct
from ckptlint.numerics.chunks import ChunkNumbers, chunk_numbers
from ckptlint.rule import Finding, Location, Severity, rule

_LEAST = 16  # numbers: of fewer the low bits may be zero by chance
_LOW = {"bfloat16": 0xFFFF, "float16": 0x1FFF}  # bits of a float32 that the narrower dtype does not have


@rule("PAY017", "low-bits-lost", Severity.WARNING, depth=Depth.DATA)
def low_bits_lost(ckpt: Checkpoint) -> Iterator[Finding]:
    """The float32 values of one rank, or of one layer, hold no more than 16 bits, unlike those of the others.

    What it checks:
        No rank of which four or more tensors are judged stores float32 numbers whose low bits are all zero, so that
        bfloat16 or float16 would hold them, in nine of ten of its chunks of weights, of first or of second moments,
        while other chunks of the same tensors use them; and no layer among three or more that the optimizer trains.
        Values of 16 bits everywhere are meant so.
    Why it matters:
        The updates of many steps are lost there: a step changes less than what was rounded off.
    Usual causes:
        The rank saved its 16-bit copy in place of the float32 master, or loaded one.
    How to fix:
        Take the part from a step where it has all bits.
    See:
        torch.finfo
    """
    numbers = chunk_numbers(ckpt)
    is_float32 = np.array([tensor.dtype == "float32" for tensor in numbers.tensors], bool)[numbers.tensor]
    varies = (numbers.elements >= _LEAST) & (numbers.most > 0) & ~numbers.column("one_value")
    trained = set(moments_of(ckpt))
    used = numbers.column("used_bits")
    for state, words in (("", "weights"), ("exp_avg", "first moments"), ("exp_avg_sq", "second moments")):
        judged = is_float32 & varies & numbers.are_state(state)
        for dtype, low in _LOW.items():
            odds = odd_ones(ckpt, judged, used & np.uint64(low) == 0)
            for odd in odds:
                names = [numbers.tensors[number].fqn for number in distinct(numbers.tensor[odd.rows]).tolist()]
                if odd.rank < 0 and not state and not trained.issuperset(names):
                    continue  # a frozen layer keeps the values that it was loaded with
                row = odd.rows[0]
                tensor, chunk = numbers.tensors[int(numbers.tensor[row])], int(numbers.chunk[row])
                yield Finding(
                    f"the {words} of {odd.title} hold no more bits than {dtype} has, in {len(odd.rows):,} of "
                    f"{plural(odd.judged, 'chunk')}; those of the others use all of float32",
                    at=Location.of_chunk(ckpt, tensor, chunk, odd.rank),
                    identity=(odd.title, words),
                    keys=tuple(names),
                    hint=f"{older_name(ckpt)} has all bits there: take the part from it"
                    if _had_all_bits(ckpt, numbers, odd)
                    else "compare with the step before; if it has all bits there, take the part from it",
                )
            if odds:
                break


def _had_all_bits(ckpt: Checkpoint, numbers: ChunkNumbers, odd: OddOne) -> bool:
    """Whether elements of these chunks were drawn from the step before too, and use all bits in each of them."""
    table = ckpt.changes
    if table is None:
        return False
    places = {(numbers.tensors[int(numbers.tensor[row])].fqn, int(numbers.chunk[row])) for row in odd.rows.tolist()}
    drawn = zip(table.follow.tolist(), table.chunk.tolist(), table.short_was.tolist(), strict=True)
    were_short = [was for follow, chunk, was in drawn if (table.follows[follow].key, chunk) in places]
    return bool(were_short) and not any(were_short)
