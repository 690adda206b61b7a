"""Healthy exports of every model type of transformers, none of which may be flagged.

    python bench/evidence/precision.py (--out FILE | --report FILE) [--types a,b] [--part I/N] [--fields 2] [--seed 1]

Each type is built tiny and saved: whole, whole over older shards, in shards, by its base class, with one field changed,
as an adapter (peft), and quantised by bitsandbytes and torchao where they are installed. A flagged folder's line keeps
its configuration and what a load says. A run goes on after the types in FILE.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}

import torch
import transformers.modeling_utils
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import ckptlint

HEADS = [getattr(modeling_auto, f"MODEL_{name}MAPPING") for name in ("FOR_CAUSAL_LM_", "FOR_IMAGE_TEXT_TO_TEXT_",
    "FOR_SEQ_TO_SEQ_CAUSAL_LM_", "FOR_MASKED_LM_", "")]  # fmt: skip
MOST_BYTES, SECONDS_A_TYPE = 20 << 20, 90
RECIPES = [(how, shallow) for how in ("name", "value", "32", "/16", "/4") for shallow in (True, False)]
OF_EVERY_TYPE = {*transformers.PreTrainedConfig().to_dict()} - {"tie_word_embeddings"} | {"model_type"}
SIZE = re.compile("(?!.*(image|patch|window|kernel|stride|block_)).*(size|dim|channel|width|emb|d_|filter|rank|inner)")
TOKEN, UNCHANGED = (re.compile(r"_(id|idx|index|token)$" + more) for more in ("", "|cache|drop|prob|^mask_|_loss"))
DEPTH = re.compile(r"layers?$|depth|num_.*blocks$|^n_layer")
MOST = {"vocab|n_words|num_embeddings": 333, "experts_per_tok|top_?k|shared_experts$|group|(kv|key_value)_heads": 2,
    "experts$|heads?$|_heads_": 4, "position|length": 64}  # fmt: skip


def small_number(kind: str, name: str, value: int, how: str, shallow: bool) -> int:
    """The number that a field gets in place of its default: a size is drawn by its name or its default, or divided."""
    dice = random.Random(f"{kind} {name if how == 'name' else value}")
    if TOKEN.search(name):
        return value if value < 100 else value % 97
    if DEPTH.search(name):
        return min(value, 2) if shallow else value
    if how[0] == "/" and "head" in name:  # as many heads as before, of a size that still goes with the rest
        return max(value // int(how[1:]), 2) if SIZE.match(name) else value
    if re.search("head_dim|head_size|d_kv|d_head", name):
        return min(value, dice.choice([4, 8, 16]) if how == "name" else 8)
    if (most := next((most for pattern, most in MOST.items() if re.search(pattern, name)), None)) is not None:
        return min(value, most)
    if value <= 64 or not SIZE.match(name):
        return value
    return max(value // int(how[1:]), 8) if how[0] == "/" else 32 if how == "32" else dice.choice([16, 32, 48, 64])


def small(kind: str, values: Any, how: str, shallow: bool, name: str = "") -> Any:
    """A configuration as a dictionary, with what is inside it, made small; what follows from the rest is left out."""
    if isinstance(values, dict):
        known = values.get("model_type") in CONFIG_MAPPING
        given = {"model_type", *(one.name for one in fields(CONFIG_MAPPING[values["model_type"]]))} if known else values
        few = isinstance(rows := values.get("vocab_size"), int) and rows < 100  # no id of a class's own fits, as it is
        return {key: value if few and TOKEN.search(str(key)) else small(kind, value, how, shallow, str(key))
            for key, value in values.items() if key in given
            and not (shallow and isinstance(value, list) and str(key).endswith("_types"))}  # fmt: skip
    if isinstance(values, list) and values and all(type(value) is int for value in values):
        if DEPTH.search(name) or "heads" in name:
            return [min(value, 2) for value in values]
        if TOKEN.search(name):
            return [small_number(kind, name, value, how, shallow) for value in values]
        if max(values) > 64 and SIZE.match(name):
            return [value * 64 // max(values) // 8 * 8 or 8 for value in values]
    if name == "initializer_range":  # 1e-10 of some types leaves nothing but zeros in 8 bits
        return 0.02
    values = 333 if (name, values) == ("vocab_size", None) else values
    return small_number(kind, name, values, how, shallow) if type(values) is int else values


def build(kind: str, values: dict[str, Any], mappings: Sequence[Any] = HEADS) -> Any:
    """A model with random weights of a configuration, of the first class that the type has; fails if it is large."""
    config = CONFIG_MAPPING[kind].from_dict(values)
    classes = [one[type(config)] for one in mappings if type(config) in one]
    if not classes:
        raise LookupError("no model class")
    model_class = classes[0][0] if isinstance(classes[0], tuple) else classes[0]
    try:
        with torch.device("meta"):
            model = model_class(config)
    except Exception:  # a constructor that reads a value
        model = model_class(CONFIG_MAPPING[kind].from_dict(values))
    if (size := sum(one.numel() * 4 for one in model.parameters())) > MOST_BYTES:
        raise ValueError(f"too large: {size >> 20} MB")
    return model_class(CONFIG_MAPPING[kind].from_dict(values))


def tiny(kind: str, seed: int) -> dict[str, Any]:
    """The values of a small configuration which builds."""
    values = CONFIG_MAPPING[kind]().to_dict()
    for how, shallow in RECIPES:
        try:
            build(kind, made := small(f"{seed} {kind}", values, how, shallow))
            return made
        except Exception as error:
            failure = error
    raise failure


def changes(values: dict[str, Any], dice: random.Random, path: tuple[str, ...] = ()) -> Iterator[tuple[Any, Any]]:
    """Fields of a configuration, those of parts too, each with another value."""
    for key, value in values.items():
        if isinstance(value, dict) and not re.search("rope|quant|label|task|_dict$", key):
            yield from changes(value, dice, (*path, key))
        elif key not in OF_EVERY_TYPE and not UNCHANGED.search(key) and isinstance(value, int | None):
            near = [2 * value, value // 2, value + 8, None] if value and value > 3 else [(value or 15) + 1]
            near = [value // 2 if re.search("kv|key", key) else 2 * value] if value and key.endswith("heads") else near
            yield (*path, key), not value if isinstance(value, bool) else dice.choice(near)


def saves(kind: str, seed: int, count: int) -> Iterator[tuple[str, Any, list[int]]]:
    """Of each folder of a type: name, model, and the most bytes of a shard for each save into it, in turn."""
    model = build(kind, values := tiny(kind, seed))
    third = sum(one.numel() * one.element_size() for one in model.parameters()) // 3 + 1
    yield "whole", model, [MOST_BYTES]
    yield "over shards", model, [third, MOST_BYTES]
    yield "shards", model.to(torch.bfloat16), [third]
    if type(model.config) in HEADS[-1] and not isinstance(model, HEADS[-1][type(model.config)]):
        yield "base", build(kind, values, HEADS[-1:]), [MOST_BYTES]
    yield from others(model)
    dice = random.Random(f"{seed} {kind}")
    for path, value in sorted(changes(values, dice), key=lambda _: dice.random())[: 6 * count]:
        changed = part = json.loads(json.dumps(values))
        for key in path[:-1]:
            part = part[key]
        part[path[-1]] = value
        try:
            model = build(kind, changed)
        except Exception:  # this value is not a legal one
            continue
        if (count := count - 1) < 0:
            return
        yield f"{'.'.join(path)} = {value}", model, [MOST_BYTES]


def others(model: Any) -> Iterator[tuple[str, Any, list[int]]]:
    """The model quantised, and an adapter of it, as far as the libraries are there and take this type."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        for name, config in quantisers():
            with suppress(Exception):
                yield (
                    name,
                    type(model).from_pretrained(folder, quantization_config=config, dtype=torch.bfloat16),
                    [MOST_BYTES],
                )
    with suppress(Exception):
        import peft

        yield "adapter", peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", r=2)), [MOST_BYTES]


def quantisers() -> Iterator[tuple[str, Any]]:
    """Name and configuration of each way to quantise that is installed."""
    if find_spec("bitsandbytes"):
        yield "nf4", transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
        yield "int8", transformers.BitsAndBytesConfig(load_in_8bit=True)
    if find_spec("torchao"):
        from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig

        yield "torchao int8", transformers.TorchAoConfig(Int8WeightOnlyConfig(version=2))
        yield "torchao fp8", transformers.TorchAoConfig(Float8WeightOnlyConfig(version=2))


def judged(folder: Path, model: Any, name: str) -> dict[str, Any]:
    """What is said against the folder of a model, with what transformers says; nothing if it is not flagged."""
    report = ckptlint.check(folder, fail_on="error")
    told = [one for one in report.diagnostics if one.severity.label in ("warning", "error")
        and (name != "over shards" or "index.json is stale" not in one.title)]  # fmt: skip
    if not told and not report.exit_code:
        return {}
    codes = {one.code: one.title for one in reversed(told)} or {f"exit {report.exit_code}": str(report.unreadable)}
    try:
        told_by_load = type(model).from_pretrained(folder, output_loading_info=True)[1]
        loads = "; ".join(f"{key}: {len(one)}" for key, one in told_by_load.items() if one)
    except Exception as error:
        loads = f"{type(error).__name__}: {error}"[:200]
    return {"flagged": codes, "loads": loads or "whole", "config": json.loads((folder / "config.json").read_text())}


def write_lines(kind: str, seed: int, count: int, path: Path) -> None:
    """Write one line for each folder of a type to a file; the last may say why there are no more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # a fork has none of its parent's threads, and would wait for them
    line = {"type": kind}
    with path.open("a") as lines:
        try:
            for name, model, sizes in saves(kind, seed, count):
                folder, line = path.with_name(name), {"type": kind, "variant": name, "class": type(model).__name__}
                for size in sizes:
                    model.save_pretrained(folder, max_shard_size=size)
                print(json.dumps(line | judged(folder, model, name), default=str), file=lines, flush=True)
        except Exception as error:
            print(json.dumps(line | {"why": " ".join(f"{type(error).__name__}: {error}".split())[:200]}), file=lines)


def precision(types: Sequence[str], seed: int, count: int) -> Iterator[dict[str, Any]]:
    """The lines of these types, each of which is written and judged in a process of its own."""
    for kind in types:
        with tempfile.TemporaryDirectory() as scratch:
            (path := Path(scratch) / "lines").touch()
            child = multiprocessing.get_context("fork").Process(target=write_lines, args=(kind, seed, count, path))
            child.start()
            child.join(SECONDS_A_TYPE)
            child.kill()
            child.join()
            yield from map(json.loads, path.read_text().splitlines())
        if child.exitcode:
            yield {"type": kind, "why": f"ended with {child.exitcode}, or took over {SECONDS_A_TYPE} s"}


def main() -> None:
    """Write and judge the types that are asked for, print what is said against them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--report", type=Path)
    parser.add_argument("--types", type=lambda text: text.split(","), default=sorted(CONFIG_MAPPING.keys()))
    parser.add_argument("--part", type=lambda text: [int(one) for one in text.split("/")], default="0/1")
    parser.add_argument("--fields", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    path = chosen.report or chosen.out or parser.error("give --out or --report")
    if chosen.out:
        torch.set_num_threads(1)
        with path.open("a") as out:
            done = {json.loads(line)["type"] for line in path.read_text().splitlines()}
            left = [kind for kind in chosen.types[chosen.part[0] :: chosen.part[1]] if kind not in done]
            for line in precision(left, chosen.seed, chosen.fields):
                print(json.dumps(line), file=out, flush=True)
    lines = [*map(json.loads, path.read_text().splitlines())]
    flagged = [one for one in lines if "flagged" in one]
    for one in lines:
        for code, text in ({"not written:": one["why"]} if "why" in one else one.get("flagged", {})).items():
            print(one["type"], one.get("variant", ""), code, text, f"[loads: {one['loads']}]" if "loads" in one else "")
    print(f"{sum('why' not in one for one in lines)} folders of {len({one['type'] for one in lines})} types,",
        len(flagged), "flagged", dict(Counter(code for one in flagged for code in one["flagged"])))  # fmt: skip
    sys.exit(bool(flagged))


if __name__ == "__main__":
    main()
