"""What the classes of each table keep in float32, into its `float32`: `python bench/tables/float32.py`.

transformers loads these tensors in float32 whatever the dtype that is asked for. Attributes of classes are read; no
model is built.
"""

from __future__ import annotations

import json

import transformers
from prove import OUT, float32_of, write


def main() -> None:
    """Write the field into the tables that there are."""
    for path in sorted(OUT.glob("*.json")):
        table = json.loads(path.read_text(encoding="utf-8"))
        kept = float32_of(path.stem, table)
        if kept != table.get("float32", []):
            write(path.stem, table | {"float32": kept})
            print(path.stem, *kept)


if __name__ == "__main__":
    print(f"transformers {transformers.__version__}")
    main()
