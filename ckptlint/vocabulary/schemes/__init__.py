"""How quantised weights are stored: one TOML file for each scheme, read strictly and once.

A scheme says which tensor holds the codes of a weight, which tensors go with it, of which dtypes and shapes, and how a
configuration names it. Names are templates of `{weight}`, the key that the weight has unquantised, its `{module}` and
its `{leaf}`; sizes are expressions (`architecture.expressions`) of the axes of the codes and of what is declared.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

from ckptlint.grouping import grouped
from ckptlint.vocabulary.strict_toml import made_of, own_file, toml_table


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A tensor that goes with the codes of a weight.

    Attributes:
        names: templates of its key, of which one is stored.
        common: those of them that other tensors have, too -> the dtypes in which they are this part.
        needed: whether no weight does without it.
        declared: what a configuration says of all weights that have it, and of none without it; values as text.
        may_be_zero: whether it has a 0 where codes are not: in a table of values, or of blocks of zeros.
        uniform: whether the weights of one role all have it, or none.
        dtypes: those that it may have; empty for any.
        shapes: strategy -> the shapes that it may have, the expert axes of the codes before them; empty for any. Each
            of `same_block` is for blocks of one size, which all weights share.
    """

    names: tuple[str, ...]
    common: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    needed: bool = False
    may_be_zero: bool = False
    uniform: bool = False
    declared: Mapping[str, str] = field(default_factory=dict)
    dtypes: tuple[str, ...] = ()
    shapes: Mapping[str, tuple[tuple[str, ...], ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Scheme:
    """A way to store quantised weights.

    Attributes:
        name: of its file.
        weight: template of the key of the codes.
        dtypes: those that the codes may have.
        axes: names of the last axes of the codes.
        sizes: name -> an expression of the axes.
        declared: what a configuration says that means this scheme, each of them alone; values as text.
        shifted: whether code 0 is the least number, so that a weight of zeros has others.
        passed_over: model types of which the library quantises nothing, whatever the configuration says.
    """

    name: str
    title: str
    source: str
    weight: str
    dtypes: tuple[str, ...]
    axes: tuple[str, ...]
    declared: tuple[Mapping[str, str], ...]
    parts: tuple[Part, ...]
    sizes: Mapping[str, str] = field(default_factory=dict)
    shifted: bool = False
    passed_over: tuple[str, ...] = ()


@cache
def schemes() -> tuple[Scheme, ...]:
    """All of them, by name."""

    def read(file: Path, text: str) -> Scheme:
        return made_of(Scheme, file.name, toml_table(file.name, text), name=file.stem)

    files = sorted(Path(__file__).parent.glob("*.toml"))
    return tuple(own_file(file, partial(read, file)) for file in files)


@cache
def _pattern(template: str) -> re.Pattern[str]:
    text = re.escape(template).replace(r"\{weight\}", "(?P<weight>.+)").replace(r"\{module\}", "(?P<module>.+)")
    return re.compile(text.replace(r"\{leaf\}", r"(?P<leaf>[^.]+)"))


def weight_of(key: str, template: str) -> str:
    """The weight whose tensor under a template this key is; "" where it is none.

    >>> weight_of("h.0.q.SCB", "{module}.SCB"), weight_of("h.0.q.weight_scale", "{weight}_scale")
    ('h.0.q.weight', 'h.0.q.weight')
    """
    tail = template.rpartition("}")[2]
    match = _pattern(template).fullmatch(key) if key.endswith(tail) else None
    groups = match.groupdict() if match else {}
    return groups.get("weight") or (f"{groups['module']}.{groups.get('leaf', 'weight')}" if groups else "")


def named(template: str, weight: str) -> str:
    """The key of a weight's tensor.

    >>> named("{module}._{leaf}_qdata", "h.0.q.weight")
    'h.0.q._weight_qdata'
    """
    module, _, leaf = weight.rpartition(".")
    return template.format(weight=weight, module=module, leaf=leaf)


def leaf_of(part: Part, number: int = 0) -> str:
    """How a part is called at a weight of the name `weight`: `weight_scale`, `SCB`."""
    return named(part.names[number], "_.weight").removeprefix("_.")


@cache
def _templates() -> tuple[tuple[str, ...], dict[str, list[str]]]:
    """The ends of all names but a weight's own, and end -> templates."""
    every = {name for scheme in schemes() for part in scheme.parts for name in part.names if name not in part.common}
    every |= {scheme.weight for scheme in schemes()} - {"{weight}"}
    by_end = grouped((template.rpartition("}")[2], template) for template in sorted(every))
    return tuple(by_end), by_end


def quantised_weights(keys: Iterable[str]) -> set[str]:
    """The weights that scales, blocks or codes among these keys belong to."""
    ends, _ = _templates()
    return {quantised_weight(key) for key in keys if key.endswith(ends)} - {""}


def quantised_weight(key: str) -> str:
    """The weight that a scale, a block or codes belong to by their name; "" for what is none of these.

    >>> quantised_weight("h.0.q.weight_scale_inv"), quantised_weight("h.0.q.weight.absmax"), quantised_weight("h.0.q")
    ('h.0.q.weight', 'h.0.q.weight', '')
    """
    ends, by_end = _templates()
    if not key.endswith(ends):
        return ""
    weights = (weight_of(key, template) for end in ends if key.endswith(end) for template in by_end[end])
    return next(filter(None, weights), "")
