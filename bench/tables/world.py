"""Tables against the world: `python bench/tables/world.py FOLDER`, a markdown table on standard output.

The folder holds one folder per published model, each with its `config.json` and `model.safetensors.index.json`. Keys
are compared with the index's, bytes with its `total_size`, at the dtype that the configuration declares.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from ckptlint.architecture.expected import Expected, NoTable
from ckptlint.architecture.huggingface import expected_models

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


def row(folder: Path) -> tuple[str, ...] | None:
    """The cells of one model; None where a file is missing or is no JSON."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    stored = set(index["weight_map"])
    total = (index.get("metadata") or {}).get("total_size")
    published = str(config.get("_name_or_path"))
    name = published if re.fullmatch(r"[A-Z][\w-]*/[\w.-]+", published) else folder.name.replace("+", "/", 1)
    cells = (name, str(config.get("model_type")))
    try:
        models = expected_models(config)
    except NoTable as reason:
        return (*cells, f"- / {len(stored):,}", f"- / {total or 0:,}", str(reason))
    best = min(models, key=lambda model: len(stored ^ set(needed(model))))
    keys = needed(best)
    size = sum(keys[key] for key in keys)
    more = {key: size_of(best, key) for key in stored - set(keys) if key in best.tensors}
    return (
        *cells,
        f"{len(keys) + len(more):,} / {len(stored):,}",
        f"{size + sum(more.values()):,} / {total or 0:,}",
        explanation(best, keys, stored, size + sum(more.values()), total),
    )


def size_of(model: Expected, key: str) -> int:
    elements = 1
    for extent in model.tensors[key].shape:
        elements *= extent
    return elements * BYTES.get(model.dtype or "float32", 4)


def needed(model: Expected) -> dict[str, int]:
    """Key -> bytes, of what a load misses."""
    return {key: size_of(model, key) for key, tensor in model.tensors.items() if tensor.needed}


def explanation(model: Expected, keys: dict[str, int], stored: set[str], size: int, total: Any) -> str:
    """What differs, in words; "" where nothing does."""
    parts = []
    for word, names in (("not stored", set(keys) - stored), ("not of the model", stored - set(model.tensors))):
        kinds = Counter(re.sub(r"\.\d+\.", ".N.", name) for name in names)
        listed = ", ".join(f"{name} ({count})" for name, count in kinds.most_common(3))
        if kinds:
            parts.append(f"{len(names):,} {word}: {listed}{', ...' if len(kinds) > 3 else ''}")
    if not parts and total and size != total:
        wide = {name: size * width / BYTES.get(model.dtype or "float32", 4) for name, width in BYTES.items()}
        fits = [name for name, bytes_ in wide.items() if bytes_ == total]
        parts.append(
            f"stored as {fits[0]}, declared {model.dtype or 'no dtype'}"
            if fits
            else f"bytes differ by {total - size:,}"
        )
    if extra := [key for key in stored if key in model.tensors and not model.tensors[key].needed]:
        parts.append(f"stored though not needed: {', '.join(sorted(extra)[:2])}")
    return "; ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    rows = [cells for folder in sorted(parser.parse_args().folder.iterdir()) if (cells := row(folder))]
    print("| model | model_type | keys predicted / stored | bytes predicted / total_size | difference |")
    print("|---|---|--:|--:|---|")
    for cells in rows:
        if not cells[2].startswith("-"):
            print(f"| {' | '.join(cells)} |")
    known = [cells for cells in rows if not cells[2].startswith("-")]
    equal = [cells for cells in known if not cells[4]]
    print(f"\n{len(rows)} models, {len(known)} with a table, {len(equal)} equal to the byte. Not judged:\n")
    for reason, count in Counter(cells[4] for cells in rows if cells[2].startswith("-")).most_common():
        print(f"- {reason}{f' ({count})' if count > 1 else ''}")


if __name__ == "__main__":
    main()
