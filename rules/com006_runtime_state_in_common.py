from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from ckptlint.grouping import grouped
from ckptlint.model import Checkpoint
from ckptlint.model.stored import StoredTensor
from ckptlint.model.text import printable
from ckptlint.patterns import lazy_pattern
from ckptlint.rule import Finding, Location, NotApplicable, Severity, rule
from ckptlint.vocabulary.config_fields import attributes
from ckptlint.vocabulary.dtypes import nbytes
from ckptlint.vocabulary.keys import role

_RUNTIME_ARGS = ("loaded_iteration",)
_RUNTIME_TOPS = ("args", "rng_state", "rerun_state_machine", "opt_param_scheduler")
_STEP = lazy_pattern(r"(?:^|\.)(?:param_state|state)\.\d+\.step$")
_DEPTH = 12


@rule("COM006", "runtime-state-in-common", Severity.INFO)
def runtime_state_in_common(ckpt: Checkpoint) -> Iterator[Finding]:
    """The common state holds values of one rank: tensors, steps of single parameters, arguments of the running job.

    What it checks:
        Outside of the random state and the parameter groups, the common state holds no tensor and no `step` of a single
        parameter. `args` has no attribute that only a running job sets (loaded_iteration). The `common_step` that
        optimizers share is allowed.
    Why it matters:
        Every rank restores the value of rank 0, and ranks that compare their common states report false differences.
    Usual causes:
        Nobody filtered the state dict before the save, or the job wrote into its own arguments.
    How to fix:
        Drop these keys before saving; when loading they can be ignored.
    See:
        megatron.core.dist_checkpointing.serialization.save
    """
    if ckpt.common is None:
        raise NotApplicable("there is no common state")
    others = ((str(top), value) for top, value in ckpt.common.values.items() if top not in _RUNTIME_TOPS)
    walked = (place for top, value in others for place in _walk(top, value, 0))
    by_role = grouped((role(path), (printable(path), size)) for path, size in walked)
    for members in by_role.values():
        path, known = members[0][0], [size for _, size in members if size is not None]
        what = f"{path} is" if len(members) == 1 else f"{len(members):,} values like {path} are"
        yield Finding(
            f"{what} in the common state, which every rank restores",
            at=Location(file=ckpt.common.source, label=f"{ckpt.common.source}: {path}"),
            identity=(role(path),),
            notes=(("size", f"{sum(known):,} bytes" if known else ""),),
        )
    arguments = attributes(ckpt.common.values.get("args"))
    present = [name for name in _RUNTIME_ARGS if arguments.get(name) is not None]
    if present:
        yield Finding(
            f"args holds {', '.join(present)}, which only a running job sets",
            at=Location(file=ckpt.common.source, label=f"{ckpt.common.source}: args"),
            identity=tuple(present),
        )


def _walk(path: str, value: Any, depth: int) -> Iterator[tuple[str, int | None]]:
    """The path of every tensor and every step of a single parameter, with the bytes of a tensor."""
    if isinstance(value, StoredTensor):
        if not path.endswith(".common_step"):
            yield path, nbytes(value.dtype, prod(value.shape))
    elif _STEP.search(path) and isinstance(value, (int, float)):
        yield path, None
    elif depth < _DEPTH and isinstance(value, dict):
        for key, item in value.items():
            if key != "param_groups":
                yield from _walk(f"{path}.{key}", item, depth + 1)
    elif depth < _DEPTH and isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _walk(f"{path}.{number}", item, depth + 1)
