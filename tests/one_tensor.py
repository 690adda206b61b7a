"""Checkpoints of one tensor, for tests of its chunks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ckptlint.model import Checkpoint, Tensor
from ckptlint.testing import load_folder, write_checkpoint


def opened(
    folder: Path, shape: list[int], chunks: list[str], ranks: list[int] | None = None, **table: Any
) -> Checkpoint:
    """A checkpoint of one tensor `w`, chunk i in the file of rank `ranks[i]`."""
    tensor: dict[str, Any] = {"shape": shape, "chunks": chunks}
    if ranks is not None:
        tensor["records"] = [f"__{rank}_0.distcp {2000 * i}:{2000 * i + 1900}" for i, rank in enumerate(ranks)]
    write_checkpoint({"tensors": {"w": tensor, **table.pop("more", {})}} | table, folder)
    return load_folder(folder)


def the_tensor(ckpt: Checkpoint) -> Tensor:
    return ckpt.tensors["w"]
