from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.ranks.rank_chunks import at_ranks, described_row, holders, ranks_of, torn
from ckptlint.grouping import grouped
from ckptlint.model import Checkpoint
from ckptlint.model.text import shape_text
from ckptlint.rule import Finding, Severity, require, rule


@rule("LIV201", "metadata-disagrees", Severity.ERROR, live=True)
def metadata_disagrees(ckpt: Checkpoint) -> Iterator[Finding]:
    """The ranks that hold a key give it different shapes, dtypes or kinds.

    What it checks:
        All ranks that hold a key agree on its kind (tensor or object), dtype, number of axes and global shape. For
        torch's ShardedTensors they also agree where all shards lie.
    Why it matters:
        The save keeps the description of one rank and the bytes of all. A load reads some of them with the wrong shape
        or dtype, and raises no error.
    Usual causes:
        A rank built the tensor from other settings (padding, precision), or runs another version of the code.
    How to fix:
        Compare how the named ranks build this tensor.
    See:
        torch.distributed.checkpoint.default_planner.create_default_global_save_plan
    """
    table = require(ckpt.ranks)
    disagreed = torn(table)
    for key_rows in holders(table):
        if key_rows.fqn in disagreed:
            variants = grouped((described_row(table, row), row) for row in key_rows.rows.tolist())
            ordered = sorted(variants.items(), key=lambda item: -len(item[1]))
            kinds, dtypes, shapes = (len({variant[i] for variant in variants}) > 1 for i in range(3))
            what = "kind" if kinds else " and ".join(["global shape"] * shapes + ["dtype"] * dtypes)
            texts = [
                f"{kind if kind == 'object' else dtype} {shape_text(shape)} on {ranks_of(table, rows)}"
                for (kind, dtype, shape), rows in ordered
            ]
            odd = len(ordered[0][1]) > sum(len(rows) for _, rows in ordered[1:])
            yield Finding(
                f"the ranks disagree on the {what}{{of}}",
                at=at_ranks(table, key_rows.fqn, key_rows.rows),
                identity=(what,),
                notes=tuple(("held", text) for text in texts),
                hint=f"most ranks agree: look at {ranks_of(table, ordered[-1][1])} first" if odd else "",
                group=what,
            )
        elif len(set(table.view[key_rows.rows].tolist())) > 1:
            by_view = grouped((int(table.view[row]), row) for row in key_rows.rows.tolist())
            message = "the ranks disagree on where the shards{of} lie"
            notes = tuple((f"view {i}", ranks_of(table, rows)) for i, rows in enumerate(by_view.values(), 1))
            yield Finding(message, at=at_ranks(table, key_rows.fqn, key_rows.rows), identity=("view",), notes=notes)
