"""The classes of each model type of transformers that has no table, to ckptlint/architecture/classes.toml.

    python bench/tables/classes.py [--without dory]

What their configurations count is not traced. That a count of layers is the number of layers rests on
`bench/evidence/precision.py`: leave out the types whose healthy exports it flags by such a count.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

HERE = Path(__file__).resolve().parents[2] / "ckptlint/architecture"
HEAD = """\
# Model type without a table -> its classes, whose configurations count layers, experts and vocabulary as others do.
#
# Source: transformers {version}, written by bench/tables/classes.py; left out for what they count: {without}
"""


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--without", nargs="*", default=[], help="types that count something else")
    without = sorted(parser.parse_args().without)
    classes = defaultdict(set)
    for name, mapping in vars(modeling_auto).items():
        if name.startswith("MODEL_") and name.endswith("MAPPING_NAMES"):
            for kind, names in mapping.items():
                classes[kind] |= {names} if isinstance(names, str) else {*names} - {None}
    kinds = [kind for kind in sorted({*CONFIG_MAPPING_NAMES} & {*classes}) if kind not in without]
    kinds = [kind for kind in kinds if not (HERE / f"tables/{kind}.json").exists()]
    lines = [f'"{kind}" = {sorted(classes[kind])!r}'.replace("'", '"') for kind in kinds]
    text = HEAD.format(version=transformers.__version__, without=", ".join(without) or "none")
    (HERE / "classes.toml").write_text("\n".join([text, *lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
