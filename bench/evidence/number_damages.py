"""Damages the numbers of real steps in every way of `tests/numbers`, and counts what ckptlint says.

    python bench/evidence/number_damages.py [--draws 3] [--layout WORDS] [--write]

Prints the section "Damages to the numbers of one step" of docs/evidence.md; `--write` writes it there. Needs torch.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections import defaultdict
from functools import partial
from multiprocessing import get_context
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "numbers")]

from damages import LAYOUTS  # noqa: E402
from test_damaged_numbers import UNDECIDED, judged  # noqa: E402

_EVIDENCE = TESTS.parent / "docs" / "evidence.md"
_PLACE = re.compile(r"(<!-- made by bench/evidence/number_damages.py -->\n\n).*?(\n<!-- end -->)", re.DOTALL)
_HEAD = """## Damages to the numbers of one step

Every element is there, and some are not the right ones. `tests/numbers/damages.py` does that to the bytes of real saves
in {layouts} layouts; each damage is drawn {draws} times in each, and the step is checked alone, at depth data. Told is
what one rule says that may say it, and no other. This command writes the section:

```sh
python bench/evidence/number_damages.py --draws {draws} --write
```

| damage | rule | drawn | told | silent: one step does not decide | wrong |
|---|---|--:|--:|--:|--:|
"""

Row = tuple[str, str, str]
"""Operator, the rules that may tell it, and `told`, `silent` or `wrong`."""


def rows(layout: str, draws: int) -> list[Row]:
    """What came of the damages to one save."""
    with tempfile.TemporaryDirectory() as folder:
        return [
            (
                one.operator.name.replace("_", " "),
                ", ".join(sorted(one.operator.codes)) or "none: legal",
                "wrong" if not one.is_right else "told" if one.codes else "silent",
            )
            for one in judged(layout, draws, Path(folder))
        ]


def section(found: list[Row], draws: int) -> str:
    """The whole section."""
    by_operator: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, codes, end in found:
        by_operator[name, codes].append(end)
    by_operator["**all**", ""] = [end for _, _, end in found]
    lines = [
        f"| {name} | {codes} | {len(ends)} | {ends.count('told')} | {ends.count('silent')} | {ends.count('wrong')} |"
        for (name, codes), ends in sorted(by_operator.items(), key=lambda item: (not item[0][1], item[0]))
    ]
    reasons = [f"- {reason}: in {', '.join(layouts)}" for reason, layouts in UNDECIDED.items()]
    why = "\n\nWhere one step does not decide:\n\n"
    return _HEAD.format(layouts=len(LAYOUTS), draws=draws) + "\n".join(lines) + why + "\n".join(reasons) + "\n"


def main() -> None:
    """Damage, judge, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--layout", default="")
    parser.add_argument("--write", action="store_true")
    a = parser.parse_args()
    with get_context("fork").Pool(2) as pool:
        chosen = [layout for layout in LAYOUTS if a.layout in layout]
        found = [row for part in pool.imap(partial(rows, draws=a.draws), chosen) for row in part]
    text = section(found, a.draws)
    if a.write:
        page = _PLACE.sub(lambda place: f"{place[1]}{text}{place[2]}", _EVIDENCE.read_text(encoding="utf-8"))
        _EVIDENCE.write_text(page, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
