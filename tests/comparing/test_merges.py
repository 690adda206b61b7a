"""`ckptlint diff --values --adapter`: merges that went wrong; those that peft made are in test_conversions."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import REAL, run

from ckptlint.comparing.sides import open_side
from ckptlint.comparing.values import rows
from ckptlint.comparing.values.compare import compared_values
from ckptlint.model.cover import Shape
from ckptlint.payload.tensor_bytes import TensorBytes

PAIRS = REAL / "conversions"
Made = tuple[Path, Path, Path]


def made(name: str) -> Made:
    """Base, merged model and adapter, as peft wrote them."""
    return PAIRS / name / "base", PAIRS / name / "merged", PAIRS / name / "lora"


def compared(base: Path, merged: Path, adapter: Path) -> tuple[int, dict[str, Any]]:
    answer = run("diff", str(base), str(merged), "--values", "--adapter", str(adapter), "--format", "json")
    assert answer.stdout, answer.stderr
    return answer.returncode, json.loads(answer.stdout)


def of(document: dict[str, Any], relation: str) -> list[dict[str, Any]]:
    return [match for match in document["matches"] if match["relation"] == relation]


TARGET = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def lora() -> Made:
    return made("peft_lora")


def edited(lora: Made, folder: Path, edit: Callable[[dict[str, torch.Tensor], dict[str, torch.Tensor]], None]) -> Path:
    state, base = (load_file(lora[number] / "model.safetensors") for number in (1, 0))
    edit(state, base)
    target = Path(shutil.copytree(lora[1], folder / "edited"))
    save_file(state, target / "model.safetensors", {"format": "pt"})
    return target


def test_a_merge_that_changed_nothing(lora: Made) -> None:
    code, document = compared(lora[0], lora[0], lora[2])
    told = of(document, "unmerged")
    assert (code, document["proven"], len(told)) == (1, False, 4)
    assert {match["what"] for match in told} == {"the adapter changes it, and it holds the base's values"}
    text = run("diff", str(lora[0]), str(lora[0]), "--values", "--adapter", str(lora[2])).stdout
    assert "4 are not the base with the adapter merged in" in " ".join(text.split())


def test_one_target_that_was_left_out(lora: Made, tmp_path: Path) -> None:
    def edit(state: dict[str, torch.Tensor], base: dict[str, torch.Tensor]) -> None:
        state[TARGET] = base[TARGET]

    code, document = compared(lora[0], edited(lora, tmp_path, edit), lora[2])
    assert (code, [match["old"] for match in of(document, "unmerged")]) == (1, [[TARGET]])


@pytest.mark.parametrize(("times", "said"), [(2.0, "holds 2 times"), (0.5, "holds 0.5 times"), (-1.0, "taken off")])
def test_a_wrong_scale(lora: Made, tmp_path: Path, times: float, said: str) -> None:
    def edit(state: dict[str, torch.Tensor], base: dict[str, torch.Tensor]) -> None:
        for key in state:
            state[key] = base[key] + times * (state[key] - base[key])

    code, document = compared(lora[0], edited(lora, tmp_path, edit), lora[2])
    told = of(document, "unmerged")
    assert (code, len(told)) == (1, 4)
    assert all(said in match["what"] for match in told)


def test_a_part_of_the_rows_was_not_merged(lora: Made, tmp_path: Path) -> None:
    def edit(state: dict[str, torch.Tensor], base: dict[str, torch.Tensor]) -> None:
        state[TARGET][28:] = base[TARGET][28:]

    code, document = compared(lora[0], edited(lora, tmp_path, edit), lora[2])
    (match,) = of(document, "unmerged")
    assert code == 1
    assert "elements are not the base with the adapter merged in" in match["what"] or "times" in match["what"]


def test_a_transposed_product_and_the_product_of_another_layer(lora: Made, tmp_path: Path) -> None:
    other = TARGET.replace(".1.", ".0.")

    def edit(state: dict[str, torch.Tensor], base: dict[str, torch.Tensor]) -> None:
        added = {key: state[key] - base[key] for key in (TARGET, other)}
        state[TARGET] = base[TARGET] + added[TARGET].T
        state[other] = base[other] + added[TARGET]

    code, document = compared(lora[0], edited(lora, tmp_path, edit), lora[2])
    told = of(document, "unmerged")
    assert (code, {match["old"][0] for match in told}) == (1, {TARGET, other})
    assert all("not as the adapter says" in match["what"] for match in told)


def test_a_difference_beside_the_targets(lora: Made, tmp_path: Path) -> None:
    def edit(state: dict[str, torch.Tensor], _: dict[str, torch.Tensor]) -> None:
        state["model.norm.weight"][3] += 1

    code, document = compared(lora[0], edited(lora, tmp_path, edit), lora[2])
    (match,) = of(document, "differ")
    assert (code, match["old"]) == (1, ["model.norm.weight"])
    assert "the adapter has nothing for it, so it should be equal" in match["notes"]


def test_an_adapter_asks_for_values_and_the_last_line_says_what_new_is(lora: Made) -> None:
    answer = run("diff", lora[0], lora[1], "--adapter", lora[2])
    assert answer.returncode == 0 and "Proven: NEW is OLD with the adapter merged in: " in answer.stdout
    answer = run("diff", lora[0], lora[0], "--adapter", lora[2])
    assert answer.returncode == 1 and "not the base with the" in answer.stdout
    assert "hold the same values" in run("diff", lora[0], lora[0], "--values").stdout


def test_square_experts_of_which_two_were_exchanged(tmp_path: Path) -> None:
    experts = made("peft_square_experts")
    down, gate = (f"model.layers.0.block_sparse_moe.experts.1.{name}.weight" for name in ("w2", "w1"))

    def edit(state: dict[str, torch.Tensor], base: dict[str, torch.Tensor]) -> None:
        added = {key: state[key] - base[key] for key in (down, gate)}
        state[gate], state[down] = base[gate] + added[down], base[down] + added[gate]

    code, document = compared(experts[0], edited(experts, tmp_path, edit), experts[2])
    assert (code, {match["old"][0] for match in of(document, "unmerged")}) == (1, {down, gate})


def test_modules_to_save_that_were_left_out(tmp_path: Path) -> None:
    base, merged, adapter = made("peft_modules_to_save")
    merged = Path(shutil.copytree(merged, tmp_path / "merged"))
    state = load_file(merged / "model.safetensors")
    state["lm_head.weight"] = load_file(base / "model.safetensors")["lm_head.weight"]
    save_file(state, merged / "model.safetensors", {"format": "pt"})
    code, document = compared(base, merged, adapter)
    (match,) = of(document, "unmerged")
    assert (code, match["old"]) == (1, ["lm_head.weight"])


def test_modules_to_save_are_read_up_to_the_first_rows_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    base, _, adapter = (open_side(str(path), files=True) for path in made("peft_modules_to_save"))
    numbers = TensorBytes.numbers

    def start(place: TensorBytes, first: int, last: int, shape: Shape | None = None) -> Any:
        return None if first and place.tensor.fqn == "lm_head.weight" else numbers(place, first, last, shape)

    monkeypatch.setattr(rows, "_TILE", 64)
    monkeypatch.setattr(TensorBytes, "numbers", start)
    (match,) = (match for match in compared_values(base, base, adapter=adapter).matches if "lm_head" in match.old[0])
    assert (match.relation, match.notes) == ("unmerged", ())


def test_what_the_base_has_no_tensor_for(lora: Made, tmp_path: Path) -> None:
    adapter = Path(shutil.copytree(lora[2], tmp_path / "lora"))
    state = load_file(adapter / "adapter_model.safetensors")
    state = {key.replace("layers.1.", "layers.7."): value for key, value in state.items()}
    save_file(state, adapter / "adapter_model.safetensors", {"format": "pt"})
    code, document = compared(lora[0], lora[0], adapter)
    assert (code, len([match for match in of(document, "unmerged") if "layers.7." in match["old"][0]])) == (1, 4)


def test_something_else_than_an_adapter_is_wrong_use(lora: Made) -> None:
    for other in (lora[0], REAL / "fsdp2_4r", REAL / "adapters" / "ia3"):
        answer = run("diff", str(lora[0]), str(lora[1]), "--values", "--adapter", str(other))
        assert (answer.returncode, answer.stdout) == (2, "")
        assert "--adapter takes the folder of a LoRA adapter" in answer.stderr
