"""Near misses of real conversions, none of which `diff --values` may prove.

    python bench/evidence/near_misses.py [--pairs 400] [--seed 1]

The pairs of fixtures/real/conversions were written by the libraries' own converters; all of them must be proven, both
ways. Each near miss is one of them with one change to the side that is a file of safetensors, of a kind in `KINDS`, in
a random layer and role. A wrong verdict is printed with its pair and kind; any ends the command in 1.
"""

from __future__ import annotations

import argparse
import csv
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import ckptlint
from ckptlint.vocabulary.keys import parse
from ckptlint.vocabulary.namings import is_bias, naming_of, stored

PAIRS = Path(__file__).resolve().parents[2] / "fixtures" / "real" / "conversions"
BESIDE = ["optim*", "*optimizer*", "nested*", "model.seen"]  # what no converter takes along
State = dict[str, torch.Tensor]


class Model:
    """The weights of one side, by role."""

    def __init__(self, state: State, chance: random.Random) -> None:
        naming = naming_of(state)
        self.state, self.chance = state, chance
        self.roles = {key: held.roles for key in state if naming and (held := stored(key, naming))}

    def keys(self, *roles: str) -> list[str]:
        """The weights that hold these roles, in the order of layers."""
        own = [key for key in self.state if self.roles.get(key) == roles and not is_bias(key)]
        return sorted(own, key=lambda key: (parse(key).layer or 0, parse(key).expert or 0))

    def some(self, keys: list[str]) -> list[str]:
        """All of them, or those of one layer."""
        layers = sorted({parse(key).layer or 0 for key in keys})
        one = self.chance.choice([None, *layers]) if layers else None
        return [key for key in keys if one is None or parse(key).layer == one]

    def matrix(self) -> str:
        """A larger weight."""
        own = [
            key
            for key, value in self.state.items()
            if value.ndim > 1 and value.numel() > 64 and value.is_floating_point()
        ]
        return self.chance.choice(sorted(own))

    def turn(self, keys: list[str], change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Change some weights."""
        for key in keys:
            self.state[key] = change(self.state[key]).contiguous()

    def exchange(self, one: list[str], other: list[str]) -> None:
        """Exchange weights, where they have one shape."""
        for a, b in zip(one, other, strict=False):
            if self.state[a].shape == self.state[b].shape:
                self.state[a], self.state[b] = self.state[b], self.state[a]


def halves(size: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """The rows of each head: even ones first, then the odd ones; as they are where heads do not fit."""

    def change(weight: torch.Tensor) -> torch.Tensor:
        if weight.shape[0] % size:
            return weight
        return weight.reshape(-1, size // 2, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)

    return change


def pairs_of(size: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """The rows of each head: one of the first half and one of the second in turn."""

    def change(weight: torch.Tensor) -> torch.Tensor:
        if weight.shape[0] % size:
            return weight
        return weight.reshape(-1, 2, size // 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)

    return change


def rows(order: Callable[[int], list[int]]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda weight: weight[order(len(weight))]


def groups(count: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Rows that lie in groups, one after the other."""
    return lambda weight: (
        weight
        if len(weight) % (2 * count)
        else weight.reshape(count, 2, -1, weight.shape[-1]).transpose(0, 1).reshape(weight.shape)
    )


def square(weight: torch.Tensor) -> torch.Tensor:
    """The transpose of a matrix that has the same shape."""
    return weight.T if weight.ndim == 2 and len(set(weight.shape)) == 1 else weight


def one_element(model: Model, to: Callable[[torch.Tensor], torch.Tensor]) -> None:
    key = model.matrix()
    flat = model.state[key].clone().view(-1)
    at = model.chance.randrange(flat.numel())
    flat[at] = to(flat[at])
    model.state[key] = flat.view(model.state[key].shape)


def two_rows(model: Model, axis: int) -> None:
    key = model.matrix()
    value = model.state[key]
    first, second = model.chance.sample(range(value.shape[axis]), 2)
    order = torch.arange(value.shape[axis])
    order[[first, second]] = order[[second, first]]
    model.state[key] = value.index_select(axis, order).contiguous()


def two_layers(model: Model, roles: list[tuple[str, ...]]) -> None:
    for role in roles:
        keys = model.keys(*role)
        own = [
            [key for key in keys if parse(key).layer == layer]
            for layer in sorted({parse(key).layer or 0 for key in keys})
        ]
        if len(own) > 1:
            model.exchange(own[0], own[1])


def two_experts(model: Model, *roles: str) -> None:
    for role in roles:
        keys = model.some(model.keys(role))
        own = {
            parse(key).expert: key for key in keys if parse(key).layer == parse(keys[0]).layer and parse(key).in_experts
        }
        if len(own) > 1:
            model.exchange([own[min(own)]], [own[max(own)]])


def fewer_tokens(model: Model) -> None:
    keys = [key for key, roles in model.roles.items() if roles in (("embedding",), ("head",))]
    model.turn(keys, lambda weight: weight[:-16])


def by_expert(weight: torch.Tensor) -> torch.Tensor:
    """Stacked experts whose gates all come first."""
    if weight.ndim != 3:
        return weight
    gate, up = weight.chunk(2, dim=1)
    return torch.cat([gate.flatten(0, 1), up.flatten(0, 1)]).view(weight.shape)


def lose(model: Model) -> None:
    """Lose a weight; not a tied head, which is there once more."""
    lost = model.state.pop(key := model.matrix())
    if any(torch.equal(lost, other) for other in model.state.values() if other.shape == lost.shape):
        model.state[key] = lost


ROLES = [("q",), ("k",), ("v",), ("o",), ("gate",), ("up",), ("down",), ("attention norm",), ("mlp norm",)]
EVERY = [*ROLES, ("q", "k", "v"), ("gate", "up"), ("router",)]
KINDS: dict[str, Callable[[Model], None]] = {
    "an element is a little off": lambda m: one_element(m, lambda x: x * 1.02 + 1e-4),
    "an element is zero": lambda m: one_element(m, torch.zeros_like),
    "an element has the other sign": lambda m: one_element(m, torch.neg),
    "two rows": lambda m: two_rows(m, 0),
    "two columns": lambda m: two_rows(m, -1),
    "rows backwards": lambda m: m.turn([m.matrix()], rows(lambda n: [*range(n)][::-1])),
    "rows shifted": lambda m: m.turn([m.matrix()], rows(lambda n: [*range(1, n), 0])),
    "rows in turn": lambda m: m.turn([m.matrix()], rows(lambda n: [*range(0, n, 2), *range(1, n, 2)])),
    "the last rows are zero": lambda m: m.turn([m.matrix()], lambda w: torch.cat([w[:-2], torch.zeros_like(w[-2:])])),
    "negated": lambda m: m.turn([m.matrix()], torch.neg),
    "doubled": lambda m: m.turn([m.matrix()], lambda w: w * 2),
    "transposed": lambda m: m.turn(m.some(m.keys(m.chance.choice(["o", "q", "down"]))), square),
    "q in halves": lambda m: m.turn(m.some(m.keys("q")), halves(8)),
    "k in halves": lambda m: m.turn(m.some(m.keys("k")), halves(8)),
    "q in pairs": lambda m: m.turn(m.some(m.keys("q")), pairs_of(8)),
    "q and k in halves": lambda m: m.turn([*m.keys("q"), *m.keys("k")], halves(8)),
    "q and k in pairs": lambda m: m.turn([*m.keys("q"), *m.keys("k")], pairs_of(8)),
    "q and k with another head": lambda m: m.turn([*m.keys("q"), *m.keys("k")], halves(4)),
    "v, o or up in halves": lambda m: m.turn(m.some(m.keys(m.chance.choice(["v", "o", "up"]))), halves(8)),
    "heads exchanged": lambda m: m.turn(m.some(m.keys("q")), rows(lambda n: [*range(n // 2, n), *range(n // 2)])),
    "q and o exchanged": lambda m: m.exchange(m.keys("q"), m.keys("o")),
    "k and v exchanged": lambda m: m.exchange(*(m.some(m.keys(role)) for role in "kv")),
    "gate and up exchanged": lambda m: m.exchange(m.keys("gate"), m.keys("up")),
    "norms exchanged": lambda m: m.exchange(m.keys("attention norm"), m.keys("mlp norm")),
    "embedding and head exchanged": lambda m: m.exchange(m.keys("embedding"), m.keys("head")),
    "a role of two layers": lambda m: two_layers(m, [m.chance.choice(EVERY)]),
    "two layers": lambda m: two_layers(m, EVERY),
    "two experts": lambda m: two_experts(m, "gate", "up", "down"),
    "a role of two experts": lambda m: two_experts(m, m.chance.choice(["gate", "up", "down"])),
    "qkv in other groups": lambda m: m.turn(m.some(m.keys("q", "k", "v")), groups(m.chance.choice([2, 4]))),
    "qkv with rows of heads": lambda m: m.turn(m.some(m.keys("q", "k", "v")), halves(8)),
    "gate and up in groups": lambda m: m.turn(m.some(m.keys("gate", "up")), groups(2)),
    "the embedding in halves": lambda m: m.turn(m.keys("embedding"), halves(8)),
    "all gates, then all ups": lambda m: m.turn(m.some(m.keys("gate", "up")), by_expert),
    "fewer tokens": fewer_tokens,
    "a weight is lost": lose,
}  # fmt: skip


def healthy() -> Iterator[tuple[str, Path, Path]]:
    """Name and both sides of each real conversion, without adapters and quantised ones."""
    with (PAIRS / "PAIRS.tsv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file, delimiter="\t"):
            if not row["adapter"] and not row["name"].startswith("quantised"):
                yield row["name"], PAIRS / row["old"], PAIRS / row["new"]


def wrong_about(old: Path, new: Path, changed: Collection[str]) -> str:
    """What is wrong about the verdict of `diff --values`: it proves, or does not name what was changed; else ""."""
    found = ckptlint.diff(old, new, values=True, ignore=BESIDE)
    named = {key for match in found.matches if not match.is_proven for key in (*match.old, *match.new)}
    if found.exit_code != 1:
        return f"exit {found.exit_code}"
    return f"{sorted({*changed} - named)[0]} is not named" if {*changed} - named else ""


def near_misses(
    count: int, seed: int, folder: Path, kinds: Sequence[str] = (*KINDS,)
) -> Iterator[tuple[str, str, str]]:
    """Name of the pair, kind, and what is wrong about the verdict, of so many changed pairs."""
    chance = random.Random(seed)
    usable = [row for row in healthy() if any((side / "model.safetensors").is_file() for side in row[1:])]
    chance.shuffle(usable)
    made = 0
    for number in range(20 * count):
        name, *sides = usable[number % len(usable)]
        source = chance.choice([side for side in sides if (side / "model.safetensors").is_file()])
        (other,) = [side for side in sides if side != source]
        kind = chance.choice(kinds)
        before = load_file(source / "model.safetensors")
        model = Model(dict(before), chance)
        KINDS[kind](model)
        after = model.state
        if after.keys() == before.keys() and all(torch.equal(after[key], value) for key, value in before.items()):
            continue  # it has no such weight
        target = folder / "near"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target)
        save_file({key: value.clone() for key, value in after.items()}, target / "model.safetensors", {"format": "pt"})
        changed = [key for key in after if not torch.equal(after[key], before[key])]
        yield name, kind, wrong_about(other, target, changed) or wrong_about(target, other, changed)
        made += 1
        if made == count:
            return


def main() -> None:
    """Judge the healthy pairs and so many near misses, and print the wrong verdicts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    real = list(healthy())
    refused = [name for name, old, new in real if {wrong_about(old, new, ()), wrong_about(new, old, ())} != {"exit 0"}]
    kinds: Counter[str] = Counter()
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        for name, kind, verdict in near_misses(arguments.pairs, arguments.seed, Path(folder)):
            kinds[kind] += 1
            if verdict:
                wrong.append(f"{name}, {kind}: {verdict}")
    print(f"{len(real)} conversions, {len(refused)} not proven", *refused, sep="\n  ")
    print(f"{kinds.total()} near misses of {len(kinds)} kinds, {len(wrong)} wrong verdicts", *wrong, sep="\n  ")
    sys.exit(bool(refused or wrong))


if __name__ == "__main__":
    main()
