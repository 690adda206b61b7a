"""Tables of types with their proof: `python bench/tables/prove.py OUT.jsonl [TYPE ...] [--part I/N]`.

Writes ckptlint/architecture/tables/TYPE.json for each type whose table gives every key and shape of 20 configurations
that it was not made from, in which sizes differ from each other and from their defaults, each in the three ways in
which a config.json may be written. A line a type goes to OUT.jsonl; types that stand there are not done again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from trace import Build, config_of, nested, quiet, table_of

import transformers
from rows import NotTraced
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightRenaming, apply_renamings
from transformers.models.auto import modeling_auto as auto

from ckptlint.architecture import huggingface
from ckptlint.architecture.expected import NoTable

SECONDS = 400
OUT = Path(os.environ.get("TABLES", Path(huggingface.__file__).parent / "tables"))
REAL = huggingface.model_table


def prover(model_type: str) -> Any:
    def prove(table: dict[str, Any], name: str, builds: list[Build], last: bool) -> None:
        """Raises NotTraced where the table gives other tensors than the library.

        Args:
            last: no further draws are to come, so a field may stay without a default: such a config.json is not judged.
        """
        huggingface.model_table = lambda key: table if key == model_type else REAL(key)
        for build in builds:
            config = config_of(model_type, build.declared)
            documents = {
                "as declared": nested(build.declared),
                "in full": json.loads(json.dumps(config.to_dict())),
                "as saved": json.loads(config.to_json_string(use_diff=True)),
            }
            for how, document in documents.items():
                document = document | {"model_type": model_type, "architectures": [name]}
                document.pop("quantization_config", None)
                try:
                    models = {e.form: e.tensors for e in huggingface.expected_models(document)}
                except NoTable as error:
                    if last and how == "as declared":
                        continue
                    raise NotTraced(f"proof, {how}: {error}", rare=True) from None
                for form, tensors in build.forms.items():
                    got = {k: (t.shape, not t.needed) for k, t in models.get(form, {}).items()}
                    want = {k: (shape, bool(state)) for k, (shape, state) in tensors.items()}
                    if got != want:
                        wrong = sorted(k for k in got.keys() | want.keys() if got.get(k) != want.get(k))
                        k = wrong[0]
                        raise NotTraced(f"proof, {how}, {form}: {k} is {got.get(k)}, should be {want.get(k)}", wrong)

    return prove


def one(model_type: str) -> dict[str, Any]:
    began = time.process_time()
    table, left = table_of(model_type, prover(model_type))
    if table:
        table["made_with"] = f"transformers {transformers.__version__}"
        base = auto.MODEL_MAPPING_NAMES.get(model_type)
        if base in table["models"]:
            table["base"] = base
        table["prefixes"] = prefixes_of(model_type, table["models"])
        table["float32"] = float32_of(model_type, table)
        write(model_type, table)
    return {
        "type": model_type,
        "classes": list(table["models"]) if table else [],
        "left": left,
        "seconds": round(time.process_time() - began, 1),
    }


def prefixes_of(model_type: str, classes: Iterable[str]) -> list[str]:
    """What the loader takes off the names of a type, or puts before them."""
    words = {getattr(transformers, name).base_model_prefix for name in classes}
    for name in (model_type, *classes):
        for change in get_checkpoint_conversion_mapping(name) or ():
            if isinstance(change, PrefixChange) and change.prefix_to_remove:
                words.add(".".join(filter(None, (change.model_prefix, change.prefix_to_remove))))
    return sorted(words - {""})


def float32_of(model_type: str, table: dict[str, Any]) -> list[str]:
    """The ends of names of tensors that a table's classes keep in float32, in the model and as they are stored.

    A class names modules of the model; a loader may know them by other names in files (`mlp.expert_bias`).
    """
    classes = [getattr(transformers, name, None) for name in table["models"]]
    words = {word for cls in classes for word in getattr(cls, "_keep_in_fp32_modules_strict", None) or ()}
    if not words:
        return []
    kept = re.compile(rf"(?:^|\.)(?:{'|'.join(map(re.escape, words))})(?:\.|$)")
    changes = [c for c in get_checkpoint_conversion_mapping(model_type) or () if isinstance(c, WeightRenaming)]
    for name in {re.sub(r"\{\w+\}", "0", row[0]) for row in table["rows"]}:
        if not kept.search(name) and kept.search(apply_renamings(name, changes)):
            words.add(".".join(name.split(".")[-2:]))
    return sorted(words)


def write(model_type: str, table: dict[str, Any]) -> None:
    body = ",\n".join(
        f"{json.dumps(k)}: {json.dumps(v, separators=(',', ':'))}"
        for k, v in table.items()
        if v or k in ("fields", "ranges")
    )
    (OUT / f"{model_type}.json").write_text(f"{{\n{body}\n}}\n", encoding="utf-8")


def in_a_fork(model_type: str) -> dict[str, Any]:
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        answer: dict[str, Any]
        try:
            answer = one(model_type)
        except BaseException as error:
            answer = {"type": model_type, "classes": [], "left": [f"{type(error).__name__}: {str(error)[:200]}"]}
        with os.fdopen(write, "w") as file:
            file.write(json.dumps(answer))
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        text = file.read()
    os.waitpid(child, 0)
    return (
        json.loads(text)
        if text
        else {"type": model_type, "classes": [], "left": [f"no answer in {SECONDS} s of processor time"]}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("types", nargs="*", default=sorted(transformers.CONFIG_MAPPING.keys()))
    parser.add_argument("--part", default="0/1")
    out, wanted, share = vars(parser.parse_args()).values()
    part, of = map(int, share.split("/"))
    quiet()
    for number, model_type in enumerate(wanted):
        done = {json.loads(line)["type"] for line in out.read_text().splitlines()} if out.exists() else set()
        if number % of == part and model_type not in done:
            line = in_a_fork(model_type)
            with out.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(line["type"], line.get("seconds"), line["classes"], *line["left"], sep="\n   ", flush=True)


if __name__ == "__main__":
    main()
