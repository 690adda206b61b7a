"""Folders as trainers and exporters leave them: every file is checked, known as harmless or named, and none is judged
as something else than it is."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import test_contracts
from layouts import LayoutTests
from support import REAL, codes, copy_step, examples, found, report_on

import ckptlint
from ckptlint.lint.report import Report
from ckptlint.lint.settings import request
from ckptlint.lint.steps.trust import JudgedStep, steps_in
from ckptlint.vocabulary.frameworks import family_of, step_number

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from safetensors.torch import load_file, save_file  # noqa: E402


def step_of_two_models(run: Path, trained: int, stored: int) -> Path:
    """A step as the Trainer of sentence-transformers writes it: a model, the layer behind it, one optimizer of both."""
    step = run / "checkpoint-2"
    (step / "2_Dense").mkdir(parents=True)
    model, dense = torch.nn.Linear(4, 8), torch.nn.Linear(8, trained, bias=False)
    optimizer = torch.optim.AdamW([*model.parameters(), *dense.parameters()])
    dense(model(torch.ones(2, 4))).sum().backward()
    optimizer.step()
    save_file(model.state_dict(), step / "model.safetensors")
    save_file({"linear.weight": torch.ones(stored, 8)}, step / "2_Dense" / "model.safetensors")
    torch.save(optimizer.state_dict(), step / "optimizer.pt")
    return step


def test_one_optimizer_of_two_models_is_compared_with_both(tmp_path: Path) -> None:
    assert codes(ckptlint.check(step_of_two_models(tmp_path / "a", 6, 6))) == set()
    ((code, _, sentence),) = found(ckptlint.check(step_of_two_models(tmp_path / "b", 6, 7)))
    assert code == "OPT008" and "optimizer.pt" in sentence


@pytest.mark.parametrize("name", ["mtp.safetensors", "vision-00001-of-00001.safetensors", "extra.safetensors"])
def test_a_file_that_the_index_names_is_of_its_model(tmp_path: Path, name: str) -> None:
    """DeepSeek's layers for multi-token prediction, vision towers: numbers that no model by itself would have."""
    first = {f"model.layers.{i}.mlp.up_proj.weight": torch.ones(8, 4) for i in range(2)}
    second = {f"model.layers.{i}.mlp.up_proj.weight": torch.ones(8, 4) for i in (2, 4)}
    save_file(first, tmp_path / "model-00001-of-00001.safetensors")
    save_file(second, tmp_path / name)
    places = {**dict.fromkeys(first, "model-00001-of-00001.safetensors"), **dict.fromkeys(second, name)}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (part,) = ckptlint.check(tmp_path).checkpoints
    assert {*part.checkpoint.tensors} == {*first, *second}
    save_file(load_file(tmp_path / name) | {"not.named": torch.ones(2)}, tmp_path / name)
    assert "PAY014" in codes(ckptlint.check(tmp_path), "error", "warning")
    index.write_text("{")
    assert len(ckptlint.check(tmp_path).checkpoints) == 2


def a_model(number: int = 0) -> dict[str, Any]:
    """The state of a small model, of other values for each number."""
    return {"0.weight": torch.full((16, 8), number + 0.5), "0.bias": torch.arange(16.0) + number}


def an_optimizer() -> dict[str, Any]:
    model = torch.nn.Linear(8, 16)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    return optimizer.state_dict()


def written(run: Path, files: dict[str, Any]) -> Path:
    """A folder with these files: of torch.save, of text, or of bytes."""
    for name, value in files.items():
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(value, bytes):
            (run / name).write_bytes(value)
        elif name.endswith(".safetensors"):
            save_file(value, run / name)
        else:
            torch.save(value, run / name)
    return run


FOLDERS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "a model and its optimizer": ({"model.pt": a_model(), "optimizer.pt": an_optimizer()}, ["optimizer.pt"], []),
    "first of a series": ({"model_0.pt": a_model(), "optimizer_0.pt": an_optimizer()}, ["optimizer_0.pt"], []),
    "steps in files, with an optimizer each": (
        {f"model_{n}00.pt": a_model(n) for n in (1, 2)} | {f"optimizer_{n}00.pt": an_optimizer() for n in (1, 2)},
        ["model_200.pt", "optimizer_200.pt"], ["model_100.pt", "optimizer_100.pt"],
    ),
    "Composer": (
        {f"ep{n}-ba{n}0-rank0.pt": {"state": a_model(n), "epoch": n} | a_model(n) for n in (1, 2, 3)},
        ["ep3-ba30-rank0.pt"], ["ep1-ba10-rank0.pt", "ep2-ba20-rank0.pt"],
    ),
    "nanoGPT": ({"ckpt.pt": {"model": a_model(), "optimizer": an_optimizer(), "iter_num": 3}}, ["ckpt.pt"], []),
    "litgpt": (
        {f"{step}/lit_model.pth": {"model": a_model()} for step in ("step-00000010", "step-00000020", "final")},
        ["step-00000020/lit_model.pth", "final/lit_model.pth"], ["step-00000010/lit_model.pth"],
    ),
    "Ray Train": (
        {f"checkpoint_00000{n}/{name}.pt": {"epoch": n} if name == "extra_state" else a_model(n)
         for n in (0, 1) for name in ("model", "extra_state")},
        ["checkpoint_000001/model.pt", "checkpoint_000001/extra_state.pt"], ["checkpoint_000000/model.pt"],
    ),
    "ColossalAI": (
        {f"epoch-0_step-{n}/model.pt": a_model(n) for n in (30, 60)}, ["epoch-0_step-60/model.pt"], [],
    ),
    "several models": (
        {"alex.pth": a_model(1), "vgg.pth": a_model(2), "lin.pth": {"lin0.weight": torch.ones(1, 64)}},
        ["alex.pth", "vgg.pth", "lin.pth"], [],
    ),
    "files beside the steps": (
        {"step-10/model.safetensors": a_model(1), "step-20/model.safetensors": a_model(2), "pt.bin": a_model(2)},
        ["pt.bin", "step-20/model.safetensors"], ["step-10/model.safetensors"],
    ),
    "two models of accelerate": (
        {f"checkpoint_{n}/{name}.safetensors": a_model(n) for n in (0, 1, 2) for name in ("model", "model_1")},
        ["checkpoint_2/model.safetensors", "checkpoint_2/model_1.safetensors"], ["checkpoint_0/model.safetensors"],
    ),
    "xtuner": (
        {"iter_100.pth": a_model(), "hf-100/model.safetensors": a_model()},
        ["iter_100.pth", "hf-100/model.safetensors"], [],
    ),
}  # fmt: skip
"""Files of a run -> those of its newest step, each of which a resume reads; and those of older steps."""


@pytest.mark.sweep(share=3)
@pytest.mark.parametrize("name", FOLDERS)
def test_every_file_is_accounted_for(tmp_path: Path, name: str) -> None:
    """What is empty, full of zeros or cut is broken, whatever its first bytes; what is older is named as not read."""
    files, newest, older = FOLDERS[name]
    run = written(tmp_path / "run", files)
    for depth in ("files", "data"):
        report = ckptlint.check(run, depth=depth)
        assert (codes(report, "error", "warning"), report.exit_code) == (set(), 0), depth
    for damaged in newest:
        whole = (run / damaged).read_bytes()
        for data in (b"", bytes(len(whole)), whole[: len(whole) * 2 // 3]):
            (run / damaged).write_bytes(data)
            report = ckptlint.check(run)
            assert report.exit_code == 1 and Path(damaged).name in str(found(report)), (damaged, data[:8])
        (run / damaged).write_bytes(whole)
    unseen = [sentence for part in ckptlint.check(run).checkpoints for sentence in part.checkpoint.not_looked_at]
    assert any("--all-steps" in sentence for sentence in unseen) or not older
    for damaged in older:
        (run / damaged).write_bytes(b"")
    assert ckptlint.check(run).exit_code == 0
    if older:
        assert ckptlint.check(run, all_steps=True).exit_code == 1


@pytest.mark.parametrize("names", [["checkpoint_1.pt", "checkpoint_2.pt"], ["ckpt.pt"]])
def test_a_full_disk_is_no_wrong_path(tmp_path: Path, names: list[str]) -> None:
    report = ckptlint.check(written(tmp_path, dict.fromkeys(names, b"")))
    assert report.exit_code == 1 and names[-1] in str(found(report))


def test_release_is_the_step_that_its_tracker_names(tmp_path: Path) -> None:
    """Beside it lies a first step whose save did not finish."""
    shutil.copytree(REAL / "fsdp2_4r", tmp_path / "release")
    (tmp_path / "iter_0000001").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    assert ckptlint.latest(tmp_path).path == f"{tmp_path}/release"
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")
    assert ckptlint.latest(tmp_path).path is None


def test_a_step_is_compared_with_the_one_before(tmp_path: Path) -> None:
    """An optimizer that stood still (ms-swift), a state below (RLinf#1469), the engine's own step (DeepSpeed)."""
    for number in (4, 6):
        step = tmp_path / f"checkpoint-{number}"
        state = an_optimizer()
        for moments in state["state"].values():
            moments["step"] = torch.tensor(float(number))
        written(step, {"model.safetensors": a_model(number), "optimizer.pt": state, "data/data.pt": {"epoch": number}})
        (step / "latest").write_text(f"global_step{number}")
        (step / f"global_step{number}").mkdir()
        (step / f"global_step{number}" / "zero.txt").touch()
    newest = tmp_path / "checkpoint-6"
    assert codes(ckptlint.check(tmp_path), "error", "warning") == set()
    shutil.rmtree(newest / "global_step6")
    assert (
        found(ckptlint.check(tmp_path), "warning")[0][2]
        == "latest names global_step6, and no such folder is in the step"
    )
    (newest / "global_step6").mkdir()
    (newest / "global_step6" / "zero.txt").touch()
    shutil.rmtree(newest / "data")
    assert "the step has no data/data.pt, which checkpoint-4 has" in str(found(ckptlint.check(tmp_path), "warning"))
    shutil.copytree(tmp_path / "checkpoint-4", tmp_path / "checkpoint-2")
    assert "the step has no data/data.pt, which all older steps have" in str(found(ckptlint.check(tmp_path), "warning"))
    shutil.copytree(tmp_path / "checkpoint-4" / "data", newest / "data")
    shutil.copy(tmp_path / "checkpoint-4" / "optimizer.pt", newest)
    assert "optimizer.pt says step 4" in str(found(ckptlint.check(tmp_path), "warning"))


def test_a_configuration_that_is_gone_is_missed(tmp_path: Path) -> None:
    """Beside torch files nothing else says that there was one."""
    for number in (4, 6):
        step = tmp_path / f"checkpoint-{number}"
        written(step, {"pytorch_model.bin": a_model(number), "huggingface/tokenizer.json": b"{}"})
        (step / "config.json").write_text('{"model_type": "custom"}')
        (step / "huggingface" / "config.json").write_text('{"model_type": "custom"}')
        (step / "trainer_state.json").write_text(json.dumps({"global_step": number}))
    assert codes(ckptlint.check(tmp_path), "error", "warning") == set()
    for name in ("config.json", "huggingface/config.json"):
        lost = tmp_path / "checkpoint-6" / name
        text = lost.read_text()
        lost.unlink()
        assert f"the step has no {name}, which" in str(found(ckptlint.check(tmp_path), "warning"))
        assert ckptlint.check(tmp_path / "checkpoint-6").exit_code == ckptlint.check(tmp_path).exit_code
        lost.write_text(text)


def test_a_step_of_megatron_that_lost_both_its_files_is_no_plain_one(tmp_path: Path) -> None:
    """Nothing in its `.metadata` says that Megatron-Core wrote it."""
    source = REAL / "frameworks" / "trackers" / "older" / "iter_0000010"
    copy_step(source, tmp_path / "iter_0000005", 5)
    newest = copy_step(source, tmp_path / "iter_0000010", 10)
    assert codes(ckptlint.check(newest), "error", "warning") == set()
    (newest / "metadata.json").unlink()
    (newest / "common.pt").unlink()
    ((code, severity, sentence), *_) = found(ckptlint.check(newest))
    assert code == "COM001" and severity == "warning" and "no metadata.json, which" in sentence


def test_an_export_or_a_newer_core_lacks_no_file_of_the_older_steps(tmp_path: Path) -> None:
    for number in (10, 20):
        copy_step(REAL / "megatron_0.15_tp2" / "iter_0000010", tmp_path / f"iter_{number:07d}", number)
    shutil.copytree(REAL / "megatron_0.19_tp2" / "iter_0000010", tmp_path / "iter_0000030")
    assert "COM001" not in codes(ckptlint.check(tmp_path / "iter_0000030"))
    written(tmp_path / "iter_0000040", {"model.safetensors": a_model(1), "config.json": b"{}"})
    assert "COM001" not in codes(ckptlint.check(tmp_path / "iter_0000040"))


def test_bare_numbers_are_steps_or_parts_by_what_they_hold(tmp_path: Path) -> None:
    """nanotron's steps are bare numbers beside `latest.txt`; so may parts of one model be called."""
    for number in (10, 20):
        step = tmp_path / "run" / str(number)
        module = step / "model" / "decoder" / "0"
        written(module, {"model_weight_pp-rank-0-of-1_tp-rank-0-of-1.safetensors": a_model()})
        (step / "random").mkdir()
        (step / "checkpoint_metadata.json").write_text("{}")
    (tmp_path / "run" / "latest.txt").write_text("20")
    for number in range(3):
        model = {f"layers.{number}.weight": torch.full((4, 4), number + 0.5)}
        written(tmp_path / "parts" / str(number), {"model.safetensors": model})
    assert [Path(one.checkpoint.path).name for one in ckptlint.check(tmp_path / "run").checkpoints] == ["20"]
    assert len(ckptlint.check(tmp_path / "parts").checkpoints) == 3


def test_formats_that_are_known_and_not_read(tmp_path: Path) -> None:
    deep = tmp_path / "nanotron/10/model/model/decoder/0/pp_block/attn"
    written(deep, {"model_weight_pp-rank-0-of-1_tp-rank-0-of-1.safetensors": a_model()})
    (tmp_path / "nanotron/10/random").mkdir()
    (tmp_path / "nanotron/10/checkpoint_metadata.json").write_text("{}")
    written(tmp_path / "miles", {f"adapter_megatron_rank{rank}.pt": a_model() for rank in range(2)})
    for name in ("nanotron", "miles"):
        assert [(code, name in sentence) for code, _, sentence in found(ckptlint.check(tmp_path / name))] == [
            ("SAF004", True)
        ]


def run_of(layout: type[LayoutTests], place: Path) -> tuple[Path, Path | None]:
    """A step of a layout, and an older one of the same state beside it where there is one."""
    place.mkdir()
    step = layout().write(place)
    name = layout.source.rpartition("/")[2]
    if (state := step / "trainer_state.json").exists():
        name = f"checkpoint-{json.loads(state.read_text())['global_step']}"
    newest = place / "run" / (name if step_number(name) is not None else "checkpoint-200")
    shutil.copytree(step, newest, symlinks=True)
    older = newest.with_name(layout.older.rpartition("/")[2]) if layout.older else None
    if older is not None:
        shutil.copytree(REAL / layout.older, older)
    return newest, older


def damage(dice: random.Random, step: Path) -> tuple[Path, str]:
    """One file of a step is emptied, zeroed, cut, renamed, removed, or one is added."""
    path = dice.choice(sorted(path for path in step.rglob("*") if path.is_file() and not path.is_symlink()))
    kind, data = dice.choice(["empty", "zeros", "cut", "renamed", "removed", "added", "none"]), path.read_bytes()
    if kind in ("empty", "zeros", "cut"):
        path.write_bytes({"empty": b"", "zeros": bytes(len(data)), "cut": data[: len(data) * 2 // 3]}[kind])
    elif kind == "renamed":
        path.rename(path.with_name(f"{path.name}.old"))
    elif kind == "removed":
        path.unlink()
    elif kind == "added":
        path = path.with_name(dice.choice(["extra.pt", "best.pth", "state.ckpt"]))
        path.touch()
    return path, kind


def is_whole(report: Report) -> bool:
    return report.exit_code == 0 and not codes(report, "error", "warning")


def is_trusted(step: JudgedStep | None) -> bool:
    return step is not None and step.verdict == "passes" and not step.warnings


def test_damage_to_any_file_is_told_and_all_commands_agree(tmp_path: Path) -> None:
    """No file of a layout that holds state is lost without a word, and no command trusts what another one does not."""
    layouts = [
        kind for kind in vars(test_contracts).values() if isinstance(kind, type) and issubclass(kind, LayoutTests)
    ]
    layouts = [kind for kind in layouts if kind.__module__ == test_contracts.__name__]
    runs = {kind: run_of(kind, tmp_path / kind.__name__) for kind in layouts}
    dice = random.Random(64)
    for number in range(examples(9, 60)):
        newest, older = runs[kind := layouts[number % len(layouts)]]
        kept = newest.with_name("kept").parent.parent / "kept"
        shutil.copytree(newest, kept, symlinks=True)
        path, how = damage(dice, newest)
        report = ckptlint.check(newest)
        about = f"{kind.__name__}: {path.relative_to(newest)} {how}"
        family = family_of(path.name)
        is_state = family is None or family.content != "other"
        is_missed = older is not None and not (family is not None and family.counted_by)  # a job may have fewer ranks
        if how == "none":
            assert is_whole(report), about
        elif how == "added" or (is_state and (how in ("empty", "zeros", "cut") or is_missed)):
            assert not is_whole(report), f"{about} passes"
        search = ckptlint.latest(newest.parent)
        decisions = ckptlint.deletable(newest.parent, keep=1).decisions
        judged = {decision.step.name: decision.step for decision in decisions}
        answers = [is_whole(ckptlint.check(newest.parent)), is_trusted(judged[newest.name])]
        answers.append(search.newest is not None and search.newest.name == newest.name and is_trusted(search.newest))
        every = steps_in(ckptlint.check(newest.parent, all_steps=True))
        answers += [is_trusted(step) for step in every if step.name == newest.name]
        assert {*answers} == {is_whole(report)}, f"{about}: {answers}"
        shutil.rmtree(newest)
        kept.rename(newest)


def test_a_step_without_its_weights_is_told_what_to_copy(tmp_path: Path) -> None:
    step = step_of_two_models(tmp_path, 6, 6)
    torch.save({"last_epoch": 1, "_step_count": 2}, step / "scheduler.pt")
    (step / "trainer_state.json").write_text('{"global_step": 2}')
    (step / "model.safetensors").unlink()
    shutil.rmtree(step / "2_Dense")
    report = report_on(step)
    ((code, severity, sentence),) = found(report)
    assert (code, severity, sentence.endswith("holds an optimizer and no model")) == ("COM001", "error", True)
    assert report.diagnostics[0].finding.hint.startswith("copy the weights from where they were written")
    assert report.checkpoints[0].not_run["GEO004"] == "needs file of weights"


def test_the_newest_step_of_a_run_is_no_stale_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NeMo-RL#3312: check says what latest says, though only some numbers are read by default."""
    monkeypatch.setattr(request, "CHEAP_BYTES", 1)
    run = tmp_path / "run"
    run.mkdir()
    for number in (10, 20):
        copy_step(REAL / "fsdp2_4r", run / f"step-{number}", number=7)
    assert "RUN005" in codes(ckptlint.check(run), "warning")
    assert "RUN005" not in codes(ckptlint.check(run, depth="metadata"))
    settings = tmp_path / "settings.toml"
    settings.write_text("[per-key-ignores]\n'*' = { rules = ['RUN005'], reason = 'a rehearsal' }\n")
    assert {"RUN005", "LNT001"}.isdisjoint(codes(ckptlint.check(run, config=settings)))
    assert ckptlint.latest(run).path == f"{run}/step-10"


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "model.pt", ".metadata"])
def test_a_pointer_of_git_lfs_is_fetched_not_saved_again(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    (lead,) = [item for item in ckptlint.check(tmp_path).diagnostics if "Git LFS pointer" in item.title]
    assert lead.finding.hint == "fetch the file: git lfs pull"
