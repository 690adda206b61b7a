"""Digests on a GPU beside a copy of the same memory, and a check beside a training step of the model it checks.

    python bench/speed/gpu.py [--eager] [--profile]

One rank on one GPU. Each time is the least of five turns. `--eager` takes the digests with torch's operations, as where
Triton is missing; `--profile` prints where the host's time of a later check goes. Memory added is what the allocator
held at most above what it held before.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

from ckptlint.live import api
from ckptlint.live.collect import fused_digests
from ckptlint.live.collect.tensor_digest import Chunk, elem_digests, word_digests
from ckptlint.live.compare.group import Solo
from ckptlint.live.sealing import prepare_seal

TURNS = 5
SIZES = (
    (16, (8192, 4096), torch.bfloat16),
    (16, (65536, 4096), torch.bfloat16),
    (16, (4096, 4096), torch.float32),
    (16, (32768, 4096), torch.float32),
    (10_000, (64, 32), torch.bfloat16),
    (2_000, (1024, 64), torch.bfloat16),
)


def least(action: Callable[[], Any], turns: int = TURNS) -> float:
    """Milliseconds of the fastest turn, after one that compiles."""
    action()
    times = []
    for _ in range(turns):
        torch.cuda.synchronize()
        began = time.perf_counter()
        action()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return 1e3 * min(times)


def added(action: Callable[[], Any]) -> float:
    """MiB that the action took on the device at most."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    action()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def rates(name: str, tensors: list[torch.Tensor]) -> list[Any]:
    """A row: GB/s of a copy (read and written), and of digests of words, of elements, of half of the columns."""
    size = sum(tensor.nbytes for tensor in tensors)
    into = torch.empty_like(tensors[0])

    def copied() -> None:
        for tensor in tensors:
            into.copy_(tensor)

    whole = [Chunk(tensor, (0, 0), tensor.shape, tensor.shape) for tensor in tensors]
    halves = [tensor[:, : tensor.shape[1] // 2] for tensor in tensors]
    half = [Chunk(one, (0, 0), one.shape, tensor.shape) for one, tensor in zip(halves, tensors, strict=True)]
    times = [least(partial(take, chunks)) for take, chunks in ((word_digests, tensors), (elem_digests, whole))]
    times.append(least(partial(elem_digests, half)))
    speeds = [2 * size / least(copied) / 1e6, *(size / ms / 1e6 for ms in times[:2]), size / 2 / times[2] / 1e6]
    microseconds = [1e3 * ms / len(tensors) for ms in times[:2]]
    return [name, *speeds, *microseconds, added(partial(word_digests, tensors))]


class Block(nn.Module):
    """A transformer layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.attention = nn.ModuleList([nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)])
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Values of the same shape, [batch, tokens, width]."""
        batch, tokens, width = x.shape
        query, key, value = (
            self.attention[0](self.norms[0](x)).view(batch, tokens, 3, 16, width // 16).permute(2, 0, 3, 1, 4)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention[1](mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.mlp(self.norms[1](x))


def beside_a_step(profile: bool) -> list[list[Any]]:
    """Rows: milliseconds of a training step of 1.2 B parameters, of checks of its state, and of a seal."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(2048) for _ in range(24))).cuda().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    tokens = torch.randn(8, 2048, 2048, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        optimizer.zero_grad()
        model(tokens).square().mean().backward()
        optimizer.step()

    step_ms = least(step)
    moments = {f"{i}.{key}": value for i, row in enumerate(optimizer.state.values()) for key, value in row.items()}
    state = {"model": model.state_dict(), "optim": moments}
    live, tags = api.Live(Solo(), None, 60.0), count()
    size = sum(tensor.nbytes for part in state.values() for tensor in part.values())

    def check(**options: Any) -> None:
        live.check(state, tag=next(tags), repeats=True, **options)

    began = time.perf_counter()
    check()
    first = 1e3 * (time.perf_counter() - began)
    seal = least(partial(prepare_seal, state))
    rows = [
        [f"a training step, state of {size / 2**30:.2f} GiB", step_ms, 100.0],
        ["the first check, every tensor's digest", first, 100 * first / step_ms],
    ]
    options = {"every tensor's digest": {}, "no digests": {"digest": "none"}}
    for name, chosen in options.items():
        later = least(partial(check, **chosen))
        rows.append([f"a later check, {name}", later, 100 * later / step_ms])
    rows.append(["a seal", seal, 100 * seal / step_ms])
    if profile:
        with cProfile.Profile() as profiler:
            check()
        pstats.Stats(profiler).sort_stats("tottime").print_stats(25)
    return rows


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    if arguments.eager:
        fused_digests._failed = True
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    rows = []
    for number, shape, dtype in SIZES[:: 2 if arguments.eager else 1]:
        tensors = [torch.randn(shape, device="cuda").to(dtype) for _ in range(number)]
        rows.append(rates(f"{number} of {list(shape)}, {dtype}", tensors))
        del tensors
        torch.cuda.empty_cache()
    heads = ["tensors", "copy", "words", "elements", "half the columns", "us each, words", "elements", "MiB added"]
    print("GB/s")
    print(tabulate(rows, heads, floatfmt=".1f"), flush=True)
    print(tabulate(beside_a_step(arguments.profile), ["", "ms", "% of the step"], floatfmt=".1f"))


if __name__ == "__main__":
    main()
