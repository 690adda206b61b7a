"""The low-rank factors of adapters: which keys belong together, and which rank a configuration gives them.

Source: peft 0.21 (tuners.lora.layer, tuners.tuners_utils, utils.save_and_load); kohya-ss sd-scripts for `lora_down`
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from ckptlint.patterns import lazy_pattern
from ckptlint.vocabulary.keys import parse

Part = Literal["A", "B", "magnitude"]

_PARTS: Mapping[str, Part] = {
    "lora_A": "A",
    "lora_B": "B",
    "lora_embedding_A": "A",
    "lora_embedding_B": "B",
    "lora_down": "A",
    "lora_up": "B",
    "lora_magnitude_vector": "magnitude",
}
_DIFFUSERS = lazy_pattern(r"(.+?)[._]lora(?:_linear_layer)?\.(?:down|up)\.weight")
"""The names that diffusers gave factors first: `to_q.lora.down`, `to_q.lora_linear_layer.up`, `to_q_lora.down`."""
PREFIX = "base_model.model."
"""What peft puts before the names of the base model."""
BASE_LAYER = ".base_layer"
"""What peft puts after the name of a module that it wraps once more, for another parameter of it."""
EXPERTS_TURNED = (0, 19, 1)
"""The first peft whose factors of [experts, out, in] have A as wide as the last axis; before, as the middle one.

Source: peft 0.17 to 0.21: tuners.lora.layer.ParamWrapper.update_layer
"""

_LITERAL = lazy_pattern(r"[\w.\-]+")
_DEPTH = 32
_SAVED = 100  # each is looked for in all keys


@dataclass(slots=True, eq=False)
class Factors:
    """The low-rank factors of one module."""

    module: str  # its path, as the keys have it
    adapter: str  # its name in memory, where it is part of the keys; "" in files that peft writes
    keys: dict[Part, str] = field(default_factory=dict)  # which holds each part

    @property
    def base_module(self) -> str:
        """The path of the module in the base model."""
        module = self.module.removeprefix(PREFIX)
        while module.endswith(BASE_LAYER):
            module = module.removesuffix(BASE_LAYER)
        return module


def factors_of(keys: Iterable[str]) -> list[Factors]:
    """The factors that these keys hold, one entry for each module and adapter, in order.

    >>> [(f.module, f.adapter, list(f.keys)) for f in factors_of(["h.0.q.lora_A.weight", "h.0.q.lora_B.weight"])]
    [('h.0.q', '', ['A', 'B'])]
    """
    factors: dict[tuple[str, str], Factors] = {}
    for key in keys:
        words = key.split(".")
        at = next((i for i in range(len(words) - 1, 0, -1) if words[i] in _PARTS), 0)
        behind = words[at + 1 : -1] if words[-1] == "weight" else words[at + 1 :]
        if not at or len(behind) > 1 or "bias" in behind:
            continue
        home = ".".join(words[:at]), "".join(behind)
        factors.setdefault(home, Factors(*home)).keys[_PARTS[words[at]]] = key
    return list(factors.values())


Naming = Literal["peft", "diffusers", "kohya"]


def namings_of(keys: Iterable[str]) -> dict[str, dict[Naming, dict[str, str]]]:
    """Component (`unet`, `text_encoder`, ...) -> how its factors are named -> module -> one of its keys.

    Source: diffusers.loaders.lora_base, diffusers.utils.state_dict_utils: each component is converted by itself, from
    the first naming of which a key is found (diffusers#14548)

    >>> {part: [*named] for part, named in namings_of(["unet.q.lora.up.weight", "unet.k.lora_A.weight"]).items()}
    {'unet': ['diffusers', 'peft']}
    """
    keys = list(keys)
    first: dict[str, dict[Naming, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
    for key in keys:
        if match := _DIFFUSERS.fullmatch(key):
            first[key.partition(".")[0]]["diffusers"].setdefault(match[1], key)
    for factors in factors_of(keys):
        for key in islice(factors.keys.values(), 1):
            naming: Naming = "kohya" if "lora_down" in key or "lora_up" in key else "peft"
            first[key.partition(".")[0]][naming].setdefault(factors.module, key)
    return first


def home_of_experts(module: str) -> tuple[int | None, str]:
    """What a module of experts shares with itself under the names of another version: its layer and its last name."""
    return parse(f"{module}.weight").layer, module.rpartition(".")[2]


def expert_sizes(shapes: Mapping[str, tuple[int, ...]]) -> dict[tuple[int | None, str], frozenset[tuple[int, int]]]:
    """The (rows of B, columns of A) that factors for all experts of a module at once may have, by `home_of_experts`.

    Experts that are stored one by one are [out, in], and joined in memory, gate and up in one. Of a tensor that holds
    them all, [experts, out, in] shows in that the output of gate and up is twice the input of down; where it does not,
    peft may take either axis for the input, as the class and the version say.
    """
    single = defaultdict[tuple[int | None, str], dict[str, tuple[int, int]]](dict)
    stacked = defaultdict[tuple[int | None, str], set[tuple[int, int]]](set)
    for key, shape in shapes.items():
        module, _, name = key.removesuffix(".weight").rpartition(".")
        above, _, number = module.rpartition(".")
        if len(shape) == 2 and number.isdecimal():
            single[home_of_experts(above)].setdefault(name, (shape[0], shape[1]))
        elif len(shape) == 3 and name:
            stacked[home_of_experts(module)].add((shape[1], shape[2]))
    sizes = {}
    for home, pairs in stacked.items():
        is_out_in = any((2 * across, down) in pairs for down, across in pairs)
        sizes[home] = frozenset(pairs if is_out_in else pairs | {pair[::-1] for pair in pairs})
    for home, by_name in single.items():
        outs = {name for name in by_name if parse(f"{home[1]}.0.{name}.weight").function == "mlp_out"}
        first = [pair for name, pair in by_name.items() if name not in outs]
        joined = {(2 * down, across) for down, across in first} if len(first) > 1 else set()
        is_sure = bool(outs) and len(first) == 2 and len({*first}) == 1
        sizes[home] = frozenset({by_name[name] for name in outs} | joined | ({*first} if not is_sure else set()))
    return sizes


def endings(name: str) -> Iterator[str]:
    """What a name in a configuration may say of this module: its last parts, from all of them to the last one.

    >>> list(endings("layers.0.q_proj"))
    ['layers.0.q_proj', '0.q_proj', 'q_proj']
    """
    words = name.split(".")[-_DEPTH:]
    return (".".join(words[start:]) for start in range(len(words)))


def plain_text(pattern: str) -> str | None:
    r"""The text that names end with where a pattern of `rank_pattern` matches; None where it is no plain text.

    Such a pattern is a regular expression for the last parts of a name. None is ever run: whoever wrote the file chose
    it, and may have chosen one that never ends.

    >>> plain_text(r".*\.layers\.0\.q_proj"), plain_text(r"layers\.[0-3]\..*")
    ('layers.0.q_proj', None)
    """
    text = pattern.removeprefix(".*\\.").removesuffix("$").replace("\\.", ".").replace("\\-", "-").replace("\\_", "_")
    return text if _LITERAL.fullmatch(text) else None


class AdapterConfig(NamedTuple):
    """What `adapter_config.json` says of the factors; what has another type than peft gives it counts as not said.

    Attributes:
        kind: `peft_type` in capitals; "" where it is not given.
        task: `task_type`; "" where it is not given.
        rank: `r`; None where it is no rank.
        ranks: ending of a name -> the rank that `rank_pattern` gives these modules.
        perhaps: the ranks in it that belong to regular expressions, which may match any module.
        targets: the names of modules in `target_modules`; empty where it is a regular expression.
        parameters: the modules that `target_parameters` lie in, whose factors are as wide as their experts together;
            "" where any module may hold one of them.
        saved: the names in `modules_to_save`.
        excluded: the names of modules in `exclude_modules`; None where it is a regular expression.
        is_explicit: whether the layers are chosen by a list of numbers, by exclusion or by a regular expression.
        magnitudes: `use_dora`.
        alpha: `lora_alpha`; None where it is no number.
        alphas: ending of a name -> what `alpha_pattern` gives these modules; None of it where an expression decides.
        is_rank_stabilised: `use_rslora`: factors are divided by the root of the rank.
        is_transposed: `fan_in_fan_out`: the weights of the base are [in, out].
        tokens: `trainable_token_indices`, in the order of their rows.
        version: `peft_version`, its numbers; () where it is not given, as before 0.18.
    """

    kind: str = ""
    task: str = ""
    rank: int | None = None
    ranks: Mapping[str, int] = MappingProxyType({})
    perhaps: frozenset[int] = frozenset()
    targets: tuple[str, ...] = ()
    parameters: frozenset[str] = frozenset()
    saved: tuple[str, ...] = ()
    excluded: frozenset[str] | None = frozenset()
    is_explicit: bool = False
    magnitudes: bool = False
    alpha: float | None = None
    alphas: Mapping[str, float] | None = MappingProxyType({})
    is_rank_stabilised: bool = False
    is_transposed: bool = False
    tokens: tuple[int, ...] = ()
    version: tuple[int, ...] = ()

    def scale_of(self, module: str, rank: int) -> float | None:
        """What the product of the factors is multiplied by; None where the configuration does not say it plainly.

        Source: peft 0.21 tuners.lora.layer.LoraLayer.update_layer
        """
        if self.alphas is None or self.alpha is None or rank < 1:
            return None
        alpha = next((self.alphas[end] for end in endings(module) if end in self.alphas), self.alpha)
        return alpha / (rank**0.5 if self.is_rank_stabilised else rank)

    def exclusion_of(self, target: str) -> Literal["", "perhaps", "all"]:
        """Which of the modules that a name in `target_modules` means get no factors.

        Source: peft 0.21 tuners.tuners_utils.check_target_module_exists
        """
        if self.excluded is None:
            return "perhaps"
        if not self.excluded.isdisjoint(endings(target)):
            return "all"
        return "perhaps" if any(name.endswith(f".{target}") for name in self.excluded) else ""

    def ranks_of(self, module: str) -> set[int]:
        """The ranks that a module may have: one, or several where a regular expression decides."""
        named = next((self.ranks[end] for end in endings(module) if end in self.ranks), self.rank)
        return {*self.perhaps, *([named] if named is not None else [])}

    def ranks_of_experts(self, module: str) -> set[int]:
        """The ranks of which a multiple is right, where a module's factors may serve many experts at once.

        The patterns for such a module name its parameters, so each of them may be meant.
        """
        names = set(endings(module))
        may_hold = bool(names & self.parameters) or ("" in self.parameters and not names.intersection(self.targets))
        return {*self.ranks.values(), *self.perhaps, *([self.rank] if self.rank else [])} if may_hold else set()


def read_adapter_config(values: Mapping[str, Any]) -> AdapterConfig:
    """The fields of an `adapter_config.json` that fix names and shapes of the factors."""
    targets, exclude = values.get("target_modules"), values.get("exclude_modules")
    kind, pattern = values.get("peft_type"), values.get("rank_pattern")
    layers, tokens = values.get("layers_to_transform"), values.get("trainable_token_indices")
    patterns = [
        (plain_text(name), rank)
        for name, value in (pattern.items() if isinstance(pattern, dict) else ())
        if (rank := _rank(value)) is not None
    ]
    return AdapterConfig(
        kind=kind.upper() if isinstance(kind, str) else "",
        task=str(values.get("task_type") or ""),
        rank=_rank(values.get("r")),
        ranks={name: rank for name, rank in reversed(patterns) if name is not None},  # the first one decides
        perhaps=frozenset(rank for name, rank in patterns if name is None),
        targets=_names(targets) if not isinstance(targets, list) or len(_names(targets)) == len(targets) else (),
        parameters=frozenset(name.rpartition(".")[0] for name in _names(values.get("target_parameters"))),
        saved=tuple(name for name in _names(values.get("modules_to_save"))[:_SAVED] if _LITERAL.fullmatch(name)),
        excluded=None if isinstance(exclude, str) and exclude else frozenset(_names(exclude)),
        is_explicit=bool(exclude) or layers not in (None, []) or (isinstance(targets, str) and targets != "all-linear"),
        magnitudes=values.get("use_dora") is True,
        alpha=_number(values.get("lora_alpha")),
        alphas=_alphas(values.get("alpha_pattern")),
        is_rank_stabilised=values.get("use_rslora") is True,
        is_transposed=values.get("fan_in_fan_out") is True,
        tokens=tuple(token for token in tokens if isinstance(token, int)) if isinstance(tokens, list) else (),
        version=tuple(map(int, re.findall(r"\d{1,9}", str(values.get("peft_version") or ""))[:3])),
    )


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _alphas(pattern: Any) -> dict[str, float] | None:
    items = pattern.items() if isinstance(pattern, dict) else ()
    pairs = [(plain_text(name), _number(value)) for name, value in items]
    alphas = {name: alpha for name, alpha in reversed(pairs) if name is not None and alpha is not None}
    return None if any(None in pair for pair in pairs) else alphas


def _rank(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31 else None


def _names(value: Any) -> tuple[str, ...]:
    return tuple(name for name in value if isinstance(name, str) and name) if isinstance(value, list) else ()
