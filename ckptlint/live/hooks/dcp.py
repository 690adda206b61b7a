"""Hooks into torch.distributed.checkpoint."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckptlint.errors import CheckpointError
from ckptlint.live import api
from ckptlint.live.collect.extract import RankChunk, extract, findings_of, resolved
from ckptlint.live.compare import protocol
from ckptlint.model import RankTable
from ckptlint.model.text import named_ranks
from ckptlint.rule import Severity

if TYPE_CHECKING:
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner as _Planner
else:
    _Planner = object

_SAVES = ("save", "async_save")
_SECOND_HALF = ("torch.distributed.checkpoint._async_", "concurrent.futures")  # torch 2.13; 2.4 submits `save` itself

Undo = Callable[[], None]
"""Takes a patch back."""


def check_save(state_dict: api.State, path: object, **options: Any) -> None:
    """Check what all ranks are about to save under a path, which may have been saved to before; see `live.check`."""
    if not api.is_off():
        api.installed().check(state_dict, tag=path, repeats=True, **options)


def patch_dcp(**options: Any) -> Undo:
    """From now on check before every `torch.distributed.checkpoint.save` and `async_save`; see `live.check`.

    It replaces the functions where callers look them up, in that module and in its `state_dict_saver`: `import
    torch.distributed.checkpoint as dcp; dcp.save(...)`, torch's own Checkpointer, or an import from either after this
    call. A name imported earlier keeps the old one. `state_dict()` of Stateful values is called once, on the calling
    thread; if it raises on one rank, no rank saves. A save that not all ranks make (`no_dist`, a smaller process group)
    is not checked.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import state_dict_saver

    options = api.checked_options(options)
    undos = [
        patch(module, name, functools.partial(_checked, options=options, by_torch=module is state_dict_saver))
        for module in (dcp, state_dict_saver)
        for name in _SAVES
    ]

    def undo_all() -> None:
        for undo in undos:
            undo()

    return undo_all


def patch(module: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Undo:
    """Replace a function of a module by what `wrap` makes of it, and return what takes that out again.

    It may stand below wrappers of others by then, and is passed through there. It pickles by its name in the module.
    """
    original: Callable[..., Any] = getattr(module, name)
    wrapped = wrap(original)

    @functools.wraps(original)
    def patched(*args: Any, **named: Any) -> Any:
        return (original if patched in _undone else wrapped)(*args, **named)

    patched.__module__ = module.__name__
    setattr(module, name, patched)

    def undo() -> None:
        _undone[patched] = original
        while (outermost := getattr(module, name)) in _undone:
            setattr(module, name, _undone[outermost])

    return undo


_undone: dict[Callable[..., Any], Callable[..., Any]] = {}
"""Patches that were taken back, with what is below them."""


def _checked(original: Callable[..., Any], options: Mapping[str, Any], by_torch: bool) -> Callable[..., Any]:
    """The function with a check before it, but for the second half of `async_save` where torch itself looks it up."""

    @functools.wraps(original)
    def save(state_dict: Mapping[Any, Any], **arguments: Any) -> Any:
        is_second_half = by_torch and sys._getframe(2).f_globals.get("__name__", "").startswith(_SECOND_HALF)
        if api.is_off() or is_second_half or not _is_by_all(**arguments):
            return original(state_dict, **arguments)
        writer = arguments.get("storage_writer")
        path = arguments.get("checkpoint_id") or getattr(writer, "path", "")
        # made within the check: all ranks then learn of one on which `state_dict()` raises
        state = functools.cache(lambda: dict(resolved(state_dict)))
        check_save(state, path, resolve_stateful=False, **options)
        return original(state(), **arguments)

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
    judges what it holds; the coordinator compares the plans of all ranks before torch drops those of replicas. Contents
    are not compared, nor are plans again that `enable_plan_caching` keeps from the second save on.

    Raises:
        CheckpointError: there is an error; torch raises CheckpointException from it on all ranks, and no file is
            written. Warnings only warn.

    Source: torch 2.13 torch.distributed.checkpoint.state_dict_saver._save_state_dict (order of the calls)
    """

    def create_local_plan(self) -> Any:
        """The plan of this rank, after what it holds was judged."""
        rank, world = api.rank_and_world()
        rank_chunks = extract(self.state_dict, resolve_stateful=False)
        _judge(protocol.no_table(world, *findings_of(rank_chunks, rank)), "state dict")
        return super().create_local_plan()

    def create_global_plan(self, all_plans: list[Any]) -> Any:
        """The plan of all ranks, after theirs were compared; on the coordinator only."""
        _judge(compare(all_plans), "save plans")
        api.announce(len(all_plans))
        return super().create_global_plan(all_plans)


def compare(plans: Sequence[Any]) -> RankTable:
    """The keys in which the SavePlans of all ranks, in the order of ranks, contradict each other before deduplication.

    torch drops all but one of the chunks that start at one offset, and takes shape and dtype of a tensor from the first
    rank that has it. So only here is seen that they differ. Holes and other overlaps torch finds by itself.

    Source: torch 2.13 torch.distributed.checkpoint._dedup_save_plans.dedup_save_plans,
    torch.distributed.checkpoint.default_planner.create_default_global_save_plan
    """
    if cached := [rank for rank, plan in enumerate(plans) if not getattr(plan, "usable", True)]:
        api.warn(lambda: f"torch cached the save plans of {named_ranks(cached)}: they were not compared", stacklevel=3)
    described: dict[str, object] = {}
    sizes: dict[tuple[str, Any], Any] = {}
    torn: set[str] = set()
    for item in (item for plan in plans for item in plan.items):
        fqn, data = item.index.fqn, item.tensor_data
        about = data and (data.properties.dtype, data.size)
        if described.setdefault(fqn, about) != about:
            torn.add(fqn)
        if data and all(data.chunk.sizes):
            place = fqn, data.chunk.offsets
            if sizes.setdefault(place, data.chunk.sizes) != data.chunk.sizes:
                torn.add(fqn)
    return protocol.table_of([[_planned(item) for item in plan.items if item.index.fqn in torn] for plan in plans])


def _planned(item: Any) -> RankChunk:
    """What a WriteItem says that a rank holds; who writes it is decided later."""
    fqn, data = item.index.fqn, item.tensor_data
    if data is None:
        return RankChunk(fqn, "object", "plain", "", (1,), (0,), (1,), -1, 0, None)
    dtype, chunk = str(data.properties.dtype).removeprefix("torch."), data.chunk
    box = tuple(data.size), tuple(chunk.offsets), tuple(chunk.sizes)
    return RankChunk(fqn, "tensor", "plain", dtype, *box, -1, 0, None)


def _judge(table: RankTable, path: str) -> None:
    """Raise what is wrong, warn of what is suspicious, in the words of `live.check`."""
    report = api.judge_ranks(table, path, 0.0)
    if report.fails:
        raise CheckpointError(f"{api.as_text(report)}{api.REFUSED}\n")
    if any(item.severity >= Severity.WARNING for item in report.diagnostics):
        api.warn(lambda: api.as_text(report), stacklevel=3)
