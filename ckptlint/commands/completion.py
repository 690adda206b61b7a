"""What the shell offers for an incomplete rule (codes, names, families) or job (axes). Imports no rule."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import click
    from click.shell_completion import CompletionItem


def one_rule(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The rules whose code or name starts like this."""
    from click.shell_completion import CompletionItem

    found = []
    for code, name in rule_names():
        if code.startswith(incomplete.upper()):
            found.append(CompletionItem(code, help=name))
        elif name.startswith(incomplete.lower()):
            found.append(CompletionItem(name, help=code))
    return found


def one_page(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The same, and the causes."""
    from click.shell_completion import CompletionItem

    names = sorted(path.stem for place in _places() for path in Path(place, "causes").glob("*.toml"))
    causes = [CompletionItem(name, help="cause") for name in names if name.startswith(incomplete.lower())]
    return one_rule(context, parameter, incomplete) + causes


def many_rules(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The same after the last comma of a list, and families and `ALL`."""
    from click.shell_completion import CompletionItem

    before, comma, last = incomplete.rpartition(",")
    families = dict.fromkeys(code[:3] for code, _ in rule_names())
    items = [CompletionItem(word, help="all of them") for word in (*families, "ALL") if word.startswith(last.upper())]
    return [
        CompletionItem(f"{before}{comma}{item.value}", help=item.help)
        for item in [*items, *one_rule(context, parameter, last)]
    ]


def rule_names() -> Iterator[tuple[str, str]]:
    """Code and name of each rule, as their modules state them.

    >>> {("GEO004", "coverage-hole"), ("LIV101", "shard-shape-mismatch")} <= {*rule_names()}
    True
    """
    for module in sorted(path for place in _places() for path in Path(place).glob("[a-z]*_*.py")):
        yield from re.findall(r'^@rule\(\s*"(\w+)",\s*"([\w-]+)"', module.read_text(encoding="utf-8"), re.MULTILINE)


def _places() -> list[str]:
    """Where the rules lie."""
    spec = find_spec("ckptlint.rules")
    return list((spec.submodule_search_locations if spec else None) or [str(Path(__file__).parents[2] / "rules")])


def jobs(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The axes of `ckptlint plan --to` after the last comma, and files that may hold a function."""
    from click.shell_completion import CompletionItem

    before, comma, last = incomplete.rpartition(",")
    axes = ("dp", "dp_replicate", "tp", "pp", "vpp", "ep", "etp", "cp")
    items = [CompletionItem(f"{before}{comma}{axis}=") for axis in axes if axis.startswith(last)]
    return items or [CompletionItem(incomplete, type="file")]
