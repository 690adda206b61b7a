"""Hooks into torch.distributed.checkpoint."""

from __future__ import annotations

import functools
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckptlint.boxes import Box
from ckptlint.errors import CheckpointError
from ckptlint.live import api
from ckptlint.live.extract import Problem, extract, resolved
from ckptlint.ranks import named

if TYPE_CHECKING:
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner as _Planner
else:
    _Planner = object

_WARNINGS = frozenset({"LIV104", "LIV109"})
_SHOWN = 20

Findings = list[tuple[str, Problem]]
"""(fqn, problem)"""


Undo = Callable[[], None]
"""Takes a patch back."""


def check_save(state_dict: Mapping[Any, Any], path: object, **options: Any) -> None:
    """Check what all ranks are about to save under a path, which may have been saved to before; see `live.check`."""
    if not api.is_off():
        api.installed().check(state_dict, tag=path, repeats=True, **options)


def patch_dcp(**options: Any) -> Undo:
    """From now on check before every `torch.distributed.checkpoint.save` and `async_save`; see `live.check`.

    The functions are replaced where callers look them up: `import torch.distributed.checkpoint as dcp; dcp.save(...)`,
    or an import inside of a function. A name that was imported from the module before keeps the old one. `state_dict()`
    of Stateful values is called once, on the calling thread. A save that not all ranks make (`no_dist`, a smaller
    process group) is not checked.
    """
    import torch.distributed.checkpoint as dcp

    originals = {name: getattr(dcp, name) for name in ("save", "async_save")}
    for name, original in originals.items():
        setattr(dcp, name, _checked(original, options))

    def undo() -> None:
        for name, original in originals.items():
            setattr(dcp, name, original)

    return undo


def _checked(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def save(state_dict: Mapping[Any, Any], **arguments: Any) -> Any:
        if api.is_off() or not _is_by_all(**arguments):
            return original(state_dict, **arguments)
        writer = arguments.get("storage_writer")
        path = arguments.get("checkpoint_id") or getattr(writer, "path", "")
        state = dict(resolved(state_dict))
        check_save(state, path, resolve_stateful=False, **options)
        return original(state, **arguments)

    return save


def _is_by_all(no_dist: bool = False, process_group: Any = None, **_: Any) -> bool:
    """Whether all ranks of the job make this save."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return True
    return not no_dist and dist.get_world_size(process_group) == dist.get_world_size()


class SaveLint(_Planner):
    """Mixin for a SavePlanner that judges the metadata of a save and sends nothing of its own.

    `class Planner(SaveLint, DefaultSavePlanner): ...` and `dcp.save(state_dict, planner=Planner(), ...)`. Each rank
    judges what it holds, the coordinator compares the plans of all ranks before those of replicas are dropped. Contents
    are not compared. What `enable_plan_caching` keeps from the second save on is not compared again.

    Raises:
        CheckpointError: something is wrong; torch passes it on to all ranks as CheckpointException, and no file is
            written. What is merely suspicious is a warning.

    Source:
        torch 2.13 torch.distributed.checkpoint.state_dict_saver._save_state_dict (order of the calls)
    """

    def create_local_plan(self) -> Any:
        """The plan of this rank, after what it holds was judged."""
        held = extract(self.state_dict, resolve_stateful=False)
        _report([(item.fqn, problem) for item in held for problem in item.problems])
        return super().create_local_plan()

    def create_global_plan(self, all_plans: list[Any]) -> Any:
        """The plan of all ranks, after theirs were compared; on the coordinator only."""
        _report(compare(all_plans))
        return super().create_global_plan(all_plans)


def compare(plans: Sequence[Any]) -> Findings:
    """What the SavePlans of all ranks, in the order of ranks, contradict each other in before deduplication.

    torch drops all but one of the chunks that start at one offset, and takes shape and dtype of a tensor from the first
    rank that has it. So only here is seen that they differ. Empty chunks are left out: they are not missed.

    Source:
        torch 2.13 torch.distributed.checkpoint._dedup_save_plans.dedup_save_plans,
        torch.distributed.checkpoint.default_planner.create_default_global_save_plan
    """
    tensors: dict[str, dict[str, dict[int, None]]] = defaultdict(lambda: defaultdict(dict))
    chunks: dict[tuple[str, tuple[int, ...]], dict[tuple[int, ...], dict[int, None]]]
    chunks = defaultdict(lambda: defaultdict(dict))
    cached = [rank for rank, plan in enumerate(plans) if not getattr(plan, "usable", True)]
    if cached:
        warnings.warn(f"plans that did not change are not compared: {named(cached)}", stacklevel=3)
    for rank, plan in enumerate(plans):
        for item in plan.items:
            data = item.tensor_data
            if data is None:
                tensors[item.index.fqn]["an object"][rank] = None
                continue
            dtype = str(data.properties.dtype).removeprefix("torch.")
            tensors[item.index.fqn][f"{dtype} {tuple(data.size)}"][rank] = None
            if all(data.chunk.sizes):
                chunks[item.index.fqn, tuple(data.chunk.offsets)][tuple(data.chunk.sizes)][rank] = None
    found: Findings = []
    for fqn, kinds in tensors.items():
        if len(kinds) > 1:
            found.append((fqn, ("LIV201", f"the ranks disagree about kind, dtype or shape{{of}}: {_by_rank(kinds)}")))
    for (fqn, offsets), sizes in chunks.items():
        if len(sizes) > 1:
            boxes = {str(Box(offsets, size)): holders for size, holders in sizes.items()}
            said = f"chunks{{of}} start at one place and end at others, of which one is kept: {_by_rank(boxes)}"
            found.append((fqn, ("LIV202", said)))
    return found


def _by_rank(variants: Mapping[str, Iterable[int]]) -> str:
    return ", ".join(f"{variant} on {named(holders)}" for variant, holders in variants.items())


def _report(found: Findings) -> None:
    """Warn of what is suspicious, raise what is wrong."""
    suspicious = [_line(fqn, problem) for fqn, problem in found if problem[0] in _WARNINGS]
    wrong = [_line(fqn, problem) for fqn, problem in found if problem[0] not in _WARNINGS]
    if suspicious:
        warnings.warn(_text("this state dict looks wrong", suspicious), stacklevel=3)
    if wrong:
        raise CheckpointError(_text("this state dict must not be saved", wrong))


def _line(fqn: str, problem: Problem) -> str:
    code, sentence = problem
    return f"{code}: {sentence.replace('{of}', f' of {fqn}')}"


def _text(title: str, lines: list[str]) -> str:
    more = [f"and {len(lines) - _SHOWN:,} more"] if len(lines) > _SHOWN else []
    return "\n".join([f"{title}:", *lines[:_SHOWN], *more])
