"""The targets of bench/evidence/fuzz.py hold on their seeds and on a few mutants; by itself it runs millions."""

from __future__ import annotations

import pickle
import random
from types import ModuleType

import pytest
from pickles import stream, text
from support import bench

from ckptlint.formats.pickles import safe_pickle as unpickle

MUTANTS = 30


@pytest.fixture(scope="module")
def fuzz() -> ModuleType:
    return bench("evidence/fuzz")


READERS = "keys safetensors archive state calls metadata baseline manifest index config.json yaml toml"
FILES = ".metadata torch_dist common.pt payload safetensors config.json run_config metadata.json integrity"
TARGETS = [*READERS.split(), *(f"check {name}" for name in FILES.split())]


def mutant(data: bytes, chance: random.Random) -> bytes:
    """A few bytes changed, taken away or repeated."""
    changed = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at, other = chance.randrange(len(changed) + 1), chance.randrange(len(changed) + 1)
        match chance.randrange(3):
            case 0:
                changed[at : at + 1] = chance.randbytes(1)
            case 1:
                del changed[at : at + chance.randint(1, 8)]
            case _:
                changed[at:at] = changed[other : other + chance.randint(1, 40)]
    return bytes(changed)


def test_every_target_is_named_here(fuzz: ModuleType) -> None:
    assert list(fuzz.TARGETS) == TARGETS


@pytest.mark.sweep(share=3)
@pytest.mark.parametrize("name", TARGETS)
def test_a_target_holds_on_seeds_and_mutants(fuzz: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(unpickle, "WORTHWHILE", unpickle.WORTHWHILE)  # the target `metadata` sets it
    target, chance = fuzz.TARGETS[name], random.Random(name)
    seeds = list(target.seeds())
    assert seeds and all(0 < len(seed) <= fuzz.SEED_LIMIT for seed in seeds)
    for seed in chance.sample(seeds, min(3, len(seeds))):
        target.run(seed)
    for _ in range(MUTANTS // 5 if name.startswith("check") else MUTANTS):
        target.run(mutant(chance.choice(seeds), chance))


def test_pickles_that_starve_the_interpreter_are_left_to_the_child(fuzz: ModuleType) -> None:
    doubled = pickle.EMPTY_TUPLE + (pickle.DUP + pickle.TUPLE2) * 40
    memo = pickle.NONE + pickle.LONG_BINPUT + b"\xff\xff\xff\x7f"
    names = [pickle.GLOBAL + name for name in ("m\u00e4\nb\n".encode(), b"m\\\nb\n")]  # pickletools stops there
    for opcodes in (doubled, memo, pickle.NONE + pickle.PUT + b"2000000000\n", *names):
        assert fuzz.needs_child(stream(opcodes))
    assert not fuzz.needs_child(stream(text("a") + pickle.TUPLE1))
    assert not any(map(fuzz.needs_child, fuzz.TARGETS["metadata"].seeds()))
