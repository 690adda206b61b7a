from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ckptlint.analysis.optimizer.beside import of_each
from ckptlint.depth import Depth
from ckptlint.grouping import grouped
from ckptlint.model import Checkpoint
from ckptlint.model.text import plural
from ckptlint.model.tiling import distinct
from ckptlint.numerics.chunks import chunk_numbers
from ckptlint.rule import Finding, Location, Severity, require, rule
from ckptlint.vocabulary.keys import SQUARES

_HINT = "go back to a step whose second moments are whole, or resume with this state reset to zero"
_EXACT = 20_000  # negative numbers that are surely counted one by one


@rule("OPT010", "negative-squares", Severity.ERROR, depth=Depth.HEADERS)
def negative_squares(ckpt: Checkpoint) -> Iterator[Finding]:
    """A sum of squares is below 0, or a largest second moment below the second moment.

    What it checks:
        No value of a state that sums squares or magnitudes (`exp_avg_sq`, `square_avg`, Adagrad's `sum`, Adafactor's
        rows and columns, `exp_inf`) or of a `running_var` is below 0 (with `--depth data`), and no element of
        `max_exp_avg_sq` is below that of `exp_avg_sq` (elements drawn from both).
    Why it matters:
        Optimizers and batch norms divide by the square root: the next step writes NaN, or moves the weight far off.
    Usual causes:
        The bytes are those of another tensor, such as the first moment; a part that was never written.
    How to fix:
        Go back to a step whose second moments are whole.
    See:
        torch.optim.Adam, amsgrad
    """
    numbers = chunk_numbers(ckpt)
    negatives = numbers.column("negatives")
    are_variances = np.array([tensor.fqn.endswith("running_var") for tensor in numbers.tensors], bool)[numbers.tensor]
    rows = np.flatnonzero((negatives > 0) & (numbers.are_state(*SQUARES) | numbers.are_state("") & are_variances))
    for number in distinct(numbers.tensor[rows]).tolist():
        mine = rows[numbers.tensor[rows] == number]
        tensor, chunks = numbers.tensors[number], numbers.chunk[mine]
        count, whole = int(negatives[mine].sum()), int(numbers.elements[mine].sum())
        box, name = tensor.tiling.box(int(chunks[0])), ckpt.chunk_file(tensor, int(chunks[0]))
        where = f"chunk {box}" if len(chunks) == 1 else f"{len(chunks):,} chunks, the first {box},"
        what = "sum of squares" if numbers.states[number] else "variance"
        yield Finding(
            f"{_counted(count)} of {plural(whole, 'value')} in {where}{{of}} are below 0, which no {what} is",
            at=Location(tensor, region=box, rows=tuple(chunks[:16].tolist()), file=name),
            hint=_HINT if numbers.states[number] else "go back to a step whose running statistics are whole",
            group=f"negative {name}",
        )
    by_file = grouped(((item.file, item.state), item) for item in require(ckpt.payload).odd_values if item.negatives)
    for (file, state), items in by_file.items():
        values = _counted(sum(item.negatives for item in items))
        first, more = items[0].param, f" and {plural(len(items) - 1, 'more parameter')}" if len(items) > 1 else ""
        message = f"{values} values in {state} of parameter {first}{more} are below 0, which no sum of squares is"
        yield Finding(message, at=Location(file=file), identity=(state,), hint=_HINT)
    yield from of_each(ckpt, _below_second)


def _counted(count: int) -> str:
    """The count; "about" where it may be that of a sample (payload/values.py)."""
    return f"{'about ' if count > _EXACT else ''}{count:,}"


def _below_second(ckpt: Checkpoint) -> Iterator[Finding]:
    pairs = ckpt.pairs
    if pairs is None:  # of a sample
        return
    for row in np.flatnonzero(pairs.odd > 0).tolist():
        pair, chunk = pairs.pairs[int(pairs.pair[row])], int(pairs.chunk[row])
        if pair.law == "maximum":
            tensor = ckpt.tensors[pair.first]
            at = Location.of_chunk(ckpt, tensor, chunk)
            message = (
                f"{int(pairs.odd[row]):,} of {plural(int(pairs.drawn[row]), 'value')} in chunk {at.region}{{of}} are "
                f"below those of {pair.second}, of which it holds the largest so far"
            )
            yield Finding(message, at=at, hint=_HINT, group=f"maximum {at.file}", partners=(pair.second,))
