"""The exact form of a job: requests from its own code, run without memory, network or GPU (`ranks`)."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ckptlint.errors import ConfigError
from ckptlint.patterns import lazy_pattern
from ckptlint.planning.job import Job, Target, TensorRequest
from ckptlint.planning.outcome import Constraint
from ckptlint.planning.quick import JOB_AXES
from ckptlint.progress import advance

MOST_PROCESSES = 4096
_MISPLACED = "torch takes the shards that ranks hold to be larger or smaller, so the load raises or fills them wrongly"
_SOURCE = "torch 2.13, torch/distributed/tensor/_utils.py: _compute_local_shape_and_global_offset of _StridedShard"
_Name = tuple[str, tuple[int, ...] | None, str | None]
_Chunk = tuple[int, list[int], list[int]]  # rank, offsets, sizes
_AXIS = lazy_pattern(r"\s*([A-Za-z_]\w*)\s*=\s*([1-9][0-9]{0,8})\s*")
_FUNCTION = lazy_pattern(r"(.+):([A-Za-z_][\w.]*)")


def exact_job(
    function: str, mesh: Mapping[str, int], keys: Iterable[str], per_node: int = 8, seconds: float = 600
) -> Job:
    """The job whose requests come from a function that returns the sharded state dict of a rank, or ConfigError.

    The function runs once for each rank, and only because the user named it. It is given a `DeviceMesh` where it takes
    an argument, and builds its own otherwise.

    Args:
        function: `file.py:function`, or `package.module:function`.
        mesh: name of an axis -> its size; their product is the number of ranks.
        keys: of the checkpoint; torch asks for the names of torch 2.3 where the checkpoint has them.
        per_node: ranks that share a node, for `LOCAL_RANK`.
    """
    world = prod(mesh.values())
    if not 0 < world <= MOST_PROCESSES:
        raise ConfigError(f"the exact form runs the function for 1 to {MOST_PROCESSES:,} ranks, not for {world:,}")
    _check(function)
    with tempfile.TemporaryDirectory(prefix="ckptlint-plan-") as name:
        folder = Path(name)
        request = {"function": function, "world": world, "per_node": per_node, "mesh": {**mesh}, "keys": [*keys]}
        (folder / "request.json").write_text(json.dumps(request))
        _run(folder, function, world, seconds)
        return Job("exact", function, world, *_requests(folder, function, mesh, world))


def axes_of(mesh: str) -> dict[str, int]:
    """The axes of a mesh, under any names, or ConfigError.

    >>> axes_of("replicate=2,shard=4")
    {'replicate': 2, 'shard': 4}
    """
    sizes: dict[str, int] = {}
    for text in mesh.split(","):
        match = _AXIS.fullmatch(text)
        if match is None or match[1] in sizes:
            raise ConfigError(f"{mesh} is not a mesh such as dp=4,tp=2")
        sizes[match[1]] = int(match[2])
    return sizes


def _check(function: str) -> None:
    match = _FUNCTION.fullmatch(function)
    if match is None:
        raise ConfigError(f"{function} is not a function such as job.py:state_dict or package.module:state_dict")
    if match[1].endswith(".py") and not Path(match[1]).is_file():
        raise ConfigError(f"{function}: there is no file {match[1]}")
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(
            f"{function} needs torch, which is not installed: pip install torch --index-url https://download.pytorch.org/whl/cpu"
        )
    if not hasattr(os, "fork"):
        raise ConfigError(
            "ckptlint runs a function for each rank in a fork, and this system has none: name sizes of axes"
        )


def _run(folder: Path, function: str, world: int, seconds: float) -> None:
    child = _started(folder)
    waited = 0.0
    try:
        while True:
            try:
                child.wait(0.5)
                break
            except subprocess.TimeoutExpired:
                waited += 0.5
            done = len([*folder.glob("rank-*.json")])
            advance("ranks", done, world)
            if waited >= seconds:
                raise ConfigError(
                    f"{function} did not finish within {seconds:g} s: {done:,} of {world:,} ranks were done"
                )
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    if child.returncode:
        last = (folder / "stderr").read_text(errors="replace").strip().splitlines()[-1:]
        raise ConfigError("\n  ".join([f"{function} could not be run", *last]))


def _started(folder: Path) -> subprocess.Popen[bytes]:
    """The process that forks all ranks; what they print is thrown away."""
    return subprocess.Popen(  # noqa: S603  the user named the function
        [sys.executable, "-m", "ckptlint.planning.ranks", str(folder)],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=(folder / "stderr").open("wb"),
        start_new_session=True,
    )


def _requests(
    folder: Path, function: str, mesh: Mapping[str, int], world: int
) -> tuple[list[TensorRequest], tuple[Constraint, ...]]:
    """The answers of all ranks, put together by key."""
    ranks: dict[_Name, list[int]] = defaultdict(list)
    boxes: dict[_Name, list[_Chunk]] = defaultdict(list)
    misplaced: dict[str, None] = {}
    failed = [rank for rank in range(world) if (answer := _answer(folder, rank)) is not None and "failed" in answer]
    for rank in failed or range(world):
        answer = _answer(folder, rank)
        if answer is None:
            raise ConfigError(f"{function}, run for rank {rank} of {world}, gave no answer")
        if "failed" in answer:
            sentence = f"{function}, run for rank {rank} of {world}, {answer['failed']}"
            raise ConfigError("\n  ".join([sentence, *answer["error"], *_lacking(answer["error"], mesh)]))
        for key, shape, dtype, chunks, fits in answer["entries"]:
            if not fits:
                misplaced[key] = None
            name = key, None if shape is None else tuple(shape), dtype
            ranks[name].append(rank)
            boxes[name].extend((rank, *chunk) for chunk in chunks)
    shared: dict[tuple[object, ...], Target] = {}
    requests = []
    for name, asking in ranks.items():
        key, shape, dtype = name
        target = None
        if shape is not None:
            at, offsets, sizes = ([chunk[i] for chunk in boxes[name]] for i in range(3))
            columns = (np.array(column, np.int64).reshape(len(at), len(shape)) for column in (offsets, sizes))
            target = Target.of_ranks(shape, np.array(at, np.int64), *columns)
            target = shared.setdefault(target.content, target)
        requests.append(TensorRequest(key, dtype, target, np.array(asking, np.int64)))
    constraints = (Constraint("fails", _MISPLACED, tuple(misplaced), _SOURCE),) if misplaced else ()
    return requests, constraints


def _lacking(error: list[str], mesh: Mapping[str, int]) -> list[str]:
    """Advice where a function asks the mesh for an axis that it lacks; [] otherwise."""
    last_line = error[-1] if error and error[-1].startswith("KeyError: ") else ""
    absent = [name for name in re.findall(r"'(\w+)'", last_line) if name not in mesh]
    if not absent or not ("mesh" in last_line.lower() or absent[0] in JOB_AXES):
        return []
    axes = f"{'axis' if len(mesh) == 1 else 'axes'} {', '.join(mesh)}"
    return [f"the mesh has the {axes} and no {absent[0]}: give --mesh, such as dp=4,{absent[0]}=2"]


def _answer(folder: Path, rank: int) -> dict[str, Any] | None:
    try:
        answer: dict[str, Any] = json.loads((folder / f"rank-{rank}.json").read_text())
    except FileNotFoundError:
        return None
    return answer
