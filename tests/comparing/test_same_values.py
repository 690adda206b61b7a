"""`ckptlint diff --values`: what two checkpoints hold, whatever they are cut into, called and rounded to."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from support import REAL, SWEEP, codes, run
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import ckptlint
from ckptlint.comparing.locate_differences import ROUNDED_WITHIN
from ckptlint.seals.row_hashes import RowHashes

H, HEAD, LAYERS, ROWS, INNER = 64, 16, 3, 96, 80
State = dict[str, torch.Tensor]


def llama() -> State:
    """A model under torchtitan's names; one of its norms was never trained."""
    torch.manual_seed(0)
    state = {"tok_embeddings.weight": torch.randn(ROWS, H)}
    for layer in range(LAYERS):
        own = f"layers.{layer}."
        for name, shape in {"q": (64, H), "k": (32, H), "v": (32, H), "o": (H, 64)}.items():
            state[f"{own}attention.w{name}.weight"] = torch.randn(shape)
        for name, shape in {"w1": (INNER, H), "w3": (INNER, H), "w2": (H, INNER)}.items():
            state[f"{own}feed_forward.{name}.weight"] = torch.randn(shape)
        state[f"{own}attention_norm.weight"] = 1 + torch.randn(H) / 100
        state[f"{own}ffn_norm.weight"] = torch.ones(H)
    return state | {"norm.weight": 1 + torch.randn(H) / 100, "output.weight": torch.randn(ROWS, H)}


HF_NAMES = (
    ("tok_embeddings", "embed_tokens"), ("attention_norm", "input_layernorm"), ("ffn_norm", "post_attention_layernorm"),
    (r"attention\.w([qkvo])", r"self_attn.\1_proj"), (r"feed_forward\.w1", "mlp.gate_proj"),
    (r"feed_forward\.w3", "mlp.up_proj"), (r"feed_forward\.w2", "mlp.down_proj"),
)  # fmt: skip


def halves(weight: torch.Tensor, head: int = HEAD) -> torch.Tensor:
    """Rows of rope that lie in turns, as the two halves of a head, as torchtitan's adapter and Llama's converter do."""
    return weight.view(-1, head // 2, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape).contiguous()


def hugging_face(state: State, dtype: torch.dtype = torch.float32) -> State:
    found = {}
    for key, value in state.items():
        name = key
        for pattern, new in HF_NAMES:
            name = re.sub(pattern, new, name)
        name = "lm_head.weight" if name == "output.weight" else f"model.{name}"
        found[name] = (halves(value) if re.search(r"\.[qk]_proj", name) else value).to(dtype)
    return found


def megatron(state: State, groups: int = 2) -> State:
    """As Megatron-Core keeps it: heads in halves, fused by query groups, gate before up, the vocabulary padded."""
    found = {}
    for layer in range(LAYERS):
        old, new = f"layers.{layer}.", f"decoder.layers.{layer}."
        q, k, v = (state[f"{old}attention.w{name}.weight"] for name in "qkv")
        parts = [part.view(groups, -1, H) for part in (halves(q), halves(k), v)]
        found[f"{new}self_attention.linear_qkv.weight"] = torch.cat(parts, dim=1).reshape(-1, H)
        gate = [state[f"{old}feed_forward.{name}.weight"] for name in ("w1", "w3")]
        found[f"{new}mlp.linear_fc1.weight"] = torch.cat(gate)
        found[f"{new}mlp.linear_fc2.weight"] = state[f"{old}feed_forward.w2.weight"]
        found[f"{new}self_attention.linear_proj.weight"] = state[f"{old}attention.wo.weight"]
        found[f"{new}input_layernorm.weight"] = state[f"{old}attention_norm.weight"]
        found[f"{new}pre_mlp_layernorm.weight"] = state[f"{old}ffn_norm.weight"]
    padded = torch.cat([state["tok_embeddings.weight"], torch.zeros(32, H)])
    return found | {
        "embedding.word_embeddings.weight": padded,
        "decoder.final_layernorm.weight": state["norm.weight"],
        "output_layer.weight": state["output.weight"],
    }


def export(folder: Path, state: State, **config: int) -> Path:
    folder.mkdir(parents=True)
    save_file({key: value.contiguous() for key, value in state.items()}, folder / "model.safetensors")
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, State]:
    state = llama()
    folder = tmp_path_factory.mktemp("values") / "dcp"
    dcp.save(state, checkpoint_id=str(folder), no_dist=True)
    return folder, state


def compared(old: Path, new: Path, *options: str) -> tuple[int, dict[str, Any]]:
    answer = run("diff", str(old), str(new), "--values", "--format", "json", *options)
    return answer.returncode, json.loads(answer.stdout)


def relations(document: dict[str, Any], is_proven: bool | None = None) -> dict[str, int]:
    found: dict[str, int] = {}
    for match in document["matches"]:
        if is_proven is None or match["proven"] is is_proven:
            found[match["relation"]] = found.get(match["relation"], 0) + 1
    return found


# ---------------------------------------------------------------- proven


def test_a_real_step_and_what_torch_makes_of_it(tmp_path: Path) -> None:
    dcp_to_torch_save(REAL / "fsdp2_4r", tmp_path / "whole.pt")
    code, document = compared(REAL / "fsdp2_4r", tmp_path / "whole.pt", "--ignore", "optimizer*")
    assert (code, document["proven"]) == (0, True)
    assert relations(document, False) == {}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("deepspeed/z1_aligned_2r", "deepspeed/universal_z1"),
        ("fsdp2_4r", "fsdp2_4r"),
        ("megatron_tp2_dp2_fully_reshardable", "megatron_tp2_dp2_fully_reshardable"),
        ("rank_files/verl_tp2_fsdp2", "rank_files/verl_tp2_fsdp2"),
    ],
)
def test_real_saves_that_hold_the_same(old: str, new: str) -> None:
    code, document = compared(REAL / old, REAL / new)
    assert (code, document["tensors"]["proven"]) == (0, document["tensors"]["of"])


@pytest.mark.parametrize(("old", "new"), [("base", "export"), ("export", "base"), ("fsdp2_4r", "fsdp2_4r")])
def test_equal_bytes_are_proven_without_hashes(
    base: tuple[Path, State], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str
) -> None:
    def refused(*_: object) -> None:
        raise AssertionError("rows were hashed")

    state = dict(base[1])
    state["norm.weight"] = torch.zeros(H)
    sides = {"export": export(tmp_path / "export", state | {"norm.weight": -torch.zeros(H)})}
    sides["base"] = tmp_path / "base"
    dcp.save(state, checkpoint_id=sides["base"], no_dist=True)
    monkeypatch.setattr(RowHashes, "add", refused)
    code, document = compared(*(sides.get(name, REAL / name) for name in (old, new)))
    assert (code, document["proven"]) == (0, True)
    assert [*relations(document)] == ["equal"]


def test_the_same_damage_on_both_sides_is_no_proof(base: tuple[Path, State], tmp_path: Path) -> None:
    data = bytearray((base[0] / "__0_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    for name in ("old", "new"):
        shutil.copytree(base[0], tmp_path / name)
        (tmp_path / name / "__0_0.distcp").write_bytes(data)
    code, document = compared(tmp_path / "old", tmp_path / "new")
    assert (code, document["proven"]) == (4, False)
    assert document["problems"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_conversion_to_the_names_of_hugging_face(
    base: tuple[Path, State], tmp_path: Path, dtype: torch.dtype
) -> None:
    code, document = compared(base[0], export(tmp_path / "hf", hugging_face(base[1], dtype)))
    assert (code, document["tensors"]) == (0, {"proven": 30, "of": 30, "old": 30, "new": 30})
    told = relations(document)
    assert told.pop("reordered") == 2 * LAYERS
    assert told == {"renamed" if dtype is torch.float32 else "rounded": 24}


def test_a_conversion_to_megatron(base: tuple[Path, State], tmp_path: Path) -> None:
    code, document = compared(base[0], export(tmp_path / "mc", megatron(base[1]), vocab_size=ROWS))
    assert (code, document["tensors"]["proven"], document["tensors"]["of"]) == (0, 21, 21)
    assert relations(document) == {"renamed": 14, "joined": 2 * LAYERS, "padded": 1}
    back, document = compared(tmp_path / "mc", base[0])
    assert (back, relations(document)["split"]) == (0, 2 * LAYERS)


def test_transposed_weights_and_stacked_experts(tmp_path: Path) -> None:
    torch.manual_seed(1)
    one = {f"h.{i}.c_fc.weight": torch.randn(12, 24) for i in range(2)}
    one |= {f"h.{i}.mlp.experts.{e}.up.weight": torch.randn(10, 12) for i in range(2) for e in range(4)}
    two = {f"x.{i}.up_proj.weight": one[f"h.{i}.c_fc.weight"].t() for i in range(2)}
    for i in range(2):
        two[f"x.{i}.experts.up"] = torch.stack([one[f"h.{i}.mlp.experts.{e}.up.weight"] for e in range(4)])
    code, document = compared(export(tmp_path / "a", one), export(tmp_path / "b", two))
    assert (code, relations(document, False)) == (1, {"transposed": 2, "joined": 2}), "names that nobody described"


# ---------------------------------------------------------------- what the names do not ask for


def test_what_is_no_number_any_more_is_counted(base: tuple[Path, State], tmp_path: Path) -> None:
    state = {key: value.clone() for key, value in base[1].items()}
    state["output.weight"][2:4, 7] = float("nan")
    document = compared(base[0], export(tmp_path / "nan", state))[1]
    assert "2 elements became NaN or infinite" in str([match for match in document["matches"] if not match["proven"]])


@pytest.mark.parametrize("groups", [1, 4])
def test_groups_that_are_not_the_kv_heads_are_not_proven(base: tuple[Path, State], tmp_path: Path, groups: int) -> None:
    code, document = compared(base[0], export(tmp_path / "mc", megatron(base[1], groups), vocab_size=ROWS))
    assert (code, relations(document, False)) == (1, {"joined": LAYERS})


# ---------------------------------------------------------------- not proven

Edit = Callable[[State], None]


def assigned(key: str, change: Callable[[torch.Tensor, State], torch.Tensor]) -> Edit:
    def edit(state: State) -> None:
        state[key] = change(state[key].clone(), state)

    return edit


def nudged(weight: torch.Tensor, _: State) -> torch.Tensor:
    weight[3, 5] = torch.nextafter(weight[3, 5], torch.tensor(9.0))
    return weight


def swapped_rows(weight: torch.Tensor, _: State) -> torch.Tensor:
    weight[[3, 7]] = weight[[7, 3]]
    return weight


def stale(weight: torch.Tensor, state: State) -> torch.Tensor:
    weight[32:] = state["layers.0.feed_forward.w2.weight"][32:]
    return weight


W2 = "layers.1.feed_forward.w2.weight"
FAULTS: dict[str, tuple[Edit, str, str]] = {
    "one ulp": (assigned(W2, nudged), W2, "rows 3 of 64"),
    "two rows exchanged": (assigned(W2, swapped_rows), W2, "rows 3, 7 of 64"),
    "rows of the layer before": (assigned(W2, stale), W2, "rows 32-63 of 64 hold what layers.0.feed_forward.w2.weight"),
    "through float16": (assigned(W2, lambda w, _: w.half().float()), W2, ""),
    "a transposed square": (assigned("layers.1.attention.wo.weight", lambda w, _: w.t().contiguous()),
                            "layers.1.attention.wo.weight", ""),
    "zeros": (assigned(W2, lambda w, _: torch.cat([w[:16], torch.zeros(48, INNER)])), W2, "rows 16-63 of 64 are zeros"),
    "a lost element of a norm": (assigned("norm.weight", lambda w, _: torch.cat([w[:-1], torch.ones(1)])),
                                 "norm.weight", "elements 63 of 64"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_difference_is_told_where_it_lies(base: tuple[Path, State], tmp_path: Path, fault: str) -> None:
    edit, key, said = FAULTS[fault]
    state = dict(base[1])
    edit(state)
    code, document = compared(base[0], export(tmp_path / "new", state))
    assert (code, document["proven"]) == (1, False)
    (match,) = [match for match in document["matches"] if match["relation"] != "equal"]
    assert (match["relation"], match["old"]) == ("differ", [key])
    assert match["change"] > 0
    assert said in match["notes"][0] if said else match["notes"] == []


def exchanged(first: str, second: str) -> Edit:
    def edit(state: State) -> None:
        state[first], state[second] = state[second], state[first]

    return edit


HF = "model.layers.1."
MC = "decoder.layers.1."
CONVERTED: dict[str, tuple[Callable[[State], State], Edit]] = {
    "heads shuffled": (hugging_face, assigned(
        f"{HF}self_attn.q_proj.weight", lambda w, _: w.view(-1, HEAD, H)[[1, 0, 2, 3]].reshape(w.shape))),
    "one layer not permuted": (hugging_face, assigned(f"{HF}self_attn.q_proj.weight", lambda w, _: halves(halves(w)))),
    "gate and up exchanged": (megatron, assigned(
        f"{MC}mlp.linear_fc1.weight", lambda w, _: torch.cat([w[INNER:], w[:INNER]]))),
    "gate and up exchanged in all layers": (megatron, lambda state: [assigned(
        f"decoder.layers.{i}.mlp.linear_fc1.weight", lambda w, _: torch.cat([w[INNER:], w[:INNER]]))(state)
        for i in range(LAYERS)] and None),
    "k and v of one group exchanged": (megatron, assigned(
        f"{MC}self_attention.linear_qkv.weight", lambda w, _: w[[*range(32), *range(48, 64), *range(32, 48),
                                                                 *range(64, 128)]])),
    "a value in the fused weight": (megatron, assigned(
        f"{MC}self_attention.linear_qkv.weight", lambda w, _: nudged(w, {}))),
    "a lost layer": (hugging_face, lambda state: [state.pop(key) for key in [*state] if key.startswith(HF)] and None),
}  # fmt: skip


@pytest.mark.parametrize("fault", CONVERTED)
def test_a_wrong_conversion_is_not_proven(base: tuple[Path, State], tmp_path: Path, fault: str) -> None:
    make, edit = CONVERTED[fault]
    state = make(base[1])
    edit(state)
    code, document = compared(base[0], export(tmp_path / "new", state))
    if fault == "a lost layer":  # of three norms of ones nobody knows which two are left
        assert document["tensors"] == {"proven": 19, "of": 21, "old": 30, "new": 21}
    assert (code, document["proven"]) == (1, False)


def test_layers_that_were_exchanged_are_not_under_their_names(base: tuple[Path, State], tmp_path: Path) -> None:
    state = dict(base[1])
    exchanged("layers.0.feed_forward.w2.weight", W2)(state)
    code, document = compared(base[0], export(tmp_path / "new", state))
    notes = [match["notes"][0] for match in document["matches"] if match["relation"] == "differ"]
    assert code == 1
    assert ["hold what layers." in note for note in notes] == [True, True]


# ---------------------------------------------------------------- what cannot be read never is proof


def test_damage_on_either_side_is_never_proof(base: tuple[Path, State], tmp_path: Path) -> None:
    copy = Path(shutil.copytree(base[0], tmp_path / "copy"))
    data = bytearray((copy / "__0_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (copy / "__0_0.distcp").write_bytes(data)
    for sides in ((base[0], copy), (copy, base[0])):
        code, document = compared(*sides)
        assert code != 0
        assert document["proven"] is False
        assert document["problems"]
    os.truncate(copy / "__0_0.distcp", len(data) // 2)
    for sides in ((base[0], copy), (copy, base[0])):
        assert compared(*sides)[0] in (1, 4)


def test_a_hole_is_never_proof() -> None:
    assert compared(REAL / "fsdp2_4r", REAL / "fsdp2_4r_hole")[0] in (1, 4)
    assert compared(REAL / "fsdp2_4r_hole", REAL / "fsdp2_4r_hole")[0] in (1, 4)


def test_without_values_diff_says_that_they_were_not_compared(base: tuple[Path, State], tmp_path: Path) -> None:
    state = dict(base[1])
    assigned(W2, nudged)(state)
    answer = run("diff", str(base[0]), str(export(tmp_path / "new", state)))
    assert answer.returncode == 0
    assert "--values" in answer.stdout


def test_select_and_ignore(base: tuple[Path, State], tmp_path: Path) -> None:
    state = dict(base[1])
    assigned(W2, nudged)(state)
    new = export(tmp_path / "new", state)
    assert compared(base[0], new, "--ignore", "*.1.feed_forward.*")[0] == 0
    assert compared(base[0], new, "--select", "*attention*")[0] == 0
    assert compared(base[0], new, "--select", "*w2*")[0] == 1
    assert run("diff", str(base[0]), str(new), "--select", "*").returncode == 2


# ---------------------------------------------------------------- where the original is not at hand


def test_a_manifest_with_values_proves_a_copy_and_names_what_differs(base: tuple[Path, State], tmp_path: Path) -> None:
    manifest = tmp_path / "good.json"
    assert run("manifest", str(base[0]), "--values", "--output", str(manifest)).returncode == 0
    same = export(tmp_path / "same", base[1])
    narrow = export(tmp_path / "narrow", {key: value.bfloat16() for key, value in base[1].items()})
    for path in (same, narrow):
        report = ckptlint.check(path, expect=manifest, depth="data")
        assert "REF004" not in codes(report), path
        assert "REF004" not in {code for part in report.checkpoints for code in part.not_applicable}
    state = dict(base[1])
    assigned(W2, nudged)(state)
    report = ckptlint.check(export(tmp_path / "odd", state), expect=manifest, depth="data")
    assert [item.fqn for item in report.diagnostics if item.code == "REF004"] == [W2]
    assert run("manifest", str(base[0]), "--values", "--rows", "--output", str(manifest)).returncode == 0
    report = ckptlint.check(tmp_path / "odd", expect=manifest, depth="data")
    (told,) = [item.message for item in report.diagnostics if item.code == "REF004"]
    assert told.endswith("differ from those of the reference: rows 3 of 64")
    assert report.exit_code == 1
    other = ckptlint.check(export(tmp_path / "hf", hugging_face(base[1])), expect=manifest, depth="data")
    assert other.exit_code == 4 and "nothing was compared" in str(other.checkpoints[0].failed)


def test_a_manifest_of_a_damaged_step_is_not_written(base: tuple[Path, State], tmp_path: Path) -> None:
    copy = Path(shutil.copytree(base[0], tmp_path / "copy"))
    os.truncate(copy / "__0_0.distcp", 50_000)
    answer = run("manifest", str(copy), "--values", "--output", str(tmp_path / "good.json"))
    assert answer.returncode in (1, 4)
    assert not (tmp_path / "good.json").exists()


MADE = '"values": {"algorithm": "rows64-1", "salt": "00000000000000ff"}, '


@pytest.mark.parametrize(
    ("made", "told"),
    [
        ("", "are not of the kind 'rows64-1'.*write it again with `ckptlint manifest --values`"),
        ('"values": 3, ', "are not of the kind"),
        (MADE.replace("rows64-1", "rows64-0"), "are not of the kind"),
        (MADE.replace("00ff", "ff"), "the salt of its values is not 16 hexadecimal digits"),
        (MADE.replace('"00000000000000ff"', "255"), "the salt of its values"),
    ],
)
@pytest.mark.parametrize("held", ['"values": {"float32": "0000000000000001"}', '"rows": {"float32": "AAAAAAAAAAA="}'])
def test_values_of_another_kind_are_refused(tmp_path: Path, made: str, told: str, held: str) -> None:
    text = f'{{"schema": "ckptlint.manifest/1", {made}"tensors": {{"w": {{"dtype": "float32", {held}}}}}}}'
    (tmp_path / "old.json").write_text(text)
    with pytest.raises(ckptlint.ConfigError, match=told):
        ckptlint.check(REAL / "fsdp2_4r", expect=tmp_path / "old.json", depth="data")


def test_every_manifest_has_a_salt_of_its_own(base: tuple[Path, State]) -> None:
    made = [json.loads(run("manifest", str(base[0]), "--values").stdout) for _ in range(2)]
    assert made[0]["values"]["algorithm"] == made[1]["values"]["algorithm"] == "rows64-1"
    assert made[0]["values"]["salt"] != made[1]["values"]["salt"]
    assert made[0]["tensors"][W2]["values"] != made[1]["tensors"][W2]["values"]


@pytest.mark.parametrize(
    ("field", "kind", "value"), [("values", "digests", "0000000000000000"), ("rows", "words", "AAAAAAAAAAA=")]
)
@pytest.mark.parametrize("held", ['"x"', '{"float32": 3}', '{"float32": "zz"}', '{"decimal": "VALUE"}'])
def test_senseless_values_of_a_manifest_are_refused(
    tmp_path: Path, field: str, kind: str, value: str, held: str
) -> None:
    tensor = f'{{"dtype": "float32", "{field}": {held.replace("VALUE", value)}}}'
    (tmp_path / "bad.json").write_text(f'{{"schema": "ckptlint.manifest/1", {MADE}"tensors": {{"w": {tensor}}}}}')
    with pytest.raises(ckptlint.ConfigError, match=f"the {field} of w are not {kind}"):
        ckptlint.check(REAL / "fsdp2_4r", expect=tmp_path / "bad.json", depth="data")


FORMATS = ("fsdp2_4r", "megatron_tp2_dp2_fully_reshardable/iter_0000010", "deepspeed/z1_aligned_2r", "hf_sharded",
           "rank_files/verl_tp2_fsdp2", "conversions/transformers_llama/disk")  # fmt: skip


@pytest.mark.sweep(share=3)
@pytest.mark.parametrize("name", FORMATS)
def test_a_cut_side_is_never_proof(tmp_path: Path, name: str) -> None:
    """Each payload file lost a part of its end, its last bytes, or everything."""
    whole = Path(shutil.copytree(REAL / name, tmp_path / "whole"))
    assert compared(whole, whole)[0] == 0
    payload = max((path for path in whole.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    size = payload.stat().st_size
    for left in (0, size // 3, size * 9 // 10, size - 1) if SWEEP or name == FORMATS[0] else (size * 9 // 10,):
        cut = Path(shutil.copytree(whole, tmp_path / f"cut{left}"))
        os.truncate(cut / payload.relative_to(whole), left)
        for sides in ((whole, cut), (cut, whole), (cut, cut)):
            answer = run("diff", *map(str, sides), "--values")
            assert answer.returncode != 0, (left, answer.stdout)
            assert "Proven:" not in answer.stdout.replace("Not proven:", "")
            assert "Traceback" not in answer.stderr


@pytest.mark.parametrize(
    "name",
    ["metadata_malicious", "megatron_common_malicious", "distcp_missing", "one_missing_chunk", "bugs/B16_broken"],
)
def test_a_hostile_or_incomplete_side_is_never_proof(name: str) -> None:
    for sides in ((REAL / name, REAL / "fsdp2_4r"), (REAL / name, REAL / name)):
        answer = run("diff", *map(str, sides), "--values")
        assert answer.returncode in (1, 4) and "Traceback" not in answer.stderr


def test_a_side_in_another_store_is_read_there() -> None:
    import fsspec

    fsspec.filesystem("memory").put(f"{REAL / 'fsdp2_4r'}/", "/values/step-1/", recursive=True)
    held = ckptlint.diff("memory://values/step-1", REAL / "fsdp2_4r", values=True)
    assert held.exit_code == 0


def test_the_python_api(base: tuple[Path, State], tmp_path: Path) -> None:
    state = dict(base[1])
    assigned(W2, stale)(state)
    new = export(tmp_path / "new", state)
    held = ckptlint.diff(base[0], new, values=True)
    assert (held.proven, held.exit_code) == ((29, 30), 1)
    assert ckptlint.diff(base[0], new).exit_code == 0
    assert ckptlint.diff(base[0], new, values=True, ignore=["*w2*"]).exit_code == 0
    with pytest.raises(ckptlint.CheckpointError):
        ckptlint.diff(REAL / "metadata_malicious", new, values=True)


def test_what_rounding_makes_zero_is_not_proven(tmp_path: Path) -> None:
    """float16 has nothing below 6e-8; a few such values are in any weight, and bfloat16 has them all."""
    small, usual = torch.randn(64, 64) * 1e-9, torch.randn(64, 64) * 0.02
    usual[0, :9] = 1e-9
    old = export(tmp_path / "old", {"small": small, "usual": usual})
    half = export(tmp_path / "half", {"small": small.half(), "usual": usual.half()})
    said = {match.old[0]: (match.relation, match.what) for match in ckptlint.diff(old, half, values=True).matches}
    assert said["usual"][0] == "rounded"
    assert said["small"] == ("differ", "float32 -> float16: rounding makes 4,096 of 4,096 values zero")
    brain = export(tmp_path / "brain", {"small": small.bfloat16(), "usual": usual.bfloat16()})
    assert ckptlint.diff(old, brain, values=True).exit_code == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_overflows_when_it_is_rounded_is_not_proven(tmp_path: Path, dtype: torch.dtype) -> None:
    wide = torch.randn(16, 16)
    wide[3, 5] = 3.4e38  # infinite in both
    old, new = export(tmp_path / "a", {"w": wide}), export(tmp_path / "b", {"w": wide.to(dtype)})
    code, document = compared(old, new)
    assert (code, relations(document)) == (1, {"differ": 1}) and "1 element became NaN or infinite" in str(document)
    wide[3, 5] = float("inf")
    assert compared(export(tmp_path / "c", {"w": wide}), new)[0] == 0


def test_values_of_any_size_are_compared_without_a_message(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"tiny": 1e-110, "huge": 1e200, "usual": 1.0}
    old = {name: torch.randn(8, 8, dtype=torch.float64) * size for name, size in sizes.items()}
    new = {name: torch.randn(8, 8, dtype=torch.float64) * size for name, size in sizes.items()}
    old["usual"][1, 2], new["usual"][3, 4] = -torch.inf, torch.inf
    answer = run("diff", str(export(tmp_path / "a", old)), str(export(tmp_path / "b", new)), "--values")
    assert (answer.returncode, answer.stderr) == (1, "")
    assert "0 of 3 tensors hold the same values; 3 differ." in answer.stdout


def test_an_export_that_was_rounded_on_the_way_is_told_as_such(tmp_path: Path) -> None:
    base = REAL / "conversions" / "peft_lora" / "base"
    state = load_file(base / "model.safetensors")
    short = {name: weight.bfloat16().float() for name, weight in state.items()}
    answer = run("diff", "--values", base, export(tmp_path / "short", short))
    assert answer.returncode == 1 and " ".join(answer.stdout.split()).count(ROUNDED_WITHIN) == 1
    short["model.norm.weight"][3] += 2**-12  # one value that no rounding makes
    matches = compared(base, export(tmp_path / "other", short))[1]["matches"]
    assert [
        match["old"] for match in matches if match["relation"] == "differ" and ROUNDED_WITHIN not in match["notes"]
    ] == [["model.norm.weight"]]


def test_what_is_equal_after_rounding_alone_is_no_pair_of_one_dtype(tmp_path: Path) -> None:
    torch.manual_seed(0)
    weight, other = torch.randn(16, 16), torch.randn(16, 16).bfloat16()
    near = weight.bfloat16().float()
    old = export(tmp_path / "old", {"alpha": weight, "beta": other})
    new = export(tmp_path / "new", {"near": near, "rounded": weight.bfloat16(), "omega": other})
    proven = {(*match["old"], *match["new"]) for match in compared(old, new)[1]["matches"] if match["proven"]}
    assert proven == {("alpha", "rounded"), ("beta", "omega")}
