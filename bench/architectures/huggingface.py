"""Makes ckptlint/architecture/huggingface.json: `python bench/architectures/huggingface.py [TYPE ...] [--parts]`.

For each model type and each of its usual classes: which fields of the configuration change a tensor, probes that vary
all of these together, expressions fitted to the shapes seen, and more configurations that the finished table must
predict exactly, through the same function that ckptlint uses. A class that it does not is left out and named. Then:
which other models the sections of a vision-language model may hold, and numbers for the tests.

With types it renews the lines of these alone, with `--parts` it fits nothing anew. Needs the extra `tables`.
"""

from __future__ import annotations

import inspect
import json
import math
import random
import re
import sys
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import transformers
from fit import Env, Samples
from probes import IRRELEVANT, Flat, Form, Kind, alternatives, flat, forms, in_memory, model, nested
from transformers.models.auto import modeling_auto as auto
from types_to_fit import ALL, KINDS, classes_of

from ckptlint.architecture import huggingface, tables
from ckptlint.architecture.expected import NoTable

OUT = Path(tables.__file__).parent / huggingface.FILE
COUNTS = Path(__file__).parents[2] / "tests" / "architecture" / "counts.json"
PROBES, MOST_PROBES, FEWEST, HELD_OUT, WORKERS = 18, 150, 4, 4, 6

Probe = tuple[Flat, Env, dict[str, Form]]
"""What was declared, the resolved configuration, and the tensors of the model."""


class NotFitted(Exception):  # noqa: N818  an answer, not an error
    """Raised where the search ends without a table."""


class TooFew(NotFitted):
    """Raised where more probes would tell."""


# ---------------------------------------------------------------- probes


def build(kind: Kind, name: str, values: Flat, tensors: Any = forms) -> Probe | None:
    """None where the library refuses the values."""
    try:
        values = kind.consistent(values)
        config = kind.config(values)
        env = flat(config.to_dict())
        built = model(name, config)
        found = tensors(built)
        if sum(map(len, found.values())) > 20_000:
            return None
        return values, env, found
    except Exception as error:
        LAST_ERROR[kind.model_type] = f"{type(error).__name__}: {str(error)[:150]}"
        return None


LAST_ERROR: dict[str, str] = {}


def first_probe(kind: Kind, name: str, seed: int = 0) -> Probe:
    for turn in range(60):
        if probe := build(kind, name, kind.draw(random.Random(seed + turn))):
            return probe
    raise NotFitted(f"no configuration builds ({LAST_ERROR.get(kind.model_type)})")


def relevant(kind: Kind, name: str, base: Probe) -> dict[str, list[Any]]:
    """The fields that change the tensors of the model -> other values that it can be built with.

    Each field is changed alone, first from one configuration, then from two more that vary all fields found by then,
    since one field may hide another.
    """
    fields: dict[str, list[Any]] = {}
    for turn in range(3):
        declared, env, _ = probes(kind, name, base, fields, 1, 100 + turn)[0] if turn else base
        _, _, found = build(kind, name, declared, in_memory) or base
        tried = dict.fromkeys(undeclared(kind, name, env)) | env
        for field, value in tried.items():
            last = field.rpartition(".")[2]
            if last == "id2label":
                if "Classification" in name:
                    fields[field] = []
                continue
            if field in fields or IRRELEVANT.search(last) or field in kind.fixed or field in kind.derived:
                continue
            works, matters = [], False
            for other in alternatives(field, value, kind):
                if probe := build(kind, name, declared | {field: other}, in_memory):
                    matters |= probe[2] != found
                    if other is not None or probe[2]["in memory"].keys() != found["in memory"].keys():
                        works.append(other)  # None that changes sizes alone stands for another value: see defaults_of
                if not matters and len(works) > (0 if turn else 1):
                    break
                if matters and len(works) > 1 and not isinstance(value, int):
                    break
            if matters or field in kind.choices:
                fields[field] = works
                if field not in env:
                    kind.extra.append(field)
    return fields


_ASKED = re.compile(r"""(?:getattr|hasattr)\(\s*(?:self\.)?(?:text_)?config,\s*["'](\w+)["']""")


def undeclared(kind: Kind, name: str, env: Env) -> list[str]:
    """Fields that the code of a model asks its configuration for, although the class of that does not declare them."""
    module = inspect.getmodule(getattr(transformers, name))
    asked = set(_ASKED.findall(inspect.getsource(module))) if module else set()
    sections = {field.rpartition(".")[0] for field in env}
    asked -= set(transformers.CONFIG_MAPPING[kind.model_type].attribute_map)
    found = [f"{s}.{field}" if s else field for s in sections for field in asked]
    return sorted(field for field in found if field not in env and not IRRELEVANT.search(field.rpartition(".")[2]))


def probes(kind: Kind, name: str, base: Probe, fields: dict[str, list[Any]], count: int, seed: int) -> list[Probe]:
    """Configurations that vary all fields together."""
    rng = random.Random(seed)
    found: list[Probe] = []
    tries = 0
    while len(found) < count:
        tries += 1
        if tries > 60 * count:
            raise NotFitted(f"{len(found)} of {count} configurations build ({LAST_ERROR.get(kind.model_type)})")
        drawn = kind.draw(rng, fields)
        for field, others in fields.items():
            if field.endswith("id2label"):
                drawn[field] = {str(i): f"LABEL_{i}" for i in range(rng.choice([1, 2, 3, 5, 7]))}
            elif field in drawn and field not in kind.choices:
                if None in others and rng.random() < 0.25:
                    drawn[field] = None
            elif isinstance(base[1].get(field), bool):
                drawn[field] = rng.random() < 0.5
            elif field in kind.extra and [v for v in others if v is not True]:
                drawn[field] = 2 * rng.randint(4, 30)
            elif field not in kind.choices and field not in kind.fixed:
                value = rng.choice([base[1][field], *others, *others])
                if (
                    isinstance(value, list)
                    and isinstance(base[1][field], list | None) is not False
                    and rng.random() < 0.5
                ):
                    value = sorted(rng.sample(range(3), rng.randint(1, 2)))
                drawn[field] = value
        if probe := build(kind, name, drawn):
            found.append(probe)
    return found


# ---------------------------------------------------------------- fitting


def fit_form(
    found: list[Probe], form: str, fields: list[str], names: dict[tuple[str, str, str], str]
) -> tuple[dict[str, str], list[list[Any]]]:
    """The ranges and rows of one form.

    Args:
        names: (words before an index, range, what the outer index is) -> the index; grows.
    """
    trees = [probe[2].get(form, probe[2]["saved"]) for probe in found]
    envs = [probe[1] for probe in found]
    split = [{key: key.split(".") for key in tree} for tree in trees]
    ranges: dict[str, str] = {}
    patterns: list[dict[str, tuple[str, tuple[int, ...]]]] = [{} for _ in trees]
    decided: dict[str, str | None] = {}  # prefix with indices -> index that follows; None for a number of the name
    pending = [[(key, 0, "", ()) for key in tree] for tree in trees]
    while any(pending):
        # walk every key up to its next number, gather what stands there
        waiting: list[list[tuple[str, int, str, tuple[int, ...], int]]] = []
        seen: dict[str, list[dict[tuple[int, ...], set[int]]]] = {}
        for p, items in enumerate(pending):
            waiting.append([])
            for key, at, prefix, indices in items:
                words = split[p][key]
                while at < len(words) and not words[at].isdigit():
                    prefix += f".{words[at]}" if prefix else words[at]
                    at += 1
                if at == len(words):
                    patterns[p][key] = (prefix, indices)
                    continue
                number = int(words[at])
                waiting[p].append((key, at, prefix, indices, number))
                seen.setdefault(prefix, [{} for _ in trees])[p].setdefault(indices, set()).add(number)
        for prefix, sets in seen.items():
            every = [frozenset(numbers) for by_outer in sets for numbers in by_outer.values()]
            if len(set(every)) == 1 and len(every[0]) <= 12:
                decided[prefix] = None
                continue
            outer = _INDEX.findall(prefix)
            samples, target = [], []
            for p, by_outer in enumerate(sets):
                for indices, numbers in by_outer.items():
                    samples.append(envs[p] | dict(zip(outer, indices, strict=True)))
                    target.append(max(numbers) + 1)
            text = Samples(samples, fields, outer).size(target)
            if text is None:
                literal = set().union(*every)
                if len(literal) <= 12:
                    decided[prefix] = None
                    continue
                raise NotFitted(f"{form}: how far {prefix}.* counts: {target[:8]}")
            word = prefix.rpartition(".")[2].strip("{}")
            word = {"h": "layer"}.get(word, word.removesuffix("s") if len(word) > 2 else word)
            key = (word, text, ",".join(outer))
            if key not in names:
                taken = set(names.values())
                names[key] = next(n for n in (word, *(f"{word}{i}" for i in range(2, 99))) if n not in taken)
            decided[prefix] = names[key]
            ranges[names[key]] = text
        pending = [
            [
                (
                    key,
                    at + 1,
                    f"{prefix}.{{{decided[prefix]}}}" if decided[prefix] else f"{prefix}.{number}",
                    (*indices, number) if decided[prefix] else indices,
                )
                for key, at, prefix, indices, number in items
            ]
            for items in waiting
        ]
    # rows: one per pattern and number of dims
    kinds: dict[tuple[str, int], list[dict[tuple[int, ...], tuple[tuple[int, ...], str]]]] = {}
    for p, tree in enumerate(trees):
        for key, (shape, state) in tree.items():
            pattern, indices = patterns[p][key]
            kinds.setdefault((pattern, len(shape)), [{} for _ in trees])[p][indices] = (shape, state)
    domains: dict[tuple[str, ...], list[tuple[int, tuple[int, ...], Env]]] = {}
    at_all: dict[tuple[str, ...], Samples] = {}
    rows = []
    for (pattern, _), seen_at in kinds.items():
        outer = tuple(_INDEX.findall(pattern))
        if outer not in domains:
            domains[outer] = [
                (p, indices, envs[p] | dict(zip(outer, indices, strict=True)))
                for p in range(len(trees))
                for indices in _tuples(outer, ranges, envs[p])
            ]
            at_all[outer] = Samples([env for _, _, env in domains[outer]], fields, outer)
        domain = domains[outer]
        present = [indices in seen_at[p] for p, indices, _ in domain]
        if sum(present) != sum(map(len, seen_at)):
            raise NotFitted(f"{form}: {pattern} lies outside of its ranges")
        exists = _exists(at_all[outer], domain, present, envs, fields)
        if exists is None:
            raise NotFitted(f"{form}: when {pattern} exists")
        if 0 < len({p for (p, _, _), here in zip(domain, present, strict=True) if here}) < FEWEST:
            raise TooFew(f"{form}: {pattern} was seen too rarely")
        inside = [(p, indices, env) for (p, indices, env), here in zip(domain, present, strict=True) if here]
        shapes = [seen_at[p][indices][0] for p, indices, _ in inside]
        states = [seen_at[p][indices][1] for p, indices, _ in inside]
        dims = []
        for axis in range(len(shapes[0])):
            text = _dim(
                [(p, env, shape[axis]) for (p, _, env), shape in zip(inside, shapes, strict=True)], envs, fields, outer
            )
            if text is None:
                raise NotFitted(f"{form}: axis {axis} of {pattern}: {sorted({s[axis] for s in shapes})[:8]}")
            dims.append(text)
        optional = ""
        if set(states) == {"buffer"}:
            optional = "true"
        elif set(states) != {""}:
            condition = Samples([env for _, _, env in inside], fields, outer).condition([bool(s) for s in states])
            if condition is None:
                raise NotFitted(f"{form}: when {pattern} is tied")
            optional = condition or "true"
        row: list[Any] = [pattern, dims]
        rows.append(row + ([exists, optional] if optional else [exists] if exists else []))
    return ranges, rows


def _tuples(
    outer: tuple[str, ...], ranges: dict[str, str], env: Env, done: tuple[int, ...] = ()
) -> list[tuple[int, ...]]:
    if len(done) == len(outer):
        return [done]
    values = env | dict(zip(outer, done, strict=False))
    count = tables.whole(tables.parse(ranges[outer[len(done)]]), _plain(values))
    return [found for number in range(count) for found in _tuples(outer, ranges, env, (*done, number))]


def _plain(values: Env) -> Env:
    return values


def _exists(samples: Samples, domain: list[Any], present: list[bool], envs: list[Env], fields: list[str]) -> str | None:
    by_probe = _by_probe([p for p, _, _ in domain], present)
    if by_probe is not None:
        here = sorted(by_probe)
        text = over(envs, here, fields).condition([by_probe[p] for p in here])
        if text is not None:
            return text
    return samples.condition(present)


def _dim(found: list[tuple[int, Env, int]], envs: list[Env], fields: list[str], outer: tuple[str, ...]) -> str | None:
    by_probe = _by_probe([p for p, _, _ in found], [size for _, _, size in found])
    if by_probe is not None:
        here = sorted(by_probe)
        return over(envs, here, fields).split_size([by_probe[p] for p in here])
    return Samples([env for _, env, _ in found], fields, outer).split_size([size for _, _, size in found])


OVER: dict[tuple[int, ...], Samples] = {}


def over(envs: list[Env], here: list[int], fields: list[str]) -> Samples:
    """The samples of some probes, kept for the class that is being fitted."""
    key = tuple(here)
    if key not in OVER:
        OVER[key] = Samples([envs[p] for p in here], fields)
    return OVER[key]


def _by_probe(numbers: list[int], values: list[Any]) -> dict[int, Any] | None:
    """Probe -> its value, where it has one for all indices."""
    found: dict[int, Any] = {}
    for p, value in zip(numbers, values, strict=True):
        if found.setdefault(p, value) != value:
            return None
    return found


_INDEX = re.compile(r"\{(\w+)\}")


# ---------------------------------------------------------------- defaults


def kind_of(values: list[Any]) -> str:
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


def defaults_of(kind: Kind, name: str, field: str, found: list[Probe], fields: list[str]) -> list[Any]:
    """The entry of a field: its kind, what stands for an absent one, what stands for null where that is replaced."""
    result: list[Any] = [kind_of([env.get(field) for _, env, _ in found])]
    others = [f for f in fields if f != field]
    if field.endswith("id2label"):
        return ["mapping", {"0": "LABEL_0", "1": "LABEL_1"}]
    for null in (False, True):
        values, envs = [], []
        for declared, _, _ in found[:6]:
            without = {n: v for n, v in declared.items() if n != field} | ({field: None} if null else {})
            probe = build(kind, name, without, in_memory)
            if probe:
                values.append(probe[1].get(field))
                envs.append(probe[1])
        if len(values) >= 3 and all(v is None for v in values):
            stands_for = meaning_of_none(kind, name, field, [probe[0] for probe in found[:6]], null)
            if stands_for:
                result.append({"=": stands_for})
                continue
        if len(values) < 3:
            if not null:
                # the class default does not go with the other sizes: take it from the class
                try:
                    plain = kind.defaults().get(field, "missing")
                except Exception:
                    return result
                if plain == "missing" or (isinstance(plain, list) and plain):
                    return result
                result.append(plain)
            continue
        text = _default(values, envs, others, field)
        if values[0] is None and all(v is None for v in values) and null:
            continue
        if null and len(result) == 1:
            return result
        if text is None:
            return result
        result.append(text[0])
    if len(result) == 3 and result[2] is None:
        result.pop()
    return result


def meaning_of_none(kind: Kind, name: str, field: str, declared: list[Flat], null: bool) -> str | None:
    """The expression that a model takes for a field that its configuration leaves at None; None for no usual one."""
    section = field.removesuffix(field.rpartition(".")[2])
    for template in MEANINGS:
        text = template.format(s=section)
        if field in tables.parse(text).names:
            continue
        equal = 0
        for values in declared:
            without = {n: v for n, v in values.items() if n != field} | ({field: None} if null else {})
            probe = build(kind, name, without, in_memory)
            if probe is None:
                continue
            try:
                number = tables.parse(text).value(probe[1])
            except tables.ExpressionError:
                break
            explicit = build(kind, name, values | {field: number}, in_memory)
            if explicit is None or explicit[2] != probe[2]:
                break
            equal += 1
        else:
            if equal >= 3:
                return text
    return None


MEANINGS = (
    "{s}hidden_size // {s}num_attention_heads",
    "{s}num_attention_heads",
    "4 * {s}hidden_size",
    "4 * {s}n_embd",
    "{s}hidden_size",
    "{s}d_model",
    "{s}intermediate_size",
)


def _default(values: list[Any], envs: list[Env], others: list[str], field: str) -> list[Any] | None:
    if all(v == values[0] and type(v) is type(values[0]) for v in values):
        return [values[0]]
    if all(type(v) is int for v in values):
        text = Samples(envs, others).size(values)
        return None if text is None else [{"=": text}]
    if all(isinstance(v, bool) for v in values):
        text = Samples(envs, others).condition(values)
        return None if text is None else [{"=": text}]
    if all(isinstance(v, list) and v for v in values):
        count = Samples(envs, others).size([len(v) for v in values])
        items = sorted({item for v in values for item in v}, key=str)
        if count is None or len(items) > 3:
            return None
        flat_envs = [env | {"layer": i} for env, v in zip(envs, values, strict=True) for i in range(len(v))]
        told = [item for v in values for item in v]
        samples = Samples(flat_envs, others, ["layer"])
        text = _literal(items[-1])
        for item in items[:-1]:
            condition = samples.condition([t == item for t in told])
            if condition is None:
                return None
            text = f"{_literal(item)} if {condition} else {text}" if condition else _literal(item)
        return [{"each": count, "=": text}]
    return None


def _literal(item: Any) -> str:
    return (
        {True: "true", False: "false"}[item]
        if isinstance(item, bool)
        else str(item)
        if isinstance(item, int)
        else f"'{item}'"
    )


# ---------------------------------------------------------------- one type


def table_of(model_type: str) -> tuple[str, dict[str, Any] | None, list[str]]:
    """The line of a model type, and what was left out."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(60)
    kind = KINDS.get(model_type, Kind(model_type))
    left: list[str] = []
    table: dict[str, Any] = {"usual": "", "fields": {}, "ranges": {}, "rows": [], "models": {}}
    names: dict[tuple[str, str, str], str] = {}
    numbers: dict[str, int] = {}
    for name in classes_of(model_type):
        began = time.process_time()
        snapshot = json.dumps(table), dict(names), dict(numbers)
        try:
            try:
                add_class(kind, name, table, names, numbers)
            except NotFitted:  # fields that are seldom set were seen too seldom, or something fitted by accident
                table, names, numbers = json.loads(snapshot[0]), dict(snapshot[1]), dict(snapshot[2])
                add_class(kind, name, table, names, numbers, 4 * PROBES)
            table["usual"] = table["usual"] or name
            print(f"  {name} {time.process_time() - began:.0f} s", flush=True)
        except (NotFitted, NoTable) as error:
            left.append(f"{model_type} {name}: {error}")
            table, names, numbers = json.loads(snapshot[0]), snapshot[1], snapshot[2]
        except Exception as error:
            left.append(f"{model_type} {name}: {type(error).__name__}: {error}")
            table, names, numbers = json.loads(snapshot[0]), snapshot[1], snapshot[2]
            if "-v" in sys.argv:
                raise
        if "-v" in sys.argv:
            print(f"  {name} {time.process_time() - began:.1f} s", file=sys.stderr)
    return model_type, table if table["models"] else None, left


def add_class(
    kind: Kind, name: str, table: dict[str, Any], names: dict[Any, str], numbers: dict[str, int], count: int = PROBES
) -> None:
    base = first_probe(kind, name)
    labels: dict[str, list[Any]] = {"id2label": []} if "Classification" in name else {}
    decoder = bool(kind.known) and table["usual"].endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"))
    decoder &= name.endswith(("Model", "ForSequenceClassification"))
    fields = kind.known | labels if decoder else relevant(kind, name, base)
    kind.known = kind.known or fields
    asked = sorted(fields, key=lambda f: (f.count("."), f))
    while True:
        found = probes(kind, name, base, fields, count, 1)
        tried_names, tried_ranges = dict(names), {}
        forms_seen: dict[str, list[list[Any]]] = {}
        OVER.clear()
        try:
            for form in sorted({form for probe in found for form in probe[2]}, reverse=True):
                ranges, forms_seen[form] = fit_form(found, form, asked, tried_names)
                tried_ranges |= ranges
            break
        except TooFew:
            count *= 2
            if count > MOST_PROBES:
                raise
    names |= tried_names
    table["ranges"] |= tried_ranges
    entries = {
        form: runs([numbers.setdefault(json.dumps(row), len(numbers)) for row in rows])
        for form, rows in forms_seen.items()
    }
    table["rows"] = [json.loads(row) for row in numbers]
    table["models"][name] = entries
    used = {n for text in texts(table) for n in tables.parse(text).names}
    mine: dict[str, list[Any]] = dict(table["fields"])
    todo = [f for f in asked if f in used and f not in mine]
    while todo:
        for field in todo:
            mine[field] = defaults_of(kind, name, field, found, asked)
        asked_by_defaults = {
            n
            for v in mine.values()
            for d in v[1:]
            if isinstance(d, dict) and "=" in d
            for text in d.values()
            for n in tables.parse(text).names
            if n != "layer"
        }
        todo = sorted(asked_by_defaults - set(mine))
    table["fields"] = in_order(mine)
    aliases: dict[str, list[str]] = {}
    for section in sorted({f.rpartition(".")[0] for f in table["fields"]}):
        part = kind.config(found[0][0])
        for step in section.split(".") if section else ():
            part = getattr(part, step)
        prefix = f"{section}." if section else ""
        for alias, field in sorted(getattr(part, "attribute_map", {}).items()):
            if prefix + field in table["fields"] and prefix + alias not in table["fields"]:
                aliases.setdefault(prefix + field, []).append(prefix + alias)
    if aliases:
        table["aliases"] = aliases
    built = model(name, kind.config(found[0][0]))
    if patterns := sorted(built._keys_to_ignore_on_load_unexpected or ()):
        table["ignored"] = sorted({*table.get("ignored", ()), *patterns})
    if is_tied_by_text(kind):
        table["tied_by"] = "text_config.tie_word_embeddings"
    if kind.fixed:
        table["only"] = kind.fixed
    if kind.spelled:
        table["spelled"] = kind.spelled
    check(kind, name, table, found[:3] + probes(kind, name, base, fields, HELD_OUT, 2))


def texts(table: dict[str, Any]) -> list[str]:
    found = list(table["ranges"].values())
    for row in table["rows"]:
        found += [*row[1], *(text for text in row[2:] if text)]
    return found


def in_order(fields: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """The fields, each after those that its default asks for."""
    done: dict[str, list[Any]] = {}

    def visit(name: str, above: tuple[str, ...]) -> None:
        if name in done or name in above or name not in fields:
            return
        for default in fields[name][1:]:
            for text in default.values() if isinstance(default, dict) and "=" in default else ():
                for other in tables.parse(text).names:
                    visit(other, (*above, name))
        done[name] = fields[name]

    for name in sorted(fields, key=lambda f: (f.count("."), f)):
        visit(name, ())
    return done


def runs(numbers: list[int]) -> str:
    """Numbers as `0-4 7`."""
    found: list[list[int]] = []
    for number in sorted(set(numbers)):
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return " ".join(str(a) if a == b else f"{a}-{b}" for a, b in found)


def check(kind: Kind, name: str, table: dict[str, Any], held_out: list[Probe]) -> None:
    """Whether the table predicts what it was not fitted to, from each way in which a config.json may be written."""
    with standing_in({kind.model_type: table}):
        for declared, _, found in held_out:
            config = kind.config(declared)
            documents = {
                "as declared": nested(declared),
                "in full": json.loads(json.dumps(config.to_dict())),
                "as saved": json.loads(config.to_json_string(use_diff=True)),
            }
            for how, document in documents.items():
                document = document | {"model_type": kind.model_type, "architectures": [name]}
                document.pop("quantization_config", None)
                models = {e.form: e.tensors for e in huggingface.expected_models(document)}
                for form, tensors in found.items():
                    if form not in models:
                        raise NotFitted(f"held out, {how}: nothing is {form}")
                    got = {k: t.shape for k, t in models[form].items()}
                    want = {k: shape for k, (shape, _) in tensors.items()}
                    if got != want:
                        raise NotFitted(f"held out, {how}, {form}: {difference(got, want)}")
                    wrong = [k for k, t in models[form].items() if t.needed != (not tensors[k][1])]
                    if wrong:
                        raise NotFitted(f"held out, {how}, {form}: {wrong[0]} needed or not")


# ---------------------------------------------------------------- models within models


def with_parts(model_type: str) -> tuple[str, dict[str, Any]]:
    """A table with the model types that its sections may hold, each tried with transformers.

    `sections`: section -> the type that the rows are of, where a configuration may name another; `mounts`: class ->
    form -> section -> what stands before the names of that model; `others`: the types proven to fit in there; `flat`:
    the section whose fields older configurations give at the top.
    """
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(60)
    lines: dict[str, Any] = json.loads(OUT.read_text(encoding="utf-8"))
    table = lines[model_type]
    kind = KINDS.get(model_type, Kind(model_type))
    sections = {name.removesuffix(".model_type"): usual for name, usual in kind.sections().items()}
    free = {s: usual for s, usual in sections.items() if "." not in s and is_free(kind, s)}
    for key in ("sections", "mounts", "others", "flat", "tied_by", "words"):
        table.pop(key, None)
    if "tie_word_embeddings" in table["fields"] and is_tied_by_text(kind):
        table["tied_by"] = "text_config.tie_word_embeddings"
    if words := words_of(kind, table):
        table["words"] = words
    if "text_config" in sections and is_flat(kind):
        table["flat"] = "text_config"
    if not free:
        return model_type, table
    table["sections"] = free
    mounts: dict[str, Any] = {}
    for name in table["models"]:
        declared, _, found = first_probe(kind, name, 200)
        document = kind.config(declared).to_dict()
        for form, tensors in found.items():
            for section, usual in free.items():
                prefix = prefix_of(lines.get(usual), usual, document[section], form, tensors)
                if prefix is not None:
                    mounts.setdefault(name, {}).setdefault(form, {})[section] = prefix
    table["mounts"] = mounts
    others: dict[str, list[str]] = {}
    for section in free:
        for other in OTHERS:
            if other != free[section] and other in lines and "base" in lines[other]:
                others.setdefault(section, []).append(other)
                if not fits(kind, table, section, other):
                    others[section].remove(other)
            table["others"] = others
    return model_type, table


OTHERS = ["llama", "mistral", "qwen2", "qwen3", "clip_vision_model", "siglip_vision_model"]
"""What published vision-language models hold."""


def words_of(kind: Kind, table: dict[str, Any]) -> dict[str, list[str]]:
    """List of a word per layer -> the words that the table knows; older configurations use others."""
    conditions = " ".join([text for row in table["rows"] for text in (*row[1], *row[2:])])
    found = {}
    for field, (form, *_) in table["fields"].items():
        if form == "list":
            usual = kind.defaults().get(field)
            words = {item for item in usual if isinstance(item, str)} if isinstance(usual, list) else set()
            words |= set(re.findall(rf"{re.escape(field)}\[\w+\] [!=]= '([^']*)'", conditions))
            if words:
                found[field] = sorted(words)
    return found


def is_tied_by_text(kind: Kind) -> bool:
    """Whether a head is tied too where the section `text_config` alone says so."""
    try:
        return bool(
            kind.config({"tie_word_embeddings": False, "text_config.tie_word_embeddings": True}).tie_word_embeddings
        )
    except Exception:
        return False


def is_flat(kind: Kind) -> bool:
    """Whether a configuration without the section `text_config` gives its fields beside the other sections."""
    try:
        given = kind.config({"hidden_size": 840, "num_hidden_layers": 3, "vocab_size": 777}).text_config
    except Exception:
        return False
    return (given.hidden_size, given.num_hidden_layers, given.vocab_size) == (840, 3, 777)


def is_free(kind: Kind, section: str) -> bool:
    """Whether the type of a section is for the configuration to say."""
    types = set()
    for other in ("llama", "mistral", "gemma2", "clip_vision_model", "siglip_vision_model"):
        with suppress(Exception):
            types.add(type(getattr(kind.config({f"{section}.model_type": other}), section)))
    return len(types) != 1  # none: the class refuses these, which says that it looks at the type


def prefix_of(part: Any, model_type: str, section: dict[str, Any], form: str, tensors: Form) -> str | None:
    if part is None or "base" not in part:
        return None
    with standing_in({model_type: part}):
        models = huggingface.expected_models(section | {"model_type": model_type, "architectures": [part["base"]]})
    names = {m.form: m.tensors for m in models}
    names_here = names.get(form, names["saved"])
    first = next(iter(names_here))
    for key in tensors:
        if key.endswith(first):
            prefix = key[: len(key) - len(first)]
            if all(prefix + k in tensors and tensors[prefix + k][0] == t.shape for k, t in names_here.items()):
                return prefix
    return None


def fits(kind: Kind, table: dict[str, Any], section: str, other: str) -> bool:
    """Whether the table predicts the model with another type in this section."""
    rng = random.Random(5)
    name = table["usual"]
    done = 0
    for _ in range(12):
        values = {n: v for n, v in kind.draw(rng).items() if not n.startswith(f"{section}.")}
        part = Kind(other).draw(rng)
        values |= {f"{section}.{n}": v for n, v in part.items()} | {f"{section}.model_type": other}
        if probe := build(kind, name, values):
            try:
                check(kind, name, table, [probe])
            except (NotFitted, NoTable):
                return False
            done += 1
        if done == 3:
            return True
    return False


@contextmanager
def standing_in(lines: dict[str, Any]) -> Iterator[None]:
    """These tables instead of those of the file."""
    real = tables.entry
    huggingface.entry = lambda file, key: {"made_with": "x"} if key == "" else lines.get(key) or real(file, key)
    try:
        yield
    finally:
        huggingface.entry = real


def difference(got: dict[str, Any], want: dict[str, Any]) -> str:
    missing = sorted(want.keys() - got.keys())
    more = sorted(got.keys() - want.keys())
    other = sorted(k for k in want.keys() & got.keys() if want[k] != got[k])
    parts = [f"{len(v)} {w} ({v[0]})" for v, w in ((missing, "missing"), (more, "too many")) if v]
    return ", ".join(parts + [f"{k} {got[k]} for {want[k]}" for k in other[:1]])


# ---------------------------------------------------------------- the file


def main() -> None:
    wanted = [a for a in sys.argv[1:] if not a.startswith("-")]
    lines: dict[str, Any] = json.loads(OUT.read_text(encoding="utf-8")) if wanted or "--parts" in sys.argv else {}
    left_out = 0
    with ProcessPoolExecutor(WORKERS) as pool:
        if "--parts" not in sys.argv:
            for job in as_completed([pool.submit(table_of, model_type) for model_type in wanted or ALL]):
                model_type, table, left = job.result()
                lines.pop(model_type, None)
                if table:
                    lines[model_type] = table
                    print(f"{model_type}: {', '.join(table['models'])}", flush=True)
                for line in left:
                    print("  left out:", line, flush=True)
                left_out += len(left)
                write(lines)
        for model_type, table in lines.items():
            base = auto.MODEL_MAPPING_NAMES.get(model_type)
            if base in table.get("models", ()):
                table["base"] = base
        write(lines)
        types = [model_type for model_type in sorted(lines) if model_type]
        for model_type, table in pool.map(with_parts, types):
            lines[model_type] = table
        write(lines)
        cases = [case for cases in pool.map(counts_of, types) for case in cases]
        COUNTS.write_text("[\n" + ",\n".join(cases) + "\n]\n", encoding="utf-8")
    classes = sum(len(table["models"]) for key, table in lines.items() if key)
    print(f"{len(lines) - 1} model types, {classes} classes, {left_out} left out")


def counts_of(model_type: str) -> list[str]:
    """One more configuration of the first two classes of a type with the numbers that transformers gives."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(60)
    kind = KINDS.get(model_type, Kind(model_type))
    cases = []
    for name in list(tables.entry(huggingface.FILE, model_type)["models"])[:2]:
        probe = first_probe(kind, name, 300)
        config = json.loads(kind.config(probe[0]).to_json_string(use_diff=True))
        config |= {"model_type": model_type, "architectures": [name]}
        forms = {
            form: [len(tensors), sum(math.prod(shape) for shape, _ in tensors.values())]
            for form, tensors in probe[2].items()
        }
        cases.append(json.dumps({"config": config, "forms": forms}, sort_keys=True))
    return cases


def write(lines: dict[str, Any]) -> None:
    lines[""] = {"made_with": f"transformers {transformers.__version__}"}
    body = ",\n".join(f"{json.dumps(key)}: {json.dumps(lines[key], separators=(',', ':'))}" for key in sorted(lines))
    OUT.write_text(f"{{\n{body}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
