"""Checkpoints in files of torch.save: what is read of them and what is said where it is broken."""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from support import codes, found

import ckptlint
from ckptlint.depth import Depth

DEPTHS = ("metadata", "files", "headers", "data")
CONFIG = {
    "model_type": "llama", "vocab_size": 12, "hidden_size": 8, "intermediate_size": 10, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "tie_word_embeddings": False,
    "architectures": ["LlamaForCausalLM"], "torch_dtype": "float32",
}  # fmt: skip


def llama(tied: bool = False) -> OrderedDict[str, torch.Tensor]:
    def one(*shape: int) -> torch.Tensor:
        return torch.randn(*shape)

    state = OrderedDict({"model.embed_tokens.weight": one(12, 8)})
    for layer in range(2):
        own = f"model.layers.{layer}."
        for name, shape in {"q": (8, 8), "k": (4, 8), "v": (4, 8), "o": (8, 8)}.items():
            state[f"{own}self_attn.{name}_proj.weight"] = one(*shape)
        for name, shape in {"gate": (10, 8), "up": (10, 8), "down": (8, 10)}.items():
            state[f"{own}mlp.{name}_proj.weight"] = one(*shape)
        state[f"{own}input_layernorm.weight"] = one(8)
        state[f"{own}post_attention_layernorm.weight"] = one(8)
    state["model.norm.weight"] = one(8)
    state["lm_head.weight"] = state["model.embed_tokens.weight"] if tied else one(12, 8)
    return state


def write_shards(folder: Path, tied: bool = False, parts: int = 3) -> OrderedDict[str, torch.Tensor]:
    """As transformers 4 saves with safe_serialization=False."""
    state = llama(tied)
    config = CONFIG | {"tie_word_embeddings": tied}
    (folder / "config.json").write_text(json.dumps(config))
    names = list(state)
    if parts == 1:
        torch.save(state, folder / "pytorch_model.bin")
        return state
    places = {
        name: f"pytorch_model-{i * parts // len(names) + 1:05d}-of-{parts:05d}.bin" for i, name in enumerate(names)
    }
    for file in dict.fromkeys(places.values()):
        torch.save({name: state[name] for name in names if places[name] == file}, folder / file)
    total = sum(tensor.numel() * 4 for tensor in state.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return state


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(("tied", "parts"), [(False, 1), (True, 1), (False, 3)])
def test_healthy_weights_are_silent(tmp_path: Path, tied: bool, parts: int, depth: str) -> None:
    write_shards(tmp_path, tied, parts)
    report = ckptlint.check(tmp_path, depth=Depth[depth.upper()])
    assert found(report) == []
    ckpt = report.checkpoints[0].checkpoint
    assert ckpt is not None
    assert (ckpt.format, len(ckpt.tensors), len(ckpt.files)) == ("torch", 21, parts)


def test_a_key_that_the_index_has_and_no_file_holds(tmp_path: Path) -> None:
    write_shards(tmp_path)
    index = json.loads((tmp_path / "pytorch_model.bin.index.json").read_text())
    index["weight_map"]["ghost.weight"] = "pytorch_model-00001-of-00003.bin"
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    report = ckptlint.check(tmp_path)
    assert [row[:2] for row in found(report)] == [("PAY014", "error")]
    assert "ghost.weight" in found(report)[0][2]


def test_a_lost_part(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / "pytorch_model-00002-of-00003.bin").unlink()
    report = ckptlint.check(tmp_path)
    assert "pytorch_model-00002-of-00003.bin" in " ".join(row[2] for row in found(report, "error"))
    assert codes(report, "error") <= {"PAY014", "PAY003"}


@pytest.mark.parametrize(
    "data", [b"", b"version https://git-lfs.github.com/spec/v1\n", None], ids=["empty", "LFS", "cut"]
)
def test_a_part_that_cannot_be_read_is_named_once(tmp_path: Path, data: bytes | None) -> None:
    write_shards(tmp_path)
    path = tmp_path / "pytorch_model-00002-of-00003.bin"
    path.write_bytes(path.read_bytes()[:-500] if data is None else data)
    report = ckptlint.check(tmp_path)
    assert [(code, level) for code, level, _ in found(report, "error", "warning")] == [("PAY013", "error")]
    assert "pytorch_model-00002-of-00003.bin" in found(report)[0][2]


class Marker:
    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("echo ckptlint-marker",)


def test_a_hostile_pickle_is_refused_and_the_rest_is_judged(tmp_path: Path) -> None:
    state = write_shards(tmp_path, parts=1)
    torch.save({**state, "x": Marker()}, tmp_path / "pytorch_model.bin")
    report = ckptlint.check(tmp_path)
    assert [(code, level) for code, level, _ in found(report)] == [("SAF001", "error")]
    assert "pytorch_model.bin asks to call" in found(report)[0][2]
    assert len(report.checkpoints[0].checkpoint.tensors) == 21  # type: ignore[union-attr]


def test_a_shape_that_the_configuration_excludes(tmp_path: Path) -> None:
    state = write_shards(tmp_path, parts=1)
    state["model.norm.weight"] = torch.ones(4)
    torch.save(state, tmp_path / "pytorch_model.bin")
    assert codes(ckptlint.check(tmp_path), "error", "warning") == {"CFG003"}


def test_a_changed_byte_and_a_value_that_is_no_number(tmp_path: Path) -> None:
    state = write_shards(tmp_path, parts=1)
    state["model.norm.weight"] = torch.tensor([1.0] * 7 + [float("nan")])
    torch.save(state, tmp_path / "pytorch_model.bin")
    data = (tmp_path / "pytorch_model.bin").read_bytes()
    at = data.index(state["lm_head.weight"].numpy().tobytes())
    (tmp_path / "pytorch_model.bin").write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    report = ckptlint.check(tmp_path, depth=Depth.DATA)
    assert codes(report, "error", "warning") == {"PAY011", "PAY012"}
    sentences = " ".join(row[2] for row in found(report))
    assert "model.norm.weight" in sentences
    assert "lm_head.weight" in sentences
    assert found(ckptlint.check(tmp_path, depth=Depth.HEADERS)) == []
