"""Runs the user's function for each rank of a job and collects the state dicts, without memory, network or GPU.

Runs as its own process, `python -m ckptlint.planning.ranks FOLDER`: `request.json` names the function, `rank-N.json` is
the answer of rank N. Each rank is a fork that imports the user's file anew, since a file may read its rank on import.
Tensors are torch's fake ones (`FakeTensorMode`), the process group is fake, and every GPU device becomes the CPU.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
import torch._dynamo  # what optimizers and FSDP import late, once and not in each fork
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.checkpoint import _version
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._sharded_tensor_utils import _flatten_sharded_tensors
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ckptlint.model.text import printable

_JOBS = 8
_LINES = 6  # of a traceback


# ---------------------------------------------------------------- a rank without memory, network or GPU


class _SmallThingsAreReal(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tensors made from numbers (a step, the ranks of a mesh) are real; the value of a fake one is 1."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if any(isinstance(tensor, FakeTensor) for tensor in tensors):
            if func is torch.ops.aten._local_scalar_dense.default:
                dtype = args[0].dtype
                return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
        elif tensors or "arange" in func.name():
            with unset_fake_temporarily():
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class _NoGpu(TorchFunctionMode):
    """Replaces every GPU device by the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        # A text such as "cuda" may also be a key or a name. It counts as a device only in calls that take one.
        names = func is torch.Tensor.to or "device" in kwargs
        args, kwargs = tree_map(
            lambda leaf: leaf if isinstance(leaf, str) and not names else _off_gpu(leaf), (args, kwargs)
        )
        return func(*args, **kwargs)


def _off_gpu(leaf: Any) -> Any:
    """The CPU for a GPU device or its name; any other value unchanged."""
    if isinstance(leaf, torch.device):
        return torch.device("cpu") if leaf.type == "cuda" else leaf
    return "cpu" if isinstance(leaf, str) and (leaf == "cuda" or leaf.startswith("cuda:")) else leaf


def _stand_ins(world: int, per_node: int) -> None:
    """Replace functions of torch that need a GPU or other ranks; the fake group exists already."""
    modules: Any = torch.cuda
    modules.set_device = lambda device: None
    modules.current_device = lambda: 0
    modules.device_count = lambda: per_node
    groups: Any = (dist, dist.distributed_c10d)
    for module in groups:
        module.init_process_group = lambda *args, **kwargs: None
        module.destroy_process_group = lambda *args, **kwargs: None
        module.all_gather_object = _gathered
        module.broadcast_object_list = lambda *args, **kwargs: None
    made: Any = DeviceMesh.__init__

    @functools.wraps(made)
    def on_cpu(self: DeviceMesh, device_type: str, *args: Any, **kwargs: Any) -> None:
        made(self, _off_gpu(device_type), *args, **kwargs)

    mesh: Any = DeviceMesh
    mesh.__init__ = on_cpu
    _modules_stay()
    chosen = torch.set_default_device
    torch_module: Any = torch
    torch_module.set_default_device = lambda device: chosen(None if device is None else _off_gpu(torch.device(device)))


def _modules_stay() -> None:
    """Make `Module.to` keep the device, since only the CPU exists and torch cannot swap fake parameters in place."""
    module: Any = torch.nn.Module
    move = module.to

    @functools.wraps(move)
    def to(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        args, kwargs = tree_map(_off_gpu, (args, kwargs))
        _, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
        return self if dtype is None else cast(torch.nn.Module, move(self, *args, **kwargs))

    module.to = to
    module.cuda = lambda self, device=None: self


def _gathered(results: list[Any], value: Any, group: Any = None) -> None:
    """`all_gather_object` as if every rank passed the same value."""
    results[:] = [value] * len(results)


def _state_dict(request: Mapping[str, Any], rank: int) -> Any:
    """The state dict that the user's function returns for one rank."""
    world, per_node = request["world"], request["per_node"]
    environment = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank % per_node, "LOCAL_WORLD_SIZE": per_node}
    environment |= {"GROUP_RANK": rank // per_node, "MASTER_PORT": 29500}
    os.environ.update({name: str(value) for name, value in environment.items()} | {"MASTER_ADDR": "localhost"})
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    _stand_ins(world, per_node)
    function = _found(request["function"])
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    takes_mesh = any(
        parameter.default is parameter.empty and parameter.kind in positional
        for parameter in inspect.signature(function).parameters.values()
    )
    sizes, names = request["mesh"].values(), request["mesh"].keys()
    arguments = [init_device_mesh("cpu", (*sizes,), mesh_dim_names=(*names,))] if takes_mesh else []
    small: Any = _SmallThingsAreReal
    with ExitStack() as stack:
        for mode in (FakeTensorMode(allow_non_fake_inputs=True), small(), _NoGpu()):
            stack.enter_context(mode)
        state_dict = function(*arguments)
        if isinstance(state_dict, dict):  # as torch.distributed.checkpoint.load does
            state_dict = {key: state_dict[key] for key in sorted(state_dict)}
            state_dict = {
                key: value.state_dict() if isinstance(value, Stateful) else value for key, value in state_dict.items()
            }
    return state_dict


def _found(spec: str) -> Callable[..., Any]:
    """The function `file.py:function`, or `package.module:function`."""
    where, _, attribute = spec.rpartition(":")
    sys.path.insert(0, "")
    if where.endswith(".py"):
        path = Path(where).resolve()
        sys.path.insert(0, str(path.parent))
        module_spec = importlib.util.spec_from_file_location(path.stem, path)
        assert module_spec is not None and module_spec.loader is not None
        module = importlib.util.module_from_spec(module_spec)
        sys.modules[path.stem] = module
        module_spec.loader.exec_module(module)
    else:
        module = importlib.import_module(where)
    function: Any = module
    for name in attribute.split("."):
        function = getattr(function, name)
    return cast("Callable[..., Any]", function)


# ---------------------------------------------------------------- what a rank wants


def _wanted(state_dict: dict[str, Any], stored: frozenset[str]) -> Iterator[list[Any]]:
    """[key, shape, dtype, [[offsets, sizes], ...], fits] of each entry; shape and dtype are None for objects.

    `fits`: whether the local shard has as many elements as torch computes from the placements.

    Source: torch 2.13 `DefaultLoadPlanner.set_up_planner`, `create_local_plan`, `create_default_local_load_plan`
    """
    flat, _ = flatten_state_dict(_flatten_sharded_tensors(state_dict))
    absent = {key for key in stored if key not in {printable(key) for key in flat}}
    # torch 2.3 and before flatten some nested values to other keys, and torch itself retries this way. The old names
    # are used only if the checkpoint has some that the new ones lack.
    if absent:
        version: Any = _version
        version._derived_version = "2_3"
        old, _ = flatten_state_dict(state_dict)
        version._derived_version = None
        flat = old if absent & {printable(key) for key in old} else flat
    for key, value in flat.items():
        is_sized = getattr(value, "size", None) is not None and not isinstance(value, (str, bytes))
        if not isinstance(value, torch.Tensor) and not is_sized:
            yield [printable(key), None, None, [], True]
            continue
        chunks: Sequence[Any] = ()
        if not isinstance(value, DTensor) or value.device_mesh.get_coordinate() is not None:
            chunks = _create_chunk_list(value)
        dtype = str(getattr(value, "dtype", "unknown")).removeprefix("torch.")
        boxes = [[[*chunk.offsets], [*chunk.sizes]] for chunk in chunks]
        elements = value.to_local().numel() if chunks and isinstance(value, DTensor) else None
        fits = elements is None or elements == sum(prod(chunk.sizes) for chunk in chunks)
        yield [printable(key), [*value.size()], dtype, boxes, fits]


def _answer(folder: Path, request: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """`{"entries": ...}`, or `{"failed": sentence, "error": lines}`."""
    try:
        state_dict = _state_dict(request, rank)
    except SystemExit as error:
        return {"failed": f"called exit({error.code!r})", "error": []}
    except BaseException as error:
        return {"failed": "raised an error", "error": _error_lines(error, request["function"])}
    if not isinstance(state_dict, dict):
        return {"failed": f"returned {type(state_dict).__name__}, not a dict", "error": []}
    try:
        return {"entries": [*_wanted(state_dict, frozenset(request["keys"]))]}
    except Exception as error:
        return {"failed": "returned what torch cannot load into", "error": _error_lines(error, request["function"])}


def _error_lines(error: BaseException, function: str) -> list[str]:
    """Lines on an error: the last frame in the user's own code, then the message."""
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if frame.filename != __file__ and not _is_library(frame.filename)]
    lines = [f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}: {frame.line}" for frame in outside[-1:]]
    message = "".join(traceback.format_exception_only(error)).strip().splitlines()
    return [printable(line) for line in (*lines, *message[:_LINES])]


def _is_library(file: str) -> bool:
    return file.startswith("<frozen") or "/torch/" in file


# ---------------------------------------------------------------- all ranks


def _run(folder: Path) -> None:
    """Fork one process for each rank, a few at a time; stop at the first failure."""
    request = json.loads((folder / "request.json").read_text())
    running: dict[int, int] = {}
    waiting = iter(range(request["world"]))
    jobs = min(_JOBS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    while True:
        while len(running) < jobs and (rank := next(waiting, None)) is not None:
            if (pid := os.fork()) == 0:
                _be_rank(folder, request, rank)
            running[pid] = rank
        if not running:
            return
        pid, status = os.wait()
        rank = running.pop(pid)
        if (folder / f"rank-{rank}.json").exists():
            if status:
                return
        else:
            how = os.waitstatus_to_exitcode(status)
            said = f"ended with exit code {how}" if how >= 0 else f"was ended by signal {-how}"
            (folder / f"rank-{rank}.json").write_text(json.dumps({"failed": said, "error": []}))
            return


def _be_rank(folder: Path, request: Mapping[str, Any], rank: int) -> None:
    status = 1
    try:
        answer = _answer(folder, request, rank)
        draft = folder / f"rank-{rank}.part"
        draft.write_text(json.dumps(answer))
        draft.rename(folder / f"rank-{rank}.json")
        status = 1 if "failed" in answer else 0
    finally:
        os._exit(status)


if __name__ == "__main__":
    torch.set_num_threads(1)
    _run(Path(sys.argv[1]))
