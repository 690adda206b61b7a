from __future__ import annotations

from collections.abc import Iterator

from ckptlint.analysis.ranks.rank_sets import compared
from ckptlint.model import Checkpoint
from ckptlint.model.text import first_names, fold_names, plural, verb
from ckptlint.rule import Finding, Location, Severity, rule

_SHOWN = 6


@rule("RNK002", "rank-files-disagree", Severity.ERROR, needs=("rank files",))
def rank_files_disagree(ckpt: Checkpoint) -> Iterator[Finding]:
    """Files of one set disagree on a tensor or on the job.

    What it checks:
        All files of a set of per-rank torch files hold the same keys and agree on each: form, dtype, global shape,
        device mesh and placements. They also agree on the job: world size, version, stage, counts. Keys that only some
        pipeline stages or expert groups have are fine. If files disagree on a tensor, GEO rules do not judge it.
    Why it matters:
        The files do not belong together: a load fails, or puts rows in the wrong place.
    Usual causes:
        Files of two saves in one folder, a save into a used folder with another number of GPUs, or a rank that ran
        other code.
    How to fix:
        Take all files from one save. The smaller group of files is probably the one from the other save.
    See:
        torch.distributed.tensor.DTensor, verl/model_merger/fsdp_model_merger.py
    """
    for item in compared(ckpt).job:
        fewest, files = item.says[-1]
        others = sum(len(rank_files) for value, rank_files in item.says[:-1])
        shown = first_names(files, _SHOWN)
        keys = item.fqns[0] if len(item.fqns) == 1 else f"{len(item.fqns):,} keys"
        if item.what == "keys":
            few, many = ("holds", "lacks") if fewest == "hold" else ("lacks", "holds")
            holders = f"{plural(others, 'other file')} {verb(others, many)}"
            message = f"{shown} {verb(len(files), few)} {keys}, which {holders}"
        else:
            of = f" of {keys}" if item.fqns else ""
            says = "; ".join(f"{value} in {plural(len(rank_files), 'file')}" for value, rank_files in item.says[:-1])
            message = f"the {item.what}{of} is {fewest} in {shown}, but {says}"
        yield Finding(
            message,
            at=Location(item.fqns[0] if len(item.fqns) == 1 else None, file=files[0]),
            identity=(item.what, *files, *item.fqns[:1000]),
            confidence="certain" if item.is_sure else "likely",
            notes=(("keys", first_names(fold_names(item.fqns), _SHOWN) if len(item.fqns) > 1 else ""),),
            hint="take all files from the same save; compare the times of these files with the others'",
            group=f"{item.what} {files[0]}",
        )
