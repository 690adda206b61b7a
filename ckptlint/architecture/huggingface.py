"""What a config.json of transformers says every tensor of its model must be."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from ckptlint.architecture.expected import BadValue, Expected, NoTable, UnknownModel
from ckptlint.architecture.expressions import ExpressionError, parse_expression, whole
from ckptlint.architecture.tables import MOST_KEYS, expand, picked, rows_of
from ckptlint.model.text import printable
from ckptlint.vocabulary.schemes import schemes
from ckptlint.vocabulary.strict_toml import own_file

_LONGEST_TEXT = 10_000
_LONGEST_LIST = 20_000
_COUNTED = frozenset(
    ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "n_embd", "n_head", "n_layer")
)
_NO_FRACTION = _COUNTED | {"num_key_value_heads", "vocab_size"}
"""Of which null may stand for as many key-value heads as heads, or, in a model without its embedding, for no words."""

_KINDS: Mapping[str, tuple[type, ...]] = {
    "int": (int,),
    "flag": (bool,),
    "number": (int, float),
    "text": (str,),
    "list": (list, tuple, str),
    "mapping": (dict,),
    "any": (bool, int, float, str, list, tuple),
}


def expected_models(
    config: Mapping[str, object], source: str = "config.json", at_most: int = MOST_KEYS
) -> tuple[Expected, ...]:
    """The model that a configuration declares, once for each naming that its writers use.

    Returns:
        `saved`: as save_pretrained writes it. `in memory`: as state_dict names it, where that differs (fused experts of
        transformers 5); DCP saves of a training job hold these.

    Args:
        config: a parsed config.json, untrusted; source: its name in a report.
        at_most: tensors; a configuration that implies more is refused before any work.

    Raises:
        NoTable: nothing is known of the model, or the configuration describes none; the reason in one sentence.

    Source: transformers; the version is in `Expected.made_with`.
    """
    model_type = _text(config.get("model_type"))
    if not model_type:
        raise NoTable(f"{source} has no model_type")
    table = model_table(model_type)
    if table is None:
        raise UnknownModel(f"no table for model_type {printable(model_type)}")
    name = _class_of(config, table, model_type)
    if reason := _renamed_by(config):
        raise NoTable(f"{source} declares {reason}, which renames or reshapes tensors")
    try:
        values = _values(config, table, name)
        mounted = _mounted(config, table, values)
        rows = rows_of(table["rows"])
        forms = []
        for form, numbers in table["models"][name].items():
            prefixes = table.get("mounts", {}).get(name, {}).get(form, {})
            if unknown := [section for section in mounted if section not in prefixes]:
                raise NoTable(f"its {unknown[0]} is another model")
            elsewhere = tuple(prefixes[section] for section in mounted)
            unmounted = (row for row in picked(rows, numbers) if not row.name.startswith(elsewhere))
            tensors = expand(unmounted, table["ranges"], values, at_most)
            for section, (inner, inner_values) in mounted.items():
                base = inner["models"][inner["base"]]
                inner_rows = picked(rows_of(inner["rows"]), base.get(form, base["saved"]))
                inside = expand(inner_rows, inner["ranges"], inner_values, at_most - len(tensors))
                tensors |= {prefixes[section] + key: tensor for key, tensor in inside.items()}
            forms.append(
                Expected(
                    source=source,
                    model_type=model_type,
                    form=form,
                    tensors=tensors,
                    fields=values,
                    dtype=_dtype(config),
                    made_with=table["made_with"],
                    model_class=name,
                    ignored=tuple(table.get("ignored", ())),
                    remote_code="auto_map" in config,
                    prefixes=frozenset(table.get("prefixes", ())),
                    float32=tuple(table.get("float32", ())),
                )
            )
    except NoTable as error:
        raise type(error)(f"{source} of model_type {model_type}: {error}") from None
    except ExpressionError as error:
        raise NoTable(f"{source} of model_type {model_type} describes no model: {error}") from None
    return tuple(forms)


@lru_cache(maxsize=8)
def model_table(model_type: str) -> Mapping[str, Any] | None:
    """The table of a model type, as `bench/tables` writes it; None where there is none.

    Its keys: the `usual` class; `fields` with their kinds and defaults; `ranges` of indices; `rows`; `models`, class ->
    form -> numbers of rows; `made_with`; `prefixes` that its loader takes off names or puts before them; `float32`, the
    ends of names of tensors that its classes keep in float32.

    Raises:
        OwnFileError: it is broken.
    """
    if not re.fullmatch(r"\w[\w.-]*", model_type, re.ASCII):
        return None
    path = Path(__file__).parent / "tables" / f"{model_type}.json"
    return own_file(path, _parsed) if path.exists() else None


def _parsed(text: str) -> Any:
    table = json.loads(text)
    kept = table.get("float32", [])
    if not isinstance(kept, list) or not all(isinstance(word, str) and word for word in kept):
        raise ValueError("float32 is no list of words")
    return table


def is_known_model(config: Mapping[str, object]) -> bool:
    """Whether the type and the class of a configuration are known, and so what it counts.

    Raises:
        OwnFileError: the file of classes is broken.
    """
    kind, named = _text(config.get("model_type")), config.get("architectures")
    table = model_table(kind)
    classes = table["models"] if table is not None else _toml("classes.toml").get(kind, ())  # of bench/tables
    return bool(classes) and (not named or (isinstance(named, list) and _text(named[0]) in classes))


@cache
def _toml(name: str) -> Mapping[str, list[Any]]:
    """A file beside this module: model type -> its classes, or its ids."""
    return own_file(Path(__file__).with_name(name), tomllib.loads)


def _mounted(
    config: Mapping[str, object], table: Mapping[str, Any], values: dict[str, object]
) -> dict[str, tuple[Mapping[str, Any], dict[str, object]]]:
    """The sections whose model is of another type than in the table: section -> the table and the values of that type.

    Their values replace those of the section in `values`.
    """
    mounted = {}
    for section, usual in table.get("sections", {}).items():
        declared = next(_at(config, section), None)
        model_type = declared.get("model_type", usual) if isinstance(declared, dict) else usual
        if model_type == usual:
            continue
        inner = model_table(_text(model_type)) if model_type in table.get("others", {}).get(section, ()) else None
        if inner is None:
            raise NoTable(f"no table with a {section} of model_type {printable(_text(model_type))}")
        given = _values(declared, inner, inner["base"])  # type: ignore[arg-type]  # no other value has a model_type
        values.update({f"{section}.{name}": value for name, value in given.items()})
        mounted[section] = (inner, given)
    return mounted


def _class_of(config: Mapping[str, object], table: Mapping[str, Any], model_type: str) -> str:
    """The class that `architectures` names first, the usual one of the type where there is none."""
    named = config.get("architectures")
    if not named:
        return str(table["usual"])
    name = _text(named[0]) if isinstance(named, list) else ""
    if name not in table["models"]:
        raise UnknownModel(f"no table for {printable(name) or 'these architectures'} of model_type {model_type}")
    return name


def default_ids(model_type: str) -> frozenset[int]:
    """The special token ids of a model type that nobody set."""
    return frozenset(_toml("default_ids.toml").get(model_type, ()))


def declared_quantisation(config: Mapping[str, object]) -> object:
    """What a configuration says of the quantisation of its weights, under either name of the field."""
    return config.get("quantization_config") or config.get("compression_config")


def _renamed_by(config: Mapping[str, object]) -> str:
    """The quantisation whose names nobody knows here; "" for none."""
    declared = declared_quantisation(config)
    if not declared:
        return ""
    method = _text(declared.get("quant_method")) if isinstance(declared, dict) else ""
    known = {wanted["quant_method"] for scheme in schemes() for wanted in scheme.declared}
    return "" if method in known else f"quantisation {printable(method) or 'of an unknown method'}"


def _dtype(config: Mapping[str, object]) -> str | None:
    text = config.get("text_config")
    sections = (config, text if isinstance(text, dict) else {})
    names = (_text(section.get(field)) for section in sections for field in ("dtype", "torch_dtype"))
    return next((printable(name.removeprefix("torch.")) for name in names if name), None)


def _text(value: object) -> str:
    return value if isinstance(value, str) and len(value) <= 200 else ""


def _values(config: Mapping[str, object], table: Mapping[str, Any], model_class: str) -> dict[str, object]:
    """The value of every field that the table asks for: as declared, or what the library takes where it is left out."""
    values: dict[str, object] = {}
    section = table.get("flat", "")
    flat = f"{section}." if section and section not in config else ""
    for name, (kind, *defaults) in table["fields"].items():
        paths = (name, *table.get("aliases", {}).get(name, ()))
        declared = [value for path in paths for value in _at(config, path)]
        if flat and not declared:
            declared = [value for path in paths if path.startswith(flat) for value in _at(config, path[len(flat) :])]
        value = declared[0] if declared else None
        if value == "auto" and kind == "int" and isinstance(next(iter(defaults), None), dict):
            declared, value = [], None  # mamba's word for the default
        if value is not None and not _is_kind(value, kind):
            is_wrong = kind == "int" and _stops_the_library(name, value, defaults)
            raise (BadValue if is_wrong else NoTable)(f"{name} is {printable(repr(value)[:60])}, which is no {kind}")
        if declared and value is None and kind == "int" and _stops_the_library(name, value, defaults):
            raise BadValue(f"{name} is null, which is no size")
        if not declared and not defaults:
            raise NoTable(f"it does not give {name}")
        if value is None and defaults and (not declared or len(defaults) > 1):
            value = _default(defaults[-1 if declared else 0], values)
        if name in table.get("spelled", ()) and isinstance(value, (list, str)):
            spelled = table["spelled"][name]
            value = [spelled.get(word, word) if isinstance(word, str) else word for word in value]
        known = table.get("words", {}).get(name)
        if known and isinstance(value, list) and not all(word in known for word in value):
            raise NoTable(f"{name} holds a word other than {', '.join(known)}")
        values[name] = value
    for name, only in table.get("only", {}).get(model_class, {}).items():
        given = next(_at(config, name.removeprefix("len(").removesuffix(")")), None)
        if name.startswith("len(") and isinstance(given, (list, str)):
            given = len(given)
        if given not in (only, None):
            raise NoTable(f"{name} is not {printable(repr(only)[:60])}, with which the table was made")
    if "tied_by" in table and next(_at(config, table["tied_by"]), None) is True:
        values["tie_word_embeddings"] = True
    return values


def _stops_the_library(name: str, value: object, defaults: Sequence[object]) -> bool:
    """Whether no model is built from a field that holds this instead of a size, in any version of the library."""
    if isinstance(value, str) or (isinstance(value, float) and abs(value) > 2**31):
        return True
    last = name.rpartition(".")[2]
    if value is None:
        return last in _COUNTED and len(defaults) == 1 and isinstance(defaults[0], int)
    is_own_size = len(defaults) > 1 or isinstance(next(iter(defaults), None), int)  # else what the class overwrites
    return last in _NO_FRACTION and is_own_size and isinstance(value, (float, list, dict))


def _at(config: Mapping[str, object], path: str) -> Iterator[object]:
    """What a configuration holds under a path of sections, if anything."""
    value: object = config
    for section in path.split("."):
        if not isinstance(value, dict) or section not in value:
            return
        value = value[section]
    yield value


def _is_kind(value: object, kind: str) -> bool:
    if isinstance(value, bool) and kind not in ("flag", "any"):
        return False
    longest = _LONGEST_TEXT if isinstance(value, str) else _LONGEST_LIST
    is_short = not isinstance(value, (str, list, dict)) or len(value) <= longest
    return is_short and isinstance(value, _KINDS[kind])


def _default(default: object, values: Mapping[str, object]) -> object:
    """A default as the table gives it: a value, `{"=": expression}`, or a list `{"each": count, "=": expression}`."""
    if not isinstance(default, dict) or "=" not in default:
        return default
    rule = parse_expression(default["="])
    if "each" not in default:
        return rule.value(values)
    count = whole(parse_expression(default["each"]), values)
    if count > _LONGEST_LIST:
        raise NoTable(f"{default['each']} is {count:,}")
    return [rule.value({**values, "layer": layer}) for layer in range(count)]
