"""Numbers drawn from a step of many ranks: python bench/speed/drawn.py FOLDER [--ranks 1024] [--tensors 32].

Makes a run of two steps as torch's DCP lays them out, weights and both moments of Adam in a file of each rank, one real
update apart. Damages the newest step in copies, looks whether `ckptlint RUN` names each damage, and times it against
`--depth files`. FOLDER is made, and removed again.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import shutil
import statistics
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

ROWS, COLUMNS = 8, 256
BETAS, RATE, DECAY = (0.9, 0.999), 1e-3, 0.01
STATES = ("model.{}", "optim.state.{}.exp_avg", "optim.state.{}.exp_avg_sq")
Chunks = list[np.ndarray[Any, Any]]
"""Weight, first and second moment of one tensor on one rank."""


def archive(value: object) -> bytes:
    """What torch.save writes."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def with_values(record: bytes, values: np.ndarray[Any, Any]) -> bytes:
    """A record of torch.save with other numbers, checksums right."""
    made, data = bytearray(record), values.astype("<f4").tobytes()
    directory = record.rindex(b"PK\x01\x02", 0, record.rindex(b"/data/0"))
    old = record.find(b"\x01\x02\x03\x04" * 4)
    crc = zlib.crc32(data).to_bytes(4, "little")
    made[old : old + len(data)] = data
    made[directory + 16 : directory + 20] = crc
    return bytes(made)


def first(ranks: int, tensor: int) -> list[Chunks]:
    """A tensor on each rank after three updates."""
    draw = np.random.default_rng(tensor)
    made = []
    for _ in range(ranks):
        chunks = [draw.normal(0, 0.05, (ROWS, COLUMNS)), np.zeros((ROWS, COLUMNS)), np.zeros((ROWS, COLUMNS))]
        for count in range(1, 4):
            chunks = updated(chunks, draw, count)
        made.append(chunks)
    return made


def updated(chunks: Chunks, draw: np.random.Generator, count: int) -> Chunks:
    """One update of AdamW by a drawn gradient."""
    weight, mean, square = chunks
    gradient = draw.normal(0, 0.01, weight.shape)
    mean = BETAS[0] * mean + (1 - BETAS[0]) * gradient
    square = BETAS[1] * square + (1 - BETAS[1]) * gradient**2
    step = mean / (1 - BETAS[0] ** count) / (np.sqrt(square / (1 - BETAS[1] ** count)) + 1e-8)
    return [weight * (1 - RATE * DECAY) - RATE * step, mean, square]


def write(folder: Path, tensors: list[list[Chunks]], count: int) -> None:
    """One step; `tensors` are by tensor, rank and state."""
    folder.mkdir(parents=True)
    ranks = len(tensors[0])
    shape = torch.Size([ROWS * ranks, COLUMNS])
    mark = np.frombuffer(b"\x01\x02\x03\x04" * (ROWS * COLUMNS), "<f4").reshape(ROWS, COLUMNS)
    record = archive(torch.from_numpy(mark.copy()))
    group = {"lr": RATE, "betas": BETAS, "weight_decay": DECAY, "eps": 1e-8, "amsgrad": False, "step": float(count)}
    metadata: dict[str, Any] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for number in range(len(tensors)):
        for state in STATES:
            cuts = [ChunkStorageMetadata(torch.Size([ROWS * r, 0]), torch.Size([ROWS, COLUMNS])) for r in range(ranks)]
            properties = TensorProperties(dtype=torch.float32)
            metadata[state.format(f"layers.{number}.w.weight")] = TensorStorageMetadata(properties, shape, cuts)
    for rank in range(ranks):
        name, at = f"__{rank}_0.distcp", 0
        with (folder / name).open("wb") as file:
            for number, by_rank in enumerate(tensors):
                for state, values in zip(STATES, by_rank[rank], strict=True):
                    data = with_values(record, values)
                    key = state.format(f"layers.{number}.w.weight")
                    storage[MetadataIndex(key, torch.Size([ROWS * rank, 0]), rank)] = _StorageInfo(name, at, len(data))
                    at += file.write(data)
            for setting, value in group.items() if rank == 0 else ():
                data, key = archive(value), f"optim.param_groups.0.{setting}"
                metadata[key] = BytesStorageMetadata()
                storage[MetadataIndex(key)] = _StorageInfo(name, at, len(data))
                at += file.write(data)
    with (folder / ".metadata").open("wb") as file:
        pickle.dump(Metadata(metadata, {}, storage), file)


def stale_rank(now: list[list[Chunks]], was: list[list[Chunks]], rank: int) -> None:
    """A rank saved its part of the step before."""
    for tensor, older in zip(now, was, strict=True):
        tensor[rank] = older[rank]


def exchanged(now: list[list[Chunks]], _was: list[list[Chunks]], rank: int) -> None:
    """Two ranks saved each other's part."""
    for tensor in now:
        tensor[rank], tensor[rank + 1] = tensor[rank + 1], tensor[rank]


def zeroed(now: list[list[Chunks]], _was: list[list[Chunks]], rank: int) -> None:
    """The moments of a rank are zeros."""
    for tensor in now:
        tensor[rank] = [tensor[rank][0], *(np.zeros_like(moment) for moment in tensor[rank][1:])]


Damage = Callable[[list[list[Chunks]], list[list[Chunks]], int], None]


def check(run: Path, *options: str) -> tuple[float, set[str]]:
    """Seconds of the processor that a check of the newest step takes, and the codes of what it finds."""
    command = [sys.executable, "-m", "ckptlint", str(run), "--isolated", "--format", "json", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    out = process.stdout.read() if process.stdout else b""
    _, _, usage = os.wait4(process.pid, 0)
    report = json.loads(out)
    findings = [item for one in report["checkpoints"] for item in one["findings"] if item["severity"] != "info"]
    return usage.ru_utime + usage.ru_stime, {item["code"] for item in findings}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--tensors", type=int, default=32)
    given = parser.parse_args()
    given.folder.mkdir()
    try:
        was = [first(given.ranks, tensor) for tensor in range(given.tensors)]
        draw = np.random.default_rng(0)
        now = [[updated(chunks, draw, 4) for chunks in tensor] for tensor in was]
        run = given.folder / "run"
        write(run / "step-3", was, 3)
        write(run / "step-4", now, 4)
        turns = [(check(run, "--depth", "files"), check(run)) for _ in range(3)]
        files, drawn = (statistics.median(turn[side][0] for turn in turns) for side in (0, 1))
        print(f"{given.ranks * given.tensors * len(STATES):,} chunks in {given.ranks:,} files:")
        print(f"  --depth files {files:.2f} s of the processor, by default {drawn:.2f} s, {drawn - files:+.2f} s")
        print("  healthy:", *(sorted(turns[0][1][1]) or ["nothing is flagged"]))
        damages: list[Damage] = [stale_rank, exchanged, zeroed]
        for damage in damages:
            broken = [[*tensor] for tensor in now]
            damage(broken, was, given.ranks // 3)
            shutil.rmtree(run / "step-4")
            write(run / "step-4", broken, 4)
            print(f"  {damage.__name__}:", *(sorted(check(run)[1]) or ["NOT NAMED"]))
    finally:
        shutil.rmtree(given.folder)


if __name__ == "__main__":
    main()
