"""What a model type of transformers stores, traced; `prove.py` writes it to ckptlint/architecture/tables/TYPE.json.

The sizes of a table are read from what the constructors of transformers compute (see `tags`). Which fields matter, and
how, is tried: each field that a constructor reads is varied alone, then all together. When a tensor exists is said
over the fields whose change adds or removes keys. A field that no condition explains, or that builds with one value
alone, is pinned: the table speaks of models with that value only.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import tags
import torch
import transformers
from rows import Domain, NotTraced, cost, names_in, rows_of, value_of
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto import modeling_auto as auto

from ckptlint.architecture.expressions import ExpressionError

Flat = dict[str, Any]
Form = dict[str, tuple[tuple[int, ...], str]]
"""Key -> shape, and "" or `tied` or `buffer`."""

_TRAINED = frozenset({"e_score_correction_bias", "expert_bias"})  # buffers that a router learns: needed as weights are

DRAWS, PROOFS, MOST_KEYS = 24, 20, 20_000

GIVEN: dict[str, Flat] = {
    "dots1": {"n_routed_experts": 3, "n_shared_experts": 3},
    "hunyuan_v1_dense": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "ministral": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
    "dbrx": {"attn_config.rope_theta": 10000.0},
    "esm": {"vocab_size": 33},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "autoformer": {"prediction_length": 4},
    "informer": {"prediction_length": 4},
    "time_series_transformer": {"prediction_length": 4},
}
"""Fields without which the class of a type cannot build its own default."""

VALUES: dict[str, list[Any]] = {"pos_att_type": [["c2p"], ["p2c"], ["c2p", "p2c"]], "conv_groups": [2, 4]}
"""Field -> values that constructors look for without comparing them."""

PRIVATE = {"_remove_final_layer_norm", "_sliding_window_pattern", "_label_trainable_num_channels"}
"""Fields of a config.json whose names begin as those of attributes do."""

_COUNT = re.compile(
    r"(layers?|blocks?|experts|depth|depths|groups|repeats)$|^num_.*(layers|blocks|experts)|^n_layers?$"
)
_NEVER = re.compile(
    r"(^|\.)(_name_or_path|_frame_rate|_pad_token_id|.*token_ids?|.*token_index|dtype|torch_dtype|transformers_version|architectures|label2id|model_type|"
    r"attn_implementation|experts_implementation|name_or_path|return_dict|output_(attentions|hidden_states|router_logits)|problem_type|is_decoder|quantization_config)$"
)


def flat(nested: dict[str, Any], prefix: str = "") -> Flat:
    """Sections taken apart; other mappings stay whole."""
    found: Flat = {}
    for name, value in nested.items():
        if isinstance(value, dict) and value and (name.endswith("config") or "model_type" in value):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found


def nested(config: Flat) -> dict[str, Any]:
    """The opposite of `flat`."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        *sections, last = name.split(".")
        part = found
        for section in sections:
            part = part.setdefault(section, {})
        part[last] = value
    return found


# ---------------------------------------------------------------- building


@dataclass
class Build:
    """A model that was built.

    Attributes:
        declared: what the configuration gave.
        env: every field of the configuration with its value.
        forms: its tensors, `saved`, `in memory` and `saved by older versions` where these differ.
        log: what its constructor computed.
    """

    declared: Flat
    env: Flat
    forms: dict[str, Form]
    log: tags.Log
    ignored: tuple[str, ...] = ()

    def texts(self, value: int) -> Iterable[str]:
        """The expressions that give a value, of fields that the constructor read where there are such."""
        every = self.log.texts.get(value, ())
        return [text for text in every if self.log.read.issuperset(names_in(text))] or every


def quiet() -> None:
    """No messages, no initial values, and configurations that say what is read of them."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(60)
    for name in [n for n in vars(torch.nn.init) if n.endswith("_") and not n.startswith("_")]:
        setattr(torch.nn.init, name, lambda tensor, *args, **kwargs: tensor)
    transformers.PretrainedConfig.__repr__ = lambda self: ""
    plain = transformers.PretrainedConfig.__getattribute__

    def noted(self: Any, name: str) -> Any:
        if (name.startswith("_") and name not in PRIVATE) or (
            path := plain(self, "__dict__").get("_path_of_section")
        ) is None:
            return plain(self, name)
        name_of = path + plain(self, "attribute_map").get(name, name)
        try:
            value = plain(self, name)
        except AttributeError:
            tags.LOG.asked.add(name_of)
            raise
        tags.LOG.read.add(name_of)
        return value

    transformers.PretrainedConfig.__getattribute__ = noted


@cache
def _keep_tags(_modules: int) -> None:
    """Lets `int` keep what a number knows in every module of a model."""
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.models.") and "int" not in vars(module):
            vars(module)["int"] = tags.Whole


def config_of(model_type: str, values: Flat) -> Any:
    """The configuration that a config.json with these values gives."""
    return transformers.CONFIG_MAPPING[model_type].from_dict(nested(values) | {"model_type": model_type})


def _tag(config: Any, prefix: str = "") -> None:
    for name, value in list(vars(config).items()):
        if isinstance(value, transformers.PretrainedConfig):
            _tag(value, f"{prefix}{name}.")
        elif not name.startswith("_") or name in PRIVATE:
            if isinstance(value, dict):
                tags.made(len(value), f"len({prefix}{name})")
            vars(config)[name] = tags.tagged(value, prefix + name)
    vars(config)["_path_of_section"] = prefix


def build(model_type: str, name: str, declared: Flat, light: bool = False) -> Build:
    """The model of a configuration, with the names and shapes of its tensors.

    Args:
        light: the form in memory alone, in a fraction of the time.

    Raises:
        Exception: the library refuses the values, in a hundred ways.
    """
    log = tags.fresh()
    env = flat(config_of(model_type, declared).to_dict())
    given = {key: tags.tagged(value, key) for key, value in declared.items()}
    kind = getattr(transformers, name)
    _keep_tags(len(sys.modules))
    config = config_of(model_type, given)
    _tag(config)
    with suppress(Exception):
        config.validate()  # says which field must divide which
    log.read.clear()
    with torch.device("meta"):
        model = kind._from_config(config)
    if len(model.state_dict()) > MOST_KEYS:
        raise ValueError("too many tensors")
    env |= {key: declared[key] for key in declared if key not in env}
    for key in log.asked - env.keys():
        env[key] = None
    vars(model)["_ckptlint_tagged"] = True
    return Build(declared, env, in_memory(model) if light else forms(model), log, ignored_by(model))


def ignored_by(model: Any) -> tuple[str, ...]:
    return tuple(sorted(model._keys_to_ignore_on_load_unexpected or ()))


def in_memory(model: Any) -> dict[str, Form]:
    tied = model.all_tied_weights_keys
    return {"in memory": {k: (tuple(v.shape), "tied" if k in tied else "") for k, v in model.state_dict().items()}}


def forms(model: Any) -> dict[str, Form]:
    """The tensors of a model under the names of its state_dict and of save_pretrained; one form where they agree."""
    state = dict(model.state_dict())
    tied = set(model.all_tied_weights_keys)
    skipped = [re.compile(pattern) for pattern in model._keys_to_ignore_on_save or ()]
    buffers = {name for name, _ in model.named_buffers() if name.rpartition(".")[2] not in _TRAINED}
    weights = {k: v for k, v in state.items() if k not in buffers}
    untied = {k: v for k, v in state.items() if k not in tied and not any(p.search(k) for p in skipped)}
    all_saved = _saved(model, state)
    weights_saved = all_saved if len(weights) == len(state) else _saved(model, weights)
    untied_saved = all_saved if len(untied) == len(state) else _saved(model, untied)

    def why(key: str, weights: Any, untied: Any) -> str:
        return "buffer" if key not in weights else "" if key in untied else "tied"

    saved = {k: (tuple(v.shape), why(k, weights_saved, untied_saved)) for k, v in all_saved.items()}
    memory = {k: (tuple(v.shape), why(k, weights, untied)) for k, v in state.items()}
    found = {"saved": saved} | ({"in memory": memory} if memory != saved else {})
    if type(model).__name__.endswith("ForConditionalGeneration") and (renamed := _older_names(model, all_saved)):
        found["saved by older versions"] = {renamed[key]: value for key, value in saved.items()}
    return found


def _older_names(model: Any, saved: dict[str, Any]) -> dict[str, str]:
    """Key of save_pretrained -> the key that files of older versions hold; {} where they are the same.

    A model that was loaded from such a file is saved in its names again.
    """
    model._weight_conversions = get_model_conversion_mapping(model, add_legacy=False) or None
    before = list(_saved(model, dict(model.state_dict())))
    del model._weight_conversions
    renamed = dict(zip(saved, before, strict=True)) if len(before) == len(saved) else {}
    return renamed if set(before) != set(saved) and len(set(before)) == len(before) else {}


def _saved(model: Any, state: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in revert_weight_conversion(model, state).items() if hasattr(v, "shape")}


# ---------------------------------------------------------------- what matters


@dataclass
class Study:
    """What is known of a class: which fields matter and which values they take.

    Attributes:
        base: a small configuration that builds.
        sizes: fields that change shapes alone.
        counts: fields that change how many modules there are.
        words: other fields that change keys, or shapes other than by their value -> the values that build.
        lists: lists of an item per layer -> the field that their length follows, "" for free lists of layers.
        pinned: field -> the value with which the table speaks.
        above: size -> the fields that divide it.
        twins: field -> the sizes that a constructor compares it with.
        affects: field -> the patterns of the keys that its change adds or removes.
        tried: the fields that were varied.
        stuck: those that build with one value alone, and texts that were looked up and never compared.
    """

    model_type: str
    name: str
    base: Build
    sizes: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    words: dict[str, list[Any]] = field(default_factory=dict)
    lists: dict[str, str] = field(default_factory=dict)
    pinned: Flat = field(default_factory=dict)
    above: dict[str, set[str]] = field(default_factory=dict)
    twins: dict[str, set[str]] = field(default_factory=dict)
    affects: dict[str, set[str]] = field(default_factory=dict)
    tried: set[str] = field(default_factory=set)
    stuck: set[str] = field(default_factory=set)

    def relevant(self) -> list[str]:
        return [*self.sizes, *self.counts, *self.words, *self.lists]


def defaults(model_type: str) -> Flat:
    return flat(transformers.CONFIG_MAPPING[model_type]().to_dict())


def first(model_type: str, name: str) -> Build:
    """A build with few layers and experts."""
    usual = defaults(model_type)
    counts = {n: v for n, v in usual.items() if type(v) is int and v > 3 and _COUNT.search(n.rpartition(".")[2])}
    depths = {
        n: [min(i, 2) for i in v]
        for n, v in usual.items()
        if isinstance(v, list) and v and all(type(i) is int for i in v) and _COUNT.search(n.rpartition(".")[2])
    }
    ids = {n: 1 for n, v in usual.items() if type(v) is int and v > 200 and n.endswith(("token_id", "padding_idx"))}
    sections = {n: v for n, v in usual.items() if n.endswith(".model_type")} | GIVEN.get(model_type, {})
    last: Exception | None = None
    for small in (counts, {n: v for n, v in counts.items() if "group" not in n}, {}):
        for most in (3, 4, 6, 8):
            for more in ({**depths, **ids}, ids, {}):
                try:
                    return build(model_type, name, {n: min(v, most) for n, v in small.items()} | sections | more)
                except Exception as error:
                    last = error
    raise NotTraced(f"it does not build: {type(last).__name__}: {str(last)[:150]}")


def _declared_as(model_type: str, name: str) -> str:
    """The type that the class of a configuration declares for a field; "" for none."""
    part: Any = config_of(model_type, {})
    *sections, last = name.split(".")
    for section in sections:
        part = getattr(part, section, None)
    return next(
        (
            str(kind.__annotations__[last])
            for kind in type(part).__mro__
            if last in vars(kind).get("__annotations__", ())
        ),
        "",
    )


def others(name: str, value: Any, log: tags.Log, kind: str) -> Iterator[Any]:
    """Other values of a field that could change the tensors.

    Args:
        kind: what it is declared as.
    """
    against = log.compared.get(name, set())
    yield from VALUES.get(name.rpartition(".")[2], ())
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        near = [c for c in against if type(c) is int and c != value and c >= 0]
        yield from dict.fromkeys([value + 1, value * 2, value + 2, value * 3, value - 1, value // 2, *sorted(near)[:3]])
        yield None
    elif isinstance(value, float):
        yield from (value + 1.0, value * 2, value / 2, 0.0)
    elif isinstance(value, str):
        yield from sorted(word for word in against if isinstance(word, str) and word != value)
    elif isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        words = {w for k, ws in log.compared.items() if k.startswith(f"{name}[") for w in ws if isinstance(w, str)}
        words |= {*transformers.configuration_utils.ALLOWED_LAYER_TYPES} if name.endswith(("types", "type")) else set()
        every = sorted({*words, *value})
        yield from (v for word in every for v in ([word] * len(value), [word, *value[1:]]) if v != value)
    elif isinstance(value, list) and value and all(type(item) is int for item in value):
        yield from (value[:-1], value[:1], [item * 2 for item in value], [item + 1 for item in value])
        yield from ([max(1, item - 1) for item in value], [0], [1], [0, 1])
    elif isinstance(value, list) and value and all(isinstance(item, bool) for item in value):
        yield from ([not item for item in value], [not value[0], *value[1:]], [*value[:-1], not value[-1]])
    elif value is None or value == []:
        is_flag = "bool" in kind or "tie_" in name
        if ("list" in kind or value == [] or not kind) and not is_flag:
            yield from ([0], [1], [0, 1])
        if value is None and ("int" in kind or not kind) and not is_flag:
            yield from (24, 32)
        if value is None and (is_flag or not kind):
            yield True


def study(model_type: str, name: str, known: Study | None = None, passes: int = 5) -> Study:
    """Varies each field that the constructor reads alone, first from a small configuration, then from drawn ones that
    show the most new kinds of tensors: one field may hide another.

    Args:
        known: of another class of the type; only fields that it did not read are varied.
    """
    base = first(model_type, name)
    found = replace(deepcopy(known), name=name, base=base, pinned={}) if known else Study(model_type, name, base)
    small, seen, new = found.base, set[str](), set[str]()
    for turn in range(1 if known else passes):
        if turn:
            rng = random.Random(turn)
            tries = [b for b in (_tried(found, draw(found, rng)) for _ in range(10)) if b]
            if not tries:
                break
            found.base = max(tries, key=lambda b: (len(_kinds(b) - seen), len(_kinds(b))))
            new = _kinds(found.base) - seen
            seen |= new
        before = len(found.relevant())
        _vary(found, found.tried if known else ())
        if turn > 1 and not new and len(found.relevant()) == before:
            break
    found.base = small
    return found


def _tried(found: Study, values: Flat) -> Build | None:
    with suppress(Exception):
        return build(found.model_type, found.name, values, light=True)
    return None


def _vary(found: Study, known: Iterable[str]) -> None:
    base = found.base
    shapes = _shapes(build(found.model_type, found.name, base.declared, light=True))
    tried = {n: v for n, v in base.env.items() if n in base.log.read | base.log.asked}
    tried |= {n: v for n, v in base.env.items() if n.endswith(("id2label", "tie_word_embeddings"))}
    for name, value in tried.items():
        if name.endswith("id2label") and "Classification" in found.name:
            found.words[name] = []
        if _NEVER.search(name) or name.endswith("id2label") or name in known or name in found.relevant():
            continue
        found.tried.add(name)
        _try(found, name, value, shapes)
    for name in [n for n in found.sizes if n not in found.words and type(base.env.get(n)) is int]:
        value = base.env[name]  # what was a size alone may count something in this configuration
        other = _tried(found, base.declared | {name: value // 2}) or _tried(found, base.declared | {name: 2 * value})
        if other and _kinds(other) == _kinds(base) and (differ := _shapes(other).keys() ^ shapes.keys()):
            found.counts[name] = found.sizes.pop(name)
            found.affects[name] = {re.sub(r"\d+", "N", key) for key in differ}
    for name, against in base.log.compared.items():
        if same := {other for other in against if isinstance(other, str)} & found.sizes.keys():
            found.twins.setdefault(name, set()).update(same - {name})
    for above, below in base.log.divided:
        known, divisors = (
            [n for n in names_in(t) if n in base.env and type(base.env[n]) in kinds]
            for t, kinds in ((above, (int, list)), (below, (int,)))
        )
        if known and divisors:
            found.above.setdefault(known[0], set()).update(n for n in divisors if n != known[0])


def _kinds(one: Build) -> set[str]:
    return {re.sub(r"\d+", "N", key) for key in _shapes(one)}


def _shapes(one: Build) -> Form:
    return one.forms.get("in memory") or one.forms["saved"]


def _try(found: Study, name: str, value: Any, shapes: Form) -> None:
    works: list[Any] = []
    effects: list[Form] = []
    keys, sizes, failed = False, False, False
    touched: set[str] = set()
    for other in others(name, value, found.base.log, _declared_as(found.model_type, name)):
        if (other is None and value is None) or (other is True and value is None and works):
            continue
        try:
            seen = _shapes(build(found.model_type, found.name, found.base.declared | {name: other}, light=True))
        except Exception:
            failed = True
            continue
        differ = seen.keys() ^ shapes.keys() | {k for k in seen.keys() & shapes.keys() if seen[k][1] != shapes[k][1]}
        touched |= differ
        moved = any(seen[key] != shapes[key] for key in seen.keys() & shapes.keys())
        keys |= bool(differ)
        sizes |= moved
        if other is None and not differ:
            continue  # stands for another value: see `default_of`
        works.append(other)
        effects.append(seen)
        if not keys and not sizes and len(works) > 1:
            return
    looked_up = name in found.base.log.keys and isinstance(value, str) and not works and "act" not in name
    if (failed and not works and value is not None) or looked_up:
        found.stuck.add(name)
    if not keys and not sizes:
        return
    found.stuck.discard(name)
    usual = found.base.env.get(name)
    is_int = type(usual) is int
    if keys:
        found.affects[name] = {re.sub(r"\d+", "N", key) for key in touched}
    ints = [v for v in works if type(v) is int]
    if is_int and (_COUNT.search(name.rpartition(".")[2]) or (keys and _is_count(ints, usual, found, name, shapes))):
        found.counts[name] = usual
    elif (
        usual is None
        and len(works) > 1
        and all(e == effects[0] for e in effects)
        and not any(isinstance(v, list) for v in works)
    ):
        found.words[name] = [None, False, True]
    elif (
        ints
        and (is_int or (usual is None and not any(isinstance(v, list) for v in works)))
        and ((is_int and not keys) or usual is None or None in works)
    ):
        found.sizes[name] = usual or ints[0]
        if usual is None or None in works:
            found.words[name] = [None, *ints]
    elif isinstance(usual, list) and usual and all(isinstance(item, str) for item in usual):
        found.lists[name] = _follows(found, name, usual)
        found.words[name] = _balanced(usual, [v[0] for v in works], effects)
    elif (usual is None or isinstance(usual, list)) and keys and all(v in ([0], [1], [0, 1]) for v in works):
        found.lists[name] = ""
        found.words[name] = [*([[]] if usual == [] else [None]), [0], [1], [0, 1], [0, 2], [1, 2]]
    elif works:
        found.words[name] = [usual, *works] if usual not in works else works


def _balanced(usual: list[str], words: list[str], effects: list[Form]) -> list[str]:
    """The words that the items of a list take, as often each as makes every effect equally likely."""
    of_word: dict[str, Form] = {}
    for word, effect in zip(words, effects, strict=True):
        of_word.setdefault(word, effect)
    alike: list[list[str]] = [[w for w in sorted({*usual}) if w not in words]]
    for effect in of_word.values():
        same = [w for w, e in of_word.items() if e == effect]
        alike += [same] if same not in alike else []
    most = max(map(len, alike))
    return [w for group in alike for w in (group * most)[:most]]


def _is_count(ints: list[int], usual: int, found: Study, name: str, shapes: Form) -> bool:
    """Whether a larger value gives more modules of the same kinds."""
    larger = [v for v in ints if v > usual]
    if not larger:
        return False
    seen = _shapes(build(found.model_type, found.name, found.base.declared | {name: larger[0]}, light=True))
    new = {re.sub(r"\d+", "N", key) for key in seen.keys() - shapes.keys()}
    return bool(new) and new <= {re.sub(r"\d+", "N", key) for key in shapes} and not shapes.keys() - seen.keys()


def _follows(found: Study, name: str, value: list[Any]) -> str:
    """The count that the length of a list follows; "" for none."""
    same = [n for n, v in found.base.env.items() if type(v) is int and v == len(value) and not _NEVER.search(n)]
    for count in sorted(same, key=lambda n: ("layer" not in n, n not in found.counts)):
        longer = {count: len(value) + 1, name: [*value, value[-1]]}
        if _COUNT.search(count.rpartition(".")[2]) and _tried(found, found.base.declared | longer):
            found.counts[count] = len(value)
            found.stuck.discard(count)
            return count
    return ""


def draw(found: Study, rng: random.Random, boldness: float = 1.0, like: Flat | None = None) -> Flat:
    """Values for all fields that matter, sizes unlike each other and unlike their defaults.

    Args:
        like: a configuration whose flags and words most of them share.
    """
    values = dict(found.base.declared)
    taken: set[int] = set()

    def size(name: str, chain: tuple[str, ...] = ()) -> int:
        if name in values and name in done:
            return int(values[name])
        usual = found.sizes.get(name) or found.counts.get(name) or 1
        if name in found.counts or name not in bold:
            values[name] = values.get(name, found.base.env.get(name, usual))
            done.add(name)
            return int(values[name] or 1)
        unit = math.lcm(
            1, *(size(n, (*chain, name)) for n in found.above.get(name, ()) if n not in chain and n != name)
        )
        even = min(usual & -usual, 2 if name in divisors else 8) if usual else 1
        unit = math.lcm(unit, even)
        least = (
            1 if name in divisors else 800 // unit + 1
        )  # a small number is one of many; what divides others is small
        for _ in range(50):
            value = 2 * unit * rng.randint(least, least + 20)
            if value not in taken and value != usual:
                break
        taken.add(value)
        values[name] = value
        done.add(name)
        return value

    done: set[str] = set()
    divisors = {n for below in found.above.values() for n in below}
    bold = {n for n in found.relevant() if rng.random() < boldness and n not in found.pinned}
    for name in found.counts:
        if name in bold:
            values[name] = rng.choice([2, 3, 4, 5, 6])
    for name in found.sizes:
        size(name)
    for name, options in found.words.items():
        if name.endswith("id2label"):
            values[name] = {str(i): f"LABEL_{i}" for i in range(rng.choice([1, 3, 5, 7, 11, 13]))}
        elif like and name not in found.lists and rng.random() < 0.8:
            values[name] = like.get(name)
            if name not in like:
                values.pop(name)
        elif name in bold and name not in found.lists and (name not in found.sizes or rng.random() < 0.3):
            equals = [values[n] for n in sorted(found.twins.get(name, ())) if n in values]
            options = equals if equals and rng.random() < 0.5 else options
            values[name] = None if name in found.sizes else rng.choice(options)
            if values[name] is None and found.base.env.get(name) is None:
                values.pop(name)
    for name, length in found.lists.items():
        if name in bold:
            count = values.get(length) or found.base.env.get(length) or rng.randint(3, 6)
            if length or not found.words[name] or isinstance(found.words[name][0], str):
                values[name] = [rng.choice(found.words[name]) for _ in range(count)]
            else:
                values[name] = rng.choice(found.words[name])
    for name, value in found.pinned.items():
        if value is not None and name in found.base.env:
            values[name] = value
        elif name not in found.base.declared:
            values.pop(name, None)
    return values


def drawn(found: Study, count: int, seed: int, stray: bool = False, likes: Sequence[Flat] = ()) -> list[Build]:
    """So many builds of configurations that vary all fields together.

    Args:
        likes: configurations that half of them resemble.
        stray: vary some of the fields too that had no effect alone.
    """
    rng = random.Random(seed)
    builds: list[Build] = []
    tries, last = 0, ""
    while len(builds) < count:
        tries += 1
        if tries > 12 * count:
            raise NotTraced(f"{len(builds)} of {count} drawn configurations build ({last})")
        boldness = (1.0, 1.0, 1.0, 0.8, 0.6, 0.4)[min(5, tries * 3 // (2 * count))] if tries > len(builds) * 2 else 1.0
        like = rng.choice(likes) if likes and rng.random() < 0.5 else None
        values = draw(found, rng, boldness, like)
        if stray and tries % 2:
            values |= _strays(found, rng)
        try:
            one = build(found.model_type, found.name, values)
            if all(0 not in shape for form in one.forms.values() for shape, _ in form.values()):
                builds.append(one)
        except Exception as error:
            last = f"{type(error).__name__}: {str(error)[:120]}"
    return builds


def _strays(found: Study, rng: random.Random) -> Flat:
    idle = sorted(found.tried - {*found.relevant()} - found.pinned.keys())
    values: Flat = {}
    for name in rng.sample(idle, min(5, len(idle))):
        value = found.base.env.get(name)
        options = list(others(name, value, found.base.log, _declared_as(found.model_type, name)))
        if options and options[0] is not None:
            values[name] = rng.choice(options)
    return values


# ---------------------------------------------------------------- the table


def defaults_of(found: Study, name: str, builds: Sequence[Build]) -> list[Any]:
    """The entry of a field: its kind, what stands for an absent one, and for null where that is replaced."""
    entry: list[Any] = [_kind([b.env.get(name) for b in builds] + found.words.get(name, []))]
    if name not in flat(config_of(found.model_type, found.base.declared).to_dict()):  # no class declares it
        return [*entry, None]
    for null in (False, True):
        values, common = [], None
        plain = {k: v for k, v in found.base.declared.items() if k.endswith("model_type")}
        for given in (*(one.declared for one in builds[:8]), found.base.declared, plain):
            declared = {k: v for k, v in given.items() if k != name} | ({name: None} if null else {})
            try:
                log = tags.fresh()
                env = flat(config_of(found.model_type, declared).to_dict())
                config = config_of(found.model_type, {k: tags.tagged(v, k) for k, v in declared.items()})
                _tag(config)
                value = env.get(name)
            except Exception:
                continue
            values.append((value, env | {n: v for n, v in declared.items() if n not in env}))
            if type(value) is int and given is not plain and given is not found.base.declared:
                texts = {t for t in log.texts.get(value, ()) if name not in names_in(t)}
                common = texts if common is None else common & texts
        if not values:
            if null:
                break
            return entry
        default = _default([v for v, _ in values], [e for _, e in values], common or set(), found, name)
        if default is None:
            if null:
                break
            return entry
        if not null or default != [None]:
            entry += default
    return entry


def _default(values: list[Any], envs: list[Flat], common: set[str], found: Study, name: str) -> list[Any] | None:
    if all(v == values[0] and type(v) is type(values[0]) for v in values):
        return [values[0]]
    if all(type(v) is int for v in values):
        usable = {t for t in common if all(_gives(t, env, value) for value, env in zip(values, envs, strict=True))}
        return [{"=": min(usable, key=cost)}] if usable else None
    asked = [n for n in (*found.counts, *found.words, *found.sizes) if n not in found.lists and n != name]
    if all(isinstance(v, bool) for v in values):
        flags = [n for n in asked if all(isinstance(e.get(n), (bool, str, type(None))) for e in envs)]
        domain = Domain(envs, flags, (), ())
        text = domain.condition(sum(1 << i for i, v in enumerate(values) if v))
        return [{"=": text}] if text else None
    if all(isinstance(v, list) and v for v in values):
        lengths = [len(v) for v in values]
        count = next((n for n in found.counts if [e.get(n) for e in envs] == lengths), None)
        items = sorted({item for v in values for item in v}, key=str)
        if count is None or len(items) > 3:
            return None
        domain = Domain(
            [e | {"layer": i} for e, v in zip(envs, values, strict=True) for i in range(len(v))], asked, ["layer"], ()
        )
        every = [item for v in values for item in v]
        text = _literal(items[-1])
        for item in items[:-1]:
            condition = domain.condition(sum(1 << i for i, v in enumerate(every) if v == item))
            if condition is None:
                return None
            text = f"{_literal(item)} if {condition} else {text}" if condition else _literal(item)
        return [{"each": count, "=": text}]
    return None


def _gives(text: str, env: Flat, value: Any) -> bool:
    try:
        return bool(value_of(text, env) == value)
    except ExpressionError:
        return False


def _literal(item: Any) -> str:
    if isinstance(item, bool):
        return str(item).lower()
    return str(item) if isinstance(item, int) else f"'{item}'"


def _kind(values: list[Any]) -> str:
    kinds = {type(v) for v in values if v is not None}
    if kinds <= {bool}:
        return "flag"
    for name, types in (
        ("int", {int}),
        ("number", {int, float}),
        ("text", {str}),
        ("list", {list}),
        ("mapping", {dict}),
    ):
        if kinds <= types:
            return name
    return "any"


def classes_of(model_type: str) -> list[str]:
    """The classes that the automatic ones of transformers choose for a type, the usual one first."""
    found: dict[str, None] = {}
    for mapping in _MAPPINGS:
        names = getattr(auto, f"{mapping}_NAMES", {}).get(model_type, ())
        found |= dict.fromkeys([names] if isinstance(names, str) else names)
    encoders = [name.removesuffix("Model") + "EncoderModel" for name in found if name.endswith("Model")]
    return [name for name in (*found, *encoders) if hasattr(transformers, name)]


_MAPPINGS = (
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_MASKED_LM_MAPPING",
    "MODEL_FOR_PRETRAINING_MAPPING",
    "MODEL_FOR_CTC_MAPPING",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
    "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING",
    "MODEL_FOR_OBJECT_DETECTION_MAPPING",
    "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING",
    "MODEL_MAPPING",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING",
    "MODEL_FOR_QUESTION_ANSWERING_MAPPING",
)


def table_of(
    model_type: str, prove: Callable[[dict[str, Any], str, list[Build], bool], None]
) -> tuple[dict[str, Any] | None, list[str]]:
    """The table of a type, and the classes that were left out with the reason."""
    table: dict[str, Any] = {"usual": "", "fields": {}, "ranges": {}, "rows": [], "models": {}, "made_with": ""}
    left = []
    names: dict[tuple[str, str, str], str] = {}
    known = None
    for name in classes_of(model_type):
        try:
            found = study(model_type, name, known)
            known = known or found
            table, names = with_class(found, table, dict(names), prove)
        except Exception as error:
            if os.environ.get("TRACE"):
                traceback.print_exc()
            left.append(
                f"{name}: {'' if isinstance(error, NotTraced) else type(error).__name__ + ': '}{str(error)[:200]}"
            )
    return table if table["models"] else None, left


def with_class(found: Study, table: dict[str, Any], names: dict[tuple[str, str, str], str], prove: Any) -> Any:
    """The table with one class more, which is proven."""
    count = DRAWS
    likes: list[Flat] = []
    for turn in range(6):
        builds = [found.base, *drawn(found, count, turn, likes=likes)]
        if more := _unvaried(found, builds):  # a branch that no configuration showed before asks for them
            found.sizes |= more
            builds = [found.base, *drawn(found, count, turn, likes=likes)]
        same = [
            n
            for n in (*found.relevant(), *found.stuck)
            if len({json.dumps(b.env.get(n)) for b in builds}) == 1
            and not n.endswith(("id2label", "tie_word_embeddings"))
        ]
        found.pinned |= {n: builds[0].env.get(n) for n in same}
        for n, value in found.base.env.items():
            if isinstance(value, list) and n in (*found.relevant(), *found.stuck) and n not in found.pinned:
                lengths = {len(b.env.get(n) or ()) for b in builds}
                found.pinned |= {f"len({n})": len(value)} if lengths == {len(value)} else {}
        try:
            new = _merged(found, builds, json.loads(json.dumps(table)), names)
            proofs = builds[:4] + drawn(found, PROOFS, 100 + turn, stray=True)
            prove(new, found.name, proofs, count >= 8 * DRAWS)
            return new, names
        except (NotTraced, ExpressionError) as error:
            if isinstance(error, ExpressionError):
                error = NotTraced(str(error))
            if os.environ.get("TRACE"):
                print(turn, count, error, error.keys[:5], file=sys.stderr)
            patterns = {re.sub(r"\{\w+\}|\d+", "N", key) for key in error.keys}
            likes += [
                b.declared for b in builds if patterns & {re.sub(r"\d+", "N", k) for f in b.forms.values() for k in f}
            ]
            if (error.rare or count == DRAWS) and count < (8 if error.rare else 4) * DRAWS:
                count *= 2
                continue
            guilty = [
                n
                for n, keys in found.affects.items()
                if keys & patterns
                and n not in found.counts
                and n not in found.pinned
                and not n.endswith("tie_word_embeddings")
            ]
            guilty = guilty or [n for n in found.relevant() if isinstance(found.base.env.get(n), list)]
            if turn == 5 or found.pinned.keys() >= {*guilty}:
                raise error from None
            found.pinned |= {n: found.base.env.get(n) for n in guilty}
    raise AssertionError


def _unvaried(found: Study, builds: list[Build]) -> dict[str, int]:
    """The fields that are the same in all builds and of which the size of a tensor may be made."""
    asked = {
        name
        for one in builds
        for form in one.forms.values()
        for shape, _ in form.values()
        for size in set(shape)
        if size > 2
        for text in one.texts(size)
        for name in names_in(text)
    }
    known = {*found.relevant(), *found.pinned}
    return {
        name: value
        for name, value in builds[0].env.items()
        if name in asked - known and type(value) is int and value > 2 and not _NEVER.search(name)
        if all(one.env.get(name) == value for one in builds)
    }


def _merged(found: Study, builds: list[Build], table: dict[str, Any], names: Any) -> dict[str, Any]:
    asked = [
        n
        for n in found.relevant()
        if n not in found.pinned and (n not in found.sizes or n in found.affects or n in found.words)
    ]
    affects = {n: keys for n, keys in found.affects.items() if n not in found.pinned}
    numbers = {json.dumps(row): i for i, row in enumerate(table["rows"])}
    entries = {}
    for form in sorted({form for b in builds for form in b.forms}, reverse=True):
        ranges, rows = rows_of(
            builds,
            form,
            names,
            asked,
            lambda p: {n for n, keys in affects.items() if p in keys},
            _guards(found, builds),
        )
        table["ranges"] |= ranges
        used = {n for text in (*ranges.values(), *(t for row in rows for t in row[1])) for n in names_in(text)}
        found.pinned |= {
            n: builds[0].env[n]
            for n in used & builds[0].env.keys()
            if len({str(b.env.get(n)) for b in builds}) == 1  # nothing varied it, so nothing shows that it is meant
        }
        entries[form] = _runs([numbers.setdefault(json.dumps(row), len(numbers)) for row in rows])
    table["rows"] = [json.loads(row) for row in numbers]
    table["models"][found.name] = entries
    table["usual"] = table["usual"] or found.name
    if found.pinned:
        table.setdefault("only", {})[found.name] = found.pinned
    texts = [*table["ranges"].values(), *(t for row in table["rows"] for t in (*row[1], *row[2:]) if t)]
    todo = {n for t in texts for n in names_in(t)} - table["ranges"].keys() - table["fields"].keys()
    fields = dict(table["fields"])
    while todo:
        for n in sorted(todo):
            fields[n] = defaults_of(found, n, builds)
        todo = {
            n
            for v in fields.values()
            for d in v[1:]
            if isinstance(d, dict) and "=" in d
            for t in d.values()
            for n in names_in(t)
            if n != "layer"
        } - fields.keys()
    table["fields"] = _in_order(fields)
    aliases = table.setdefault("aliases", {})
    config = config_of(found.model_type, builds[0].declared)
    for section in {f.rpartition(".")[0] for f in fields}:
        part = config
        for step in section.split(".") if section else ():
            part = getattr(part, step)
        prefix = f"{section}." if section else ""
        for alias, of in sorted(getattr(part, "attribute_map", {}).items()):
            if (
                prefix + of in fields
                and prefix + alias not in fields
                and prefix + alias not in aliases.get(prefix + of, ())
            ):
                aliases.setdefault(prefix + of, []).append(prefix + alias)
    if "tie_word_embeddings" in fields and is_tied_by_text(found.model_type):
        table["tied_by"] = "text_config.tie_word_embeddings"
    if any(n.startswith("text_config.") for n in fields) and is_flat(found.model_type):
        table["flat"] = "text_config"
    for n, length in found.lists.items():
        if n in fields and n not in found.pinned and any(isinstance(word, str) for word in found.words[n]):
            table.setdefault("spelled", {})[n] = spelled = _spelled(found, n, length)
            table.setdefault("words", {})[n] = sorted({*found.words[n], *spelled.values()} - spelled.keys())
    if builds[0].ignored:
        table["ignored"] = sorted({*table.get("ignored", ()), *builds[0].ignored})
    return table


_WORDS = ("mamba", "attention", "full_attention", "linear_attention", "moe", "mlp", "M", "E", "*", "-")
"""Words and letters for kinds of layers that configurations of different age use."""


def _spelled(found: Study, name: str, length: str) -> dict[str, str]:
    """The words of older configurations for kinds of layers -> those of today, as the class of the type reads them."""
    spelled = {}
    for word in dict.fromkeys([*found.words[name], *_WORDS]):
        values = found.base.declared | {name: [word] * int(found.base.env.get(length) or len(found.base.env[name]))}
        with suppress(Exception):
            read = {*flat(config_of(found.model_type, values).to_dict())[name]}
            if len(read) == 1 and read != {word}:
                spelled[word] = read.pop()
    return spelled


def is_tied_by_text(model_type: str) -> bool:
    """Whether a head is tied too where the section `text_config` alone says so."""
    with suppress(Exception):
        values = {"tie_word_embeddings": False, "text_config.tie_word_embeddings": True}
        return bool(config_of(model_type, values).tie_word_embeddings)
    return False


def is_flat(model_type: str) -> bool:
    """Whether a configuration without the section `text_config` gives its fields beside the other sections."""
    with suppress(Exception):
        given = config_of(model_type, {"hidden_size": 840, "num_hidden_layers": 3, "vocab_size": 777}).text_config
        return (given.hidden_size, given.num_hidden_layers, given.vocab_size) == (840, 3, 777)
    return False


def _guards(found: Study, builds: list[Build]) -> list[str]:
    """Comparisons of two expressions that a constructor made."""
    pairs = {(a, b) for build in builds for a, other in build.log.compared.items() for b in other if isinstance(b, str)}
    env = builds[0].env
    return sorted(
        {
            f"{a} == {b}"
            for a, b in pairs
            if "'" not in b and a != b and all(n in env for n in names_in(f"{a} {b}")) and names_in(b)
        }
    )[:40]


def _in_order(fields: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """The fields, each after those that its default asks for."""
    done: dict[str, list[Any]] = {}

    def visit(name: str, above: tuple[str, ...]) -> None:
        if name in done or name in above or name not in fields:
            return
        for default in fields[name][1:]:
            for text in default.values() if isinstance(default, dict) and "=" in default else ():
                for other in names_in(text):
                    visit(other, (*above, name))
        done[name] = fields[name]

    for name in sorted(fields, key=lambda f: (f.count("."), f)):
        visit(name, ())
    return done


def _runs(numbers: list[int]) -> str:
    """Numbers as `0-4 7`."""
    found: list[list[int]] = []
    for number in sorted(set(numbers)):
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return " ".join(str(a) if a == b else f"{a}-{b}" for a, b in found)
