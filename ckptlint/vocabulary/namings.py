"""How conventions name the weights of a transformer and store them: `namings.toml`, read and looked up."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ckptlint.vocabulary.keys import parse
from ckptlint.vocabulary.strict_toml import made_of, own_file, toml_table

_HOW = frozenset({"by group", "alternating", "[in, out]", "pairs", "halves exchanged"})
_OUTSIDE = frozenset({"embedding", "head", "final norm", "positions", "output"})


@dataclass(frozen=True, slots=True)
class StoredRoles:
    """What a key holds under a naming.

    Attributes:
        roles: of the weights in it, in their order; several in a fused one.
        how: how their rows lie, of what namings.toml explains.
    """

    roles: tuple[str, ...]
    how: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Naming:
    """A convention.

    Attributes:
        needs: what some key of a model under it has.
        roles: end of a key -> roles, and after a comma how they lie.
        like: another one whose roles it has too, "" for none.
        halves: what a key has of a model whose heads rope turns by halves all the same.
        halves_types: the model types of such models.
    """

    name: str
    needs: re.Pattern[str]
    source: str
    roles: Mapping[str, str]
    like: str = ""
    halves: re.Pattern[str] | None = None
    halves_types: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _File:
    namings: tuple[Naming, ...]


@cache
def namings() -> dict[str, tuple[Naming, dict[tuple[str, ...], StoredRoles]]]:
    """Name -> the convention, and what the keys hold that end in some parts; raises OwnFileError for a broken file."""
    return own_file(Path(__file__).with_suffix(".toml"), _read)


def _read(text: str) -> dict[str, tuple[Naming, dict[tuple[str, ...], StoredRoles]]]:
    made = {item.name: item for item in made_of(_File, "namings.toml", toml_table("namings.toml", text)).namings}
    read = {}
    for name, item in made.items():
        roles = {**(made[item.like].roles if item.like else {}), **item.roles}
        read[name] = item, {(*end.split("."),): _stored(name, known) for end, known in roles.items()}
    return read


def _stored(name: str, text: str) -> StoredRoles:
    roles, _, how = text.partition(", ")
    hows = frozenset(re.findall(r"\[in, out\]|[^,\s][^,]*", how))
    if not roles or hows - _HOW:
        raise ValueError(f"namings.toml: {name} has {text!r}, which says nothing")
    fused = re.findall(r"(?:(?:shared|text|single) )?(?:gate|up|q|k|v)\b", roles)
    return StoredRoles(tuple(fused) if " ".join(fused) == roles else (roles,), hows)


def naming_of(keys: Collection[str]) -> Naming | None:
    """The convention of the keys of a model, None where no known one fits."""
    text = "\n".join(keys)
    fitting = [naming for naming, _ in namings().values() if naming.needs.search(text)]
    return max(fitting, key=lambda naming: sum(stored(key, naming) is not None for key in keys), default=None)


def stored(key: str, naming: Naming) -> StoredRoles | None:
    """What a key holds under a naming, None where it has no such name.

    >>> stored("model.layers.3.mlp.experts.7.gate_proj.weight", naming_of(["layers.0.self_attn.q_proj.weight"]))
    StoredRoles(roles=('gate',), how=frozenset())
    """
    parsed = parse(key)
    if parsed.kind != "model":
        return None
    words = [word.rstrip("*") for word in parsed.role.split(".") if word != "*"]
    ends = namings()[naming.name][1]
    for last in (len(words), len(words) - 1):  # a name of its own, or that of a module with a weight or bias
        for first in range(last):
            known = ends.get((*words[first:last],))
            if known and not (known.roles[0] in _OUTSIDE and parsed.block):
                return known
    return None


def roles_of(key: str) -> frozenset[tuple[str, ...]]:
    """What a key may hold under any naming, of whichever stream: others than Flux call theirs otherwise.

    >>> roles_of("joint_blocks.3.context_block.attn.proj.weight") == roles_of("blocks.3.attn.to_add_out.weight")
    True
    """
    known = (stored(key, naming) for naming, _ in namings().values())
    return frozenset(tuple(re.sub("^(text|single) ", "", role) for role in entry.roles) for entry in known if entry)


def is_bias(key: str) -> bool:
    """Whether a key names a bias, not a weight."""
    return key.endswith("bias") or "_bias" in key.rpartition(".")[2]
