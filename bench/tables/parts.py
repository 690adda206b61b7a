"""The models that the sections of a composite one may hold: `python bench/tables/parts.py [TYPE ...]`.

With types it tries which others fit into these; without it says of all which sections are free, and tries nothing.

Adds to each table in ckptlint/architecture/tables: `sections` (section -> the type that its rows are of, where a
configuration may name another), `mounts` (class -> form -> section -> what stands before the names of that model) and
`others` (section -> the types proven to fit in there). Runs after `prove.py`, since it needs the tables of the parts.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from trace import Study, build, config_of, defaults, draw, quiet, study

from prove import OUT, prover, write
from rows import NotTraced

from ckptlint.architecture import huggingface
from ckptlint.architecture.expected import NoTable

OTHERS = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "clip_vision_model", "siglip_vision_model"]
"""What published vision-language models hold."""


def free_sections(model_type: str) -> dict[str, str]:
    """Section -> its usual type, where the type is for the configuration to say."""
    sections = {n.removesuffix(".model_type"): v for n, v in defaults(model_type).items() if n.endswith(".model_type")}
    return {s: usual for s, usual in sections.items() if "." not in s and _is_free(model_type, s)}


def _is_free(model_type: str, section: str) -> bool:
    types = set()
    for other in OTHERS:
        with suppress(Exception):
            types.add(type(getattr(config_of(model_type, {f"{section}.model_type": other}), section)))
    return len(types) != 1  # none: the class refuses these, which says that it looks at the type


def with_parts(model_type: str, table: dict[str, Any], tried: bool) -> dict[str, Any]:
    """The table with what is known of its sections."""
    free = table["sections"] = free_sections(model_type)
    if not free or not tried:
        return table
    mounts: dict[str, Any] = {}
    studies: dict[str, Study] = {}
    for name in table["models"]:
        studies[name] = found = study(model_type, name, passes=1)
        for form, tensors in found.base.forms.items():
            for section, usual in free.items():
                values = {
                    k.removeprefix(f"{section}."): v for k, v in found.base.env.items() if k.startswith(f"{section}.")
                }
                prefix = _prefix_of(usual, values, form, tensors)
                if prefix is not None:
                    mounts.setdefault(name, {}).setdefault(form, {})[section] = prefix
    table["mounts"] = mounts
    table["others"] = {}
    for section in free:
        for other in OTHERS:
            part = huggingface.model_table(other)
            alike = ("vision" in other) == ("vision" in section)
            if alike and other != free[section] and part and "base" in part:
                fitting = table["others"].setdefault(section, [])
                fitting.append(other)
                if not _fits(model_type, table, studies[table["usual"]], section, other):
                    fitting.remove(other)
    return table


def _prefix_of(usual: str, values: dict[str, Any], form: str, tensors: Any) -> str | None:
    part = huggingface.model_table(usual)
    if part is None or "base" not in part:
        return None
    with suppress(NoTable):
        models = huggingface.expected_models(values | {"model_type": usual, "architectures": [part["base"]]})
        names = {m.form: m.tensors for m in models}
        here = names.get(form, names["saved"])
        first = next(iter(here))
        for key in tensors:
            prefix = key.removesuffix(first)
            if key.endswith(first) and all(
                prefix + k in tensors and tensors[prefix + k][0] == t.shape for k, t in here.items()
            ):
                return prefix
    return None


def _fits(model_type: str, table: dict[str, Any], found: Study, section: str, other: str) -> bool:
    """Whether the table predicts the model with another type in this section, three times."""
    rng, done = random.Random(5), 0
    inner = study(other, huggingface.model_table(other)["base"], passes=2)  # type: ignore[index]
    for _ in range(12):
        values = {n: v for n, v in draw(found, rng, 0.7).items() if not n.startswith(f"{section}.")}
        part = {f"{section}.{n}": v for n, v in draw(inner, rng).items()}
        try:
            one = build(model_type, found.name, values | part | {f"{section}.model_type": other})
        except Exception:
            continue
        try:
            prover(model_type)(table, found.name, [one], False)
        except NotTraced:
            return False
        done += 1
        if done == 3:
            return True
    return False


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("types", nargs="*")
    wanted = parser.parse_args().types
    quiet()
    for file in sorted(OUT.glob("*.json")):
        if not wanted or file.stem in wanted:
            table = with_parts(file.stem, json.loads(file.read_text()), tried=bool(wanted))
            write(file.stem, table)
            print(file.stem, table.get("sections"), table.get("others"), table.get("mounts"), flush=True)
