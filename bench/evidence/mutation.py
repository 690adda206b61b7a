"""Damages the healthy checkpoints of `fixtures/real` in every way of `tests/mutation`, and counts what ckptlint says.

    python bench/evidence/mutation.py [--sites 2] [--seed 0] [--jobs 2] [--operator WORDS] [--save NAME] [--write]

Of each operator and checkpoint at most `--sites` places are damaged, chosen by the seed. Prints the section "How often
the verdict is right" of docs/evidence.md; `--write` writes it there. Needs torch; megatron-core is not needed.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).resolve().parents[2] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "mutation")]

from mutants import Save, judge, saves  # noqa: E402
from operators import OPERATORS  # noqa: E402

_EXAMPLES = 4
_EVIDENCE = TESTS.parent / "docs" / "evidence.md"
_PLACE = re.compile(r"(<!-- made by bench/evidence/mutation.py -->\n\n).*?(\n<!-- end -->)", re.DOTALL)


class Row(NamedTuple):
    """An outcome as plain values."""

    operator: str
    about: str
    legal: str
    unseen: str
    verdict: str
    codes: frozenset[str]
    is_named: bool
    unrelated: frozenset[str]


def rows(save: Save, words: str, sites: int, seed: int) -> list[Row]:
    """What came of the mutants of one checkpoint."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for operator in OPERATORS:
            for mutant in operator.sample(save, sites, seed) if words in operator.name else ():
                end = judge(save, operator, mutant, Path(folder))
                about = f"{save.name}: {mutant.about}"
                said = end.verdict, end.codes, end.is_named, end.unrelated
                found.append(Row(operator.name, about, mutant.legal, mutant.unseen, *said))
    return found


def section(found: list[Row], count: int, sites: int, seed: int) -> str:
    """The whole section."""
    harmful = [row for row in found if not row.legal]
    legal = [row for row in found if row.legal]
    caught = [row for row in harmful if row.verdict == "caught"]
    lost = [row for row in harmful if row.verdict != "caught"]
    known = [row for row in lost if row.unseen]
    open_ = [row for row in lost if not row.unseen]
    unrelated = [row for row in found if row.unrelated]
    seen = len(harmful) - len(known)
    lines = [
        _HEAD.format(sites=sites, seed=seed),
        "| | |\n|---|---|",
        f"| healthy checkpoints damaged | {count} |",
        f"| harmful mutants | {len(harmful):,} |",
        f"| caught by a warning or an error of a rule that may report it | {len(caught):,} |",
        f"| ... which names the key or file that was damaged | {sum(row.is_named for row in caught):,} |",
        f"| known misses: nothing in the files shows them (below) | {len(known):,} |",
        f"| open misses: an `info` alone, or nothing (below) | {len(open_):,} |",
        f"| caught, of those that the files show | {len(caught) / max(seen, 1):.1%} |",
        f"| mutants on which a rule fired that has nothing to do with the damage | {len(unrelated):,} |",
        f"| legal mutants, and false alarms among them | {len(legal):,}, {_count(legal, 'alarm')} |",
        "\n### By operator\n",
        "| damage | depth | mutants | caught | named | info | known | open | rules that caught it |",
        "|---|---|--:|--:|--:|--:|--:|--:|---|",
        *_table(harmful),
        "\n### Legal mutants\n\nThey must not raise a warning or an error.\n",
        "| what | why it is legal | mutants | false alarms |\n|---|---|--:|--:|",
        *_reasons(legal, "legal", lambda rows: f"{len(rows)} | {_count(rows, 'alarm')}"),
        "\n### Known misses\n",
        "| damage | why nothing in the files shows it | missed |\n|---|---|--:|",
        *_reasons(known, "unseen", lambda rows: str(len(rows))),
        "\n### Open misses\n",
        *(_examples(open_) or ["None."]),
        "\n### Rules that fired for something else\n",
        *(_examples(unrelated) or ["None."]),
        "\n### False alarms\n",
        *(_examples([row for row in legal if row.verdict == "alarm"]) or ["None."]),
    ]
    return "\n".join(lines) + "\n"


_HEAD = """## How often the verdict is right

Real bugs are few, but damages can be made in any number. An operator takes a healthy checkpoint that a real library
wrote and does to it what a bug, a torn copy or an edit does; torch writes the metadata again. `ckptlint.check` judges
the mutant like any checkpoint, at the operator's depth. This command writes the section:

```sh
python bench/evidence/mutation.py --sites {sites} --seed {seed} --write
```

It damages every checkpoint in {sites} of the places where an operator fits, drawn by the seed (in all, if there are
fewer). `tests/mutation` holds the operators and the rules that may report each. For some mutants it holds the reason
why they are legal or cannot be seen, as a condition on the checkpoint, not on what ckptlint says. Its test judges a
small sample in every run. The fixtures are small: where two layers stand for eighty, one has no siblings to
compare it with.
"""


def _count(found: Iterable[Row], verdict: str) -> int:
    return sum(row.verdict == verdict for row in found)


def _table(found: list[Row]) -> list[str]:
    lines = []
    for operator in OPERATORS:
        mine = [row for row in found if row.operator == operator.name]
        if not mine:
            continue
        caught = [row for row in mine if row.verdict == "caught"]
        known = sum(row.verdict != "caught" and bool(row.unseen) for row in mine)
        codes = Counter(code for row in caught for code in row.codes).most_common()
        cells = (
            f"{operator.name} | {operator.depth} | {len(mine)} | {len(caught)} | {sum(row.is_named for row in caught)}",
            str(_count(mine, "noted")),
            str(known),
            str(len(mine) - len(caught) - known),
            ", ".join(f"{code} {n}" for code, n in codes),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _reasons(found: list[Row], field: str, cells) -> list[str]:  # type: ignore[no-untyped-def]
    by_reason: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in found:
        by_reason[row.operator, getattr(row, field)].append(row)
    return [f"| {operator} | {reason} | {cells(mine)} |" for (operator, reason), mine in sorted(by_reason.items())]


def _examples(found: list[Row]) -> list[str]:
    lines = []
    for name, count in Counter(row.operator for row in found).items():
        mine = [row for row in found if row.operator == name]
        lines.append(f"- {name}: {count}")
        for row in mine[:_EXAMPLES]:
            codes = sorted(row.unrelated or row.codes)
            lines.append(f"  - `{row.about}`" + (f" ({', '.join(codes)})" if codes else ""))
    return lines


def main() -> None:
    """Damage, judge, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--operator", default="")
    parser.add_argument("--save", default="")
    parser.add_argument("--write", action="store_true")
    a = parser.parse_args()
    chosen = [save for save in saves() if a.save in save.name]
    work = partial(rows, words=a.operator, sites=a.sites, seed=a.seed)
    with get_context("fork").Pool(a.jobs) as pool:
        found = [row for part in pool.imap(work, chosen) for row in part]
    text = section(found, len(chosen), a.sites, a.seed)
    if a.write:
        page = _PLACE.sub(lambda place: f"{place[1]}{text}{place[2]}", _EVIDENCE.read_text(encoding="utf-8"))
        _EVIDENCE.write_text(page, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
