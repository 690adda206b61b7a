"""Checkpoints in files of torch.save: what is read of them and what is said where it is broken."""

from __future__ import annotations

import json
import os
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support import REAL, codes, found, manifest
from torch.distributed.tensor import DTensor

import ckptlint
from ckptlint.analysis.optimizer.inventory import inventory_of
from ckptlint.depth import Depth

DEPTHS = ("metadata", "files", "headers", "data")
CONFIG = {
    "model_type": "llama", "vocab_size": 12, "hidden_size": 8, "intermediate_size": 10, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "tie_word_embeddings": False,
    "architectures": ["LlamaForCausalLM"], "torch_dtype": "float32", "transformers_version": "4.40.0",
    "attention_bias": False, "mlp_bias": False,
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


# ---------------------------------------------------------------- real files

RANK_FILES = REAL / "rank_files"
HEALTHY = [row["path"] for row in manifest(RANK_FILES) if row["verdict"] == "healthy"]


@pytest.mark.parametrize("name", HEALTHY)
def test_real_files_are_read_to_the_last_chunk(name: str) -> None:
    ckpt = ckptlint.load(RANK_FILES / name)
    assert ckpt.format == {"verl": "verl", "flat": "fsdp-ranks", "expe": "fsdp-ranks"}.get(name[:4], "torch")
    assert ckpt.tensors
    assert ckpt.partial_because == ""
    # nothing passes for want of a place
    assert all(len(tensor.chunks) and (tensor.chunks.record >= 0).all() for tensor in ckpt.tensors.values())


@pytest.mark.parametrize(
    ("name", "params", "states"),
    [("verl_fsdp2_4r", 12, 24), ("verl_hsdp_4r", 12, 24), ("verl_tp2_fsdp2", 12, 24), ("verl_fsdp1_2r", 12, 2),
     ("verl_fsdp1_shards_2r", 12, 2), ("verl_lora_2r", 16, 8), ("verl_lora_only_2r", 4, 8)],
)  # fmt: skip
def test_states_have_the_names_of_their_parameters(name: str, params: int, states: int) -> None:
    ckpt = ckptlint.check(RANK_FILES / name).checkpoints[0].checkpoint
    inventory = inventory_of(ckpt)
    assert len([key for key in ckpt.tensors if key.startswith("optimizer.")]) == states
    assert len(inventory.params) == params + ("model.seen" in ckpt.tensors)
    if "fsdp1" not in name:
        assert inventory.mapped_share == 1.0


def test_rows_that_do_not_divide_lie_where_tensor_parallelism_cut_them() -> None:
    """10 rows over (fsdp 2, tp 2): tp first, 5 and 5, then fsdp, 3 and 2."""
    ckpt = ckptlint.check(RANK_FILES / "verl_tp2_fsdp2").checkpoints[0].checkpoint
    tensor = ckpt.tensors["model.layers.0.mlp.gate_proj.weight"]
    rows = {ckpt.chunk_file(tensor, row)[-4]: tensor.tiling.box(row) for row in range(4)}
    assert {rank: (box.offsets[0], box.sizes[0]) for rank, box in rows.items()} == {
        "0": (0, 3), "1": (5, 3), "2": (3, 2), "3": (8, 2),
    }  # fmt: skip


# ---------------------------------------------------------------- broken ones, beyond those in the manifest

Edit = Callable[[Path], None]


def rewritten(name: str, change: Callable[[Any], Any]) -> Edit:
    """Load a file, change what it holds, and write it again under its name."""

    def edit(folder: Path) -> None:
        state = torch.load(folder / name, map_location="cpu", weights_only=False)
        changed = change(state)
        torch.save(state if changed is None else changed, folder / name)

    return edit


def on_all(kind: str, world: int, change: Callable[[Any], Any]) -> Edit:
    def edit(folder: Path) -> None:
        for rank in range(world):
            rewritten(f"{kind}_world_size_{world}_rank_{rank}.pt", change)(folder)

    return edit


def bytes_of(name: str, change: Callable[[bytes], bytes]) -> Edit:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes())) and None


def part(key: str, change: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Change one value of a state."""

    def edit(state: Any) -> None:
        state[key] = change(state[key])

    return edit


def without(*keys: Any) -> Callable[[Any], None]:
    """Take one value out of a state, or out of what lies in it."""

    def edit(state: Any) -> None:
        for key in keys[:-1]:
            state = state[key]
        del state[keys[-1]]

    return edit


def with_local(value: Any, local: torch.Tensor) -> Any:
    value._local_tensor = local
    return value


def with_spec(value: Any, **changed: Any) -> Any:
    for name, new in changed.items():
        object.__setattr__(value._spec, name, new)
    return value


def renamed_mesh(state: Any) -> None:
    mesh = next(value for value in state.values() if hasattr(value, "_spec"))._spec.mesh
    mesh._mesh_dim_names = ("dp",)


def back(scheduler: Any) -> Any:
    return scheduler | {"last_epoch": 4}


def shorter_moment(state: Any) -> None:
    moment = state["state"][3]["exp_avg"]
    with_local(moment, moment._local_tensor[:, :6].contiguous())
    meta = moment._spec.tensor_meta
    state["state"][3]["exp_avg"] = DTensor(
        moment._local_tensor, with_spec(moment, tensor_meta=meta._replace(shape=torch.Size([12, 6])))._spec,
        requires_grad=False,
    )  # fmt: skip


def lost(*patterns: str) -> Edit:
    return lambda folder: [path.unlink() for pattern in patterns for path in folder.glob(pattern)] and None


def forgetful(state: Any) -> None:
    """The optimizer of a model whose last parameter is not trained."""
    del state["state"][state["param_groups"][-1]["params"].pop()]


def copied(source: str, target: str) -> Edit:
    return lambda folder: shutil.copy(folder / source, folder / target) and None


def of_two_ranks(folder: Path) -> None:
    shutil.copy(RANK_FILES / "verl_lora_2r/model_world_size_2_rank_1.pt", folder / "model_world_size_4_rank_1.pt")


W = "model.layers.0.self_attn.q_proj.weight"
M = "model_world_size_4_rank_{}.pt"
O = "optim_world_size_4_rank_{}.pt"  # noqa: E741
X = "extra_state_world_size_4_rank_{}.pt"
F = "model_0000009.rank_{}.pth"
E = "checkpoint_{}.pt"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n"
BROKEN: dict[str, tuple[str, Edit, str, str]] = {
    "no random state of rank 3": ("fsdp2_4r", lambda f: (f / X.format(3)).unlink(), "RNK001", X.format(3)),
    "0 bytes": ("fsdp2_4r", bytes_of(O.format(3), lambda data: b""), "PAY013", f"{O.format(3)} is empty (0 bytes)"),
    "LFS pointer": ("hsdp_4r", bytes_of(M.format(0), lambda data: LFS), "PAY013", "Git LFS pointer"),
    "zeros": ("hsdp_4r", bytes_of(M.format(0), lambda data: bytes(len(data))), "PAY013", M.format(0)),
    "of another world": ("fsdp2_4r", of_two_ranks, "RNK002", "world size"),
    "scheduler of another step": ("fsdp2_4r", rewritten(X.format(2), part("lr_scheduler", back)),
                                  "RNK003", X.format(2)),
    "other mesh": ("hsdp_4r", rewritten(M.format(3), renamed_mesh), "RNK002", "mesh (dp"),
    "a key that one rank lacks": ("fsdp2_4r", rewritten(M.format(2), without(W)), "RNK002", W),
    "a row more, uneven": ("tp2_fsdp2", rewritten(M.format(3), part("model.layers.0.mlp.up_proj.weight",
                           lambda v: with_local(v, torch.zeros(3, 12)))), "RNK004", M.format(3)),
    "another buffer": ("fsdp2_4r", rewritten(M.format(1), part("model.seen", lambda v: v + 1)), "RNK007", "model.seen"),
    "a longer buffer": ("fsdp2_4r", rewritten(M.format(1), part("model.seen", lambda v: torch.ones(4))), "RNK002",
                        "global shape of model.seen is [4]"),
    "another dtype": ("fsdp2_4r", rewritten(M.format(0), part("model.seen", torch.Tensor.double)), "RNK002", "float64"),
    "a moment of another shape": ("fsdp2_4r", on_all("optim", 4, shorter_moment), "OPT001", "exp_avg"),
    "a parameter that nobody saved": ("fsdp2_4r", on_all("model", 4, without("model.norm.weight")),
                                      "CFG001", "model.norm.weight"),
    "no model of any rank": ("fsdp2_4r", lost("model_*"), "RNK001", "4 of 4 model files are missing: rank 0-3"),
    "neither model nor optimizer": ("fsdp2_4r", lost("model_*", "optim_*"), "COM001", "no rank has a file of the "
                                    "model beside extra_state"),
    "an empty state on the first rank": ("fsdp2_4r", rewritten(O.format(0), lambda s: s["state"].clear()), "RNK002",
                                         f"{O.format(0)} lacks"),
    "an empty state of slices": ("fsdp1_2r", rewritten("optim_world_size_2_rank_1.pt", lambda s: s["state"].clear()),
                                 "RNK002", "optim_world_size_2_rank_1.pt lacks"),
    "fewer parameters on one rank": ("fsdp2_4r", rewritten(
                                     O.format(3), lambda s: s["param_groups"][-1]["params"].pop() and None), "RNK002",
                                     "number of parameters in the optimizer is 11"),
    "hostile": ("fsdp2_4r", rewritten(M.format(1), lambda s: s | {"x": Marker()}), "SAF001", M.format(1)),
    "another world in fsdp_config.json": ("fsdp2_4r", lambda f: (f / "fsdp_config.json").write_text(
                                          '{"world_size": 8}') and None, "RNK002", "fsdp_config.json"),
    "experimental: no file of rank 0": ("experimental_2r", lambda f: (f / E.format(0)).unlink(), "RNK001", E.format(0)),
    "experimental: no file of rank 1": ("experimental_2r", lambda f: (f / E.format(1)).unlink(), "RNK001", E.format(1)),
    "experimental: rank 0 twice": ("experimental_2r", copied(E.format(0), E.format(1)), "RNK006", E.format(0)),
    "experimental: one row less": ("experimental_2r", rewritten(E.format(1), lambda s: part(W, lambda v: with_local(
                                   v, v._local_tensor[:-1].clone()))(s["model"])), "RNK004", "[5, 12]"),
    "a part that is there twice": ("flat_2r", copied(F.format(0), F.format(1)), "RNK006", F.format(0)),
    "a part of another step": ("flat_2r", copied("model_0000004.rank_1.pth", F.format(1)), "RNK003", "step 4"),
    "a configuration of another model": ("fsdp2_4r", lambda f: bytes_of("huggingface/config.json", lambda d: d.replace(
                                         b'"vocab_size": 21', b'"vocab_size": 22'))(f), "CFG003", "embed_tokens"),
}  # fmt: skip


@pytest.mark.sweep(share=3)
@pytest.mark.parametrize("case", BROKEN)
def test_what_is_broken_is_named_once(tmp_path: Path, case: str) -> None:
    name, edit, code, key = BROKEN[case]
    shutil.copytree(
        RANK_FILES / (name if name.endswith("_2r") and not name.startswith(("lora", "fsdp1")) else f"verl_{name}"),
        tmp_path / "step",
    )
    edit(tmp_path / "step")
    report = ckptlint.check(tmp_path / "step", depth=Depth.HEADERS)
    loud = found(report, "error", "warning")
    assert {row[0] for row in loud} == {code}, loud
    told = " ".join(f"{item.title} {item.fqn} {item.finding.at.file}" for item in report.diagnostics)
    assert key in told
    assert not any(part.failed for part in report.checkpoints)


def test_an_optimizer_of_more_parameters_than_the_model_has(tmp_path: Path) -> None:
    shutil.copytree(RANK_FILES / "verl_hsdp_4r", tmp_path / "step")
    on_all("model", 4, without("lm_head.weight"))(tmp_path / "step")
    shutil.rmtree(tmp_path / "step" / "huggingface")
    report = ckptlint.check(tmp_path / "step")
    assert [row[:2] for row in found(report, "error", "warning")] == [("OPT008", "warning")]
    assert any("lists 12 parameters, but the files of the model hold 11" in row[2] for row in found(report))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fsdp2_4r", "the states of 11 parameters instead of 12"),
        ("lora_only_2r", "the states of 3 parameters instead of 4"),
    ],
)
def test_an_optimizer_of_fewer_parameters_on_all_ranks_is_told_once(tmp_path: Path, name: str, said: str) -> None:
    shutil.copytree(RANK_FILES / f"verl_{name}", tmp_path / "step")
    on_all("optim", int(name[-2]), forgetful)(tmp_path / "step")
    report = ckptlint.check(tmp_path / "step")
    assert found(report, "error", "warning") == []
    assert [said in row[2] for row in found(report, "info") if row[0] == "RNK008"] == [True]


def test_flat_parameters_with_fewer_elements_than_the_model(tmp_path: Path) -> None:
    """FSDP1: one flat parameter of two is not trained."""
    shutil.copytree(RANK_FILES / "verl_fsdp1_2r", tmp_path / "step")
    on_all("optim", 2, lambda state: [own.update({w: own[w][:100].clone() for w in ("exp_avg", "exp_avg_sq")})
                                      for own in state["state"].values()] and None)(tmp_path / "step")  # fmt: skip
    report = ckptlint.check(tmp_path / "step")
    assert found(report, "error", "warning") == []
    assert [row[0] for row in found(report, "info") if "elements instead of" in row[2]] == ["RNK008"]


def test_optimizer_files_beside_the_weights_of_hugging_face(tmp_path: Path) -> None:
    """verl's `save_contents` may be [hf_model, optimizer, extra]: nothing is lost."""
    shutil.copytree(RANK_FILES / "verl_fsdp2_4r", tmp_path / "step")
    lost("model_*")(tmp_path / "step")
    save_file({"model.norm.weight": torch.ones(12)}, tmp_path / "step/huggingface/model.safetensors")
    assert "RNK001" not in {row[0] for row in found(ckptlint.check(tmp_path / "step"))}


def test_a_tracker_that_names_a_step_which_is_not_there(tmp_path: Path) -> None:
    shutil.copytree(RANK_FILES / "verl_run", tmp_path / "run")
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("9")
    report = ckptlint.check(tmp_path / "run")
    assert [row[:2] for row in found(report, "error", "warning")] == [("COM002", "warning")]
    assert "names step 9, which does not exist" in found(report)[0][2]


def test_a_smaller_set_beside_the_whole_one_is_a_note(tmp_path: Path) -> None:
    shutil.copytree(RANK_FILES / "verl_fsdp2_4r", tmp_path / "step")
    shutil.copy(RANK_FILES / "verl_lora_2r/model_world_size_2_rank_1.pt", tmp_path / "step")
    report = ckptlint.check(tmp_path / "step")
    assert found(report, "error", "warning") == []
    assert any("world size 2" in row[2] for row in found(report, "info"))


@pytest.mark.parametrize("name", ["rank_{}.pth", "rank{}.pt", "step-9_rank_{}.pt"])
def test_parts_of_ranks_under_any_name(tmp_path: Path, name: str) -> None:
    for rank in range(2):
        shutil.copy(RANK_FILES / "flat_2r" / F.format(rank), tmp_path / name.format(rank))
    assert codes(ckptlint.check(tmp_path, depth=Depth.DATA), "error", "warning") == set()
    (tmp_path / name.format(0)).unlink()
    assert codes(ckptlint.check(tmp_path), "error", "warning") == {"RNK001"}


def test_files_of_ranks_without_sharded_tensors_are_no_layout(tmp_path: Path) -> None:
    for rank in range(2):
        torch.save({"model": llama()}, tmp_path / f"rank_{rank}.pth")
    report = ckptlint.check(tmp_path)
    assert report.exit_code == 4
