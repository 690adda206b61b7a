"""A verl checkpoint of a 7B model on many ranks: what judging it costs.

`python bench/speed/verl.py FOLDER [RANKS]` writes one (torch is needed) where the folder is not there, and checks it at
depth `files`. Names, shapes, pickles and sizes are those of a real save; of the payload nothing is written, so the
files are sparse and take little room.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

HIDDEN, INNER, VOCABULARY, LAYERS, KEYS = 3584, 18944, 152064, 28, 512


def shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """The parameters of Qwen2.5-7B."""
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        own = f"model.layers.{layer}"
        for name, rows in {"q": HIDDEN, "k": KEYS, "v": KEYS}.items():
            yield f"{own}.self_attn.{name}_proj.weight", (rows, HIDDEN)
            yield f"{own}.self_attn.{name}_proj.bias", (rows,)
        yield f"{own}.self_attn.o_proj.weight", (HIDDEN, HIDDEN)
        yield f"{own}.mlp.gate_proj.weight", (INNER, HIDDEN)
        yield f"{own}.mlp.up_proj.weight", (INNER, HIDDEN)
        yield f"{own}.mlp.down_proj.weight", (HIDDEN, INNER)
        yield f"{own}.input_layernorm.weight", (HIDDEN,)
        yield f"{own}.post_attention_layernorm.weight", (HIDDEN,)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCABULARY, HIDDEN)


def write(folder: Path, world: int) -> None:
    """The files of all ranks, one rank after the other in a process group that is none."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    folder.mkdir(parents=True)
    for rank in range(world):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))

        def part(shape: tuple[int, ...], mesh: object = mesh, rank: int = rank) -> DTensor:
            size = -(-shape[0] // world)
            rows = min(max(shape[0] - rank * size, 0), size)
            strides = tuple(torch.empty(shape, device="meta").stride())
            local = torch.empty((rows, *shape[1:]))
            return DTensor.from_local(
                local, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=strides
            )  # fmt: skip

        model = {name: part(shape) for name, shape in shapes()}
        state = {
            number: {"step": torch.tensor(8.0), "exp_avg": part(shape), "exp_avg_sq": part(shape)}
            for number, (_, shape) in enumerate(shapes())
        }
        groups = [{"lr": 1e-6, "betas": (0.9, 0.999), "params": list(state)}]
        end = f"world_size_{world}_rank_{rank}.pt"
        with torch.serialization.skip_data():
            torch.save(model, folder / f"model_{end}")
            torch.save({"state": state, "param_groups": groups}, folder / f"optim_{end}")
        extra = {"lr_scheduler": {"last_epoch": 8}, "rng": {"cpu": torch.get_rng_state()}}
        torch.save(extra, folder / f"extra_state_{end}")
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("ranks", type=int, nargs="?", default=64)
    folder, world = vars(parser.parse_args()).values()
    if not folder.exists():
        write(folder, world)
    import ckptlint

    begun, before = time.perf_counter(), sum(os.times()[:4])
    report = ckptlint.check(folder)
    wall, spent = time.perf_counter() - begun, sum(os.times()[:4]) - before
    ckpt = report.checkpoints[0].checkpoint
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    print(f"{len(ckpt.files)} files, {len(ckpt.tensors):,} tensors, {len(ckpt.records):,} records: {report.verdict}")
    print(f"{wall:.1f} s, {spent:.1f} s of processor time, {peak:.0f} MiB; load {os.getloadavg()[0]:.0f}")


if __name__ == "__main__":
    main()
