"""How values read in a report: names, shapes, numbers, bytes, ranks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import groupby, pairwise
from math import prod
from operator import itemgetter
from typing import Any

from ckptlint.patterns import lazy_pattern

JSON_ESCAPE, MARKUP_ESCAPE = r"\u{:04x}", "&#x{:x};"
"""For `inert`: inside the strings of a JSON text; in HTML, XML, and labels of Graphviz and Mermaid."""
_COMMAND = lazy_pattern(r"^([^\S\n]*):(?=:)|:(?=:[\w-]+(?: [^\n]*?)?::)|##(?=\w*\[)", re.MULTILINE)


def printable(text: str) -> str:
    r"""The text with every character that a terminal may act on as a visible escape; no two texts become equal.

    Control characters, line separators, bidirectional overrides, zero-width characters and lone surrogates are
    escaped, and so is the backslash itself.

    >>> printable("a\x1b[31mb")
    'a\\x1b[31mb'
    """
    if text.isprintable() and "\\" not in text:
        return text
    return "".join(
        c if c.isprintable() and c != "\\" else c.encode("unicode_escape", "surrogatepass").decode() for c in text
    )


def all_printable(texts: Sequence[str]) -> list[str]:
    """`printable` of each text; in one look where none needs a change."""
    whole = "".join(texts)
    return [*texts] if whole.isprintable() and "\\" not in whole else [*map(printable, texts)]


def inert(text: str, escape: str = r"\x{:x}") -> str:
    r"""The text without what a CI runner takes for a command: `::` that starts a line, `::a::` and `##vso[` anywhere.

    A name may hold these, and wrapping may put it at the start of a line; it gets a visible escape, as `printable`
    gives, or in the form of a format that has its own. Every text that leaves ckptlint goes through here last.

    Source: actions/runner, src/Runner.Common/ActionCommand.cs; Azure Pipelines and TeamCity write `##vso[`,
    `##teamcity[`

    >>> print(inert("  ::error::a"))
      \x3a:error::a
    >>> print(inert("w ##vso[a]", JSON_ESCAPE))
    w #\u0023vso[a]
    """
    colon, hash_ = escape.format(ord(":")), escape.format(ord("#"))
    return _COMMAND.sub(lambda command: f"#{hash_}" if command[0] == "##" else command[0][:-1] + colon, text)


def texts(values: Iterable[str]) -> tuple[str, ...]:
    """The texts of an argument that takes several; a bare text is one, not its letters.

    >>> texts("GEO"), texts(["GEO", "PAY"])
    (('GEO',), ('GEO', 'PAY'))
    """
    return (values,) if isinstance(values, str) else tuple(values)


NUMBER = lazy_pattern(r"(?<![^./(_])\d+(?![^./)_,])|(?<=\bweight)\d+$|(?<=\bbias)\d+$")
_OF_SEVERAL = {"is": "are", "was": "were", "has": "have", "does": "do"}
_MOST_NUMBERS = 8  # in a name that is folded; each costs a look at all names
_PLAIN_NUMBER = lazy_pattern(r"0|[1-9][0-9]{0,15}")


def ranges(values: Iterable[int]) -> str:
    """Numbers as inclusive ranges.

    >>> ranges([0, 1, 2, 4, 5, 9])
    '0-2,4-5,9'
    """
    runs: list[list[int]] = []
    for value in sorted(set(values)):
        if runs and value == runs[-1][1]:
            runs[-1][1] += 1
        else:
            runs.append([value, value + 1])
    return ",".join(span(start, stop) for start, stop in runs)


def span(start: int, stop: int) -> str:
    """The indices from `start` to before `stop`, inclusive, as sentences name them.

    >>> span(6, 9), span(6, 7)
    ('6-8', '6')
    """
    return str(start) if stop - start == 1 else f"{start}-{stop - 1}"


def gaps(values: Iterable[int], count: int) -> str:
    """The numbers from 0 below a count that are not among some, as ranges; the count may be as large as it likes.

    >>> gaps([0, 1, 3], 1_000_000_000), gaps([0, 1], 2)
    ('2,4-999999999', '')
    """
    present = sorted({value for value in values if 0 <= value < count})
    around = pairwise([-1, *present, count])
    return ",".join(span(before + 1, after) for before, after in around if after > before + 1)


def fold_names(fqns: Iterable[str]) -> list[str]:
    """Names of one role folded into as few as possible, the numbers that vary as ranges.

    >>> fold_names(["layers.0.w", "layers.1.w", "layers.3.w"])
    ['layers.{0-1,3}.w']
    """
    by_words: dict[tuple[str, ...], dict[tuple[int, ...], str]] = {}
    folded: list[str] = []
    for fqn in dict.fromkeys(fqns):
        words, numbers = _taken_apart(fqn)
        if numbers:
            by_words.setdefault(words, {})[numbers] = fqn
        else:
            folded.append(fqn)
    for words, rows in by_words.items():
        for columns in _products(sorted(rows)):
            values = [ranges(c) if len(c) == 1 else "{" + ranges(c) + "}" for c in columns]
            folded.append("".join(word + value for word, value in zip(words, [*values, ""], strict=True)))
    return folded


@lru_cache(maxsize=1 << 15)
def _taken_apart(fqn: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The words between the numbers of a name, and the numbers; none where one is not written plainly, or of many."""
    numbers = NUMBER.findall(fqn)
    if len(numbers) > _MOST_NUMBERS or not all(_PLAIN_NUMBER.fullmatch(number) for number in numbers):
        return (fqn,), ()
    return tuple(NUMBER.split(fqn)), tuple(map(int, numbers))


def _products(rows: list[tuple[int, ...]]) -> list[list[list[int]]]:
    """Sorted rows as full products of columns: any other pattern would name tensors that are not meant."""
    if len(rows) == 1:
        return [[[number] for number in rows[0]]]
    columns = [sorted(set(column)) for column in zip(*rows, strict=True)]
    if prod(map(len, columns)) == len(rows):
        return [columns]
    varying = next(i for i, column in enumerate(columns) if len(column) > 1)
    alike = groupby(rows, itemgetter(varying))  # sorted rows: those of one value stand together
    return [product for _, group in alike for product in _products([*group])]


def human_bytes(count: int) -> str:
    """Bytes in the largest unit that keeps at least one digit before the point.

    >>> human_bytes(512), human_bytes(4 * 2**20)
    ('512 B', '4.0 MiB')
    """
    size, units = float(count), ["TiB", "GiB", "MiB", "KiB", "B"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop()
    return f"{count} B" if units[-1] == "B" else f"{size:,.1f} {units[-1]}"


def bytes_in(text: str) -> int | None:
    """The amount that a text names, as `human_bytes` writes it or in powers of 1,000 (`80 GB`); None for none.

    >>> bytes_in("80GiB"), bytes_in("1.5 kB"), bytes_in("much")
    (85899345920, 1500, None)
    """
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?) *([kmgt]?)(i?)b", text.strip(), re.IGNORECASE)
    return match and int(float(match[1]) * (1024 if match[3] else 1000) ** " kmgt".index(match[2].lower() or " "))


def byte_span(start: int, length: int) -> str:
    """The bytes from a first one on as an inclusive range.

    >>> byte_span(0, 1705), byte_span(1705, 1), byte_span(64, 0)
    ('0-1,704', '1,705', '64')
    """
    return f"{start:,}-{start + length - 1:,}" if length > 1 else f"{start:,}"


def human_duration(seconds: float) -> str:
    """A time in its largest whole unit.

    >>> human_duration(42), human_duration(7_300), human_duration(200_000)
    ('42 s', '2 h', '2 days')
    """
    if seconds >= 86_400:
        return plural(int(seconds // 86_400), "day")
    unit, length = ("h", 3_600) if seconds >= 3_600 else ("min", 60) if seconds >= 60 else ("s", 1)
    return f"{int(seconds // length)} {unit}"


def join_words(words: Sequence[str], last: str = "and") -> str:
    """Words in a row.

    >>> join_words(["model", "optimizer", "rng"]), join_words(["model"])
    ('model, optimizer and rng', 'model')
    """
    return f" {last} ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def first_names(names: Iterable[str], count: int = 4, noun: str = "") -> str:
    """The first names, and how many more there are.

    >>> first_names("abc", 2), first_names("abcd", 2, "gap")
    ('a, b and 1 more', 'a, b and 2 more gaps')
    """
    shown = at_most(names, count, noun, " and ")
    return ", ".join(shown[:count]) + "".join(shown[count:])


def at_most(names: Iterable[str], count: int, noun: str = "", before: str = "") -> list[str]:
    """The first names, and as a last one how many more there are.

    >>> at_most("abc", 3), at_most("abcd", 2), at_most("abcd", 2, "gap", "and ")
    (['a', 'b', 'c'], ['a', 'b', '2 more'], ['a', 'b', 'and 2 more gaps'])
    """
    every = list(names)
    left = len(every) - count
    more = plural(left, f"more {noun}") if noun else f"{left:,} more"
    return [*every[:count], before + more] if left > 0 else every


def first_few(names: Sequence[str], count: int = 3) -> str:
    """The first names, and dots where there are more.

    >>> first_few("abc"), first_few("abcd")
    ('a, b, c', 'a, b, c, ...')
    """
    return ", ".join([*names[:count], *["..."] * (len(names) > count)])


def nearest(word: str, names: Iterable[str]) -> str:
    """The name that was probably meant by a word; "" where none is like it.

    >>> nearest("dept", ["depth", "jobs"]), nearest("x", ["depth"])
    ('depth', '')
    """
    from difflib import get_close_matches  # for mistakes alone

    return next(iter(get_close_matches(word, list(names), 1)), "")


def plural(count: int, noun: str, does: str = "") -> str:
    """A count with its noun, and with the verb that follows one such thing.

    >>> plural(1, "error"), plural(2_054, "object"), plural(2, "file", "is")
    ('1 error', '2,054 objects', '2 files are')
    """
    return f"{count:,} {noun}" + ("" if count == 1 else "s") + (f" {verb(count, does)}" if does else "")


def verb(count: int, singular: str) -> str:
    """A verb, given as it follows one thing, as it follows so many.

    >>> verb(1, "is"), verb(2, "is"), verb(2, "holds")
    ('is', 'are', 'hold')
    """
    return singular if count == 1 else _OF_SEVERAL.get(singular, singular.removesuffix("s"))


def table(rows: Iterable[Iterable[object]], heads: Sequence[str], **form: Any) -> str:
    """Rows of texts below their heads, in a form as `tabulate` takes it.

    >>> print(table([["1", "w"]], ["row", "name"], tablefmt="plain"))
    row    name
    1      w
    """
    from tabulate import tabulate  # for tables alone

    return tabulate(rows, heads, **{"disable_numparse": True} | form)


def shape_text(shape: Iterable[int]) -> str:
    """A shape as reports print it.

    >>> shape_text((16, 8))
    '[16, 8]'
    """
    return f"[{', '.join(map(str, shape))}]"


def named_ranks(ranks: Iterable[int]) -> str:
    """Ranks in words, as a set."""
    return numbered("rank", ranks)


def numbered(noun: str, numbers: Iterable[int]) -> str:
    """Things that have a number, as a set.

    >>> numbered("layer", [3]), numbered("layer", [0, 1, 2, 6])
    ('layer 3', 'layers 0-2,6')
    """
    distinct = set(numbers)
    return f"{noun}{'' if len(distinct) == 1 else 's'} {ranges(distinct)}"


def layers_in(numbers: Iterable[int], block: str) -> str:
    """Layers of a block; one whose name is `layers` alone is not named again.

    >>> layers_in([0, 1], "decoder.layers"), layers_in([2], "layers")
    ('layers 0-1 of decoder.layers', 'layer 2')
    """
    return numbered("layer", numbers) + ("" if block == "layers" else f" of {block}")


def unknown_classes(names: Sequence[str]) -> str:
    """How many classes ckptlint does not know, and the first of them."""
    return f"{len(names)} {'class' if len(names) == 1 else 'classes'} unknown to ckptlint: {first_few(names, 8)}"
