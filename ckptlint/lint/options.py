"""The options of `ckptlint check`: the command line is made from this table, and settings files are held to it."""

from __future__ import annotations

import builtins
from collections.abc import Iterable
from dataclasses import dataclass

from ckptlint.depth import Depth
from ckptlint.errors import ConfigError

FORMATS = {
    "full": ".txt",
    "concise": "",
    "json": ".json",
    "json-v1": "",
    "sarif": ".sarif",
    "junit": ".xml",
    "github": "",
    "gitlab": "",
    "markdown": ".md",
    "html": ".html",
}
"""The formats of a report, each with the suffix of an output file that asks for it, where one does."""

SUFFIXES = {suffix: name for name, suffix in FORMATS.items() if suffix}
"""Formats by the suffix of an output file."""


@dataclass(frozen=True, slots=True)
class CheckOption:
    """One option of `ckptlint check`; a text, where nothing else is said.

    Attributes:
        name: the long name, without dashes; also the key in a settings file.
        help: what it does, for `--help`.
        default: its value when nobody says another.
        metavar: what stands for the value in help texts; RULES are rules, which the shell completes.
        choices: the texts it may be.
        minimum: of an option that is a whole number.
        short: one letter for `-X`.
        is_flag: whether it is true or false.
        counts: whether it says how often it was given.
        repeats: whether it may be given more than once.
        in_files: whether it may stand in a settings file.
    """

    name: str
    help: str = ""
    default: str | int | None = None
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    minimum: int | None = None
    short: str = ""
    is_flag: bool = False
    counts: bool = False
    repeats: bool = False
    in_files: bool = True

    @property
    def variable(self) -> str:
        """The name as that of a Python variable which hides no builtin.

        >>> CheckOption("fail-on").variable, CheckOption("format").variable
        ('fail_on', 'format_')
        """
        name = self.name.replace("-", "_")
        return f"{name}_" if hasattr(builtins, name) else name

    @property
    def environment(self) -> str:
        """The environment variable that stands in for it.

        >>> CheckOption("fail-on").environment
        'CKPTLINT_FAIL_ON'
        """
        return f"CKPTLINT_{self.name.upper().replace('-', '_')}"


CHECK_OPTIONS = (
    CheckOption("select", "Only these rules: codes, prefixes, names, ALL.", metavar="RULES", repeats=True),
    CheckOption("extend-select", "These rules too.", metavar="RULES", repeats=True),
    CheckOption("ignore", "Not these rules.", metavar="RULES", repeats=True),
    CheckOption("severity", "Another severity for a rule.", metavar="RULE=LEVEL", repeats=True),
    CheckOption(
        "fail-on",
        "Lowest severity that gives exit 1.",
        default="error",
        choices=("error", "warning", "info", "never"),
    ),
    CheckOption("strict", "Short for --fail-on warning.", is_flag=True),
    CheckOption("exit-zero", "Short for --fail-on never; unsafe or unread input still fails.", is_flag=True),
    CheckOption(
        "depth",
        "How much to read: the metadata only; names and sizes of payload files; each record's header; every byte.",
        default=Depth.FILES.value,
        choices=tuple(depth.value for depth in Depth),  # click shows members of an enum by their names
    ),
    CheckOption("sample", "Read a random part of the records, at depths headers and data.", metavar="P%"),
    CheckOption("seed", "Of --sample; printed when not given.", minimum=0),
    CheckOption("jobs", "Threads that read files, and steps read at once.  [default: min(8, CPUs)]", minimum=1),
    CheckOption("no-progress", "No progress bar on a terminal.", is_flag=True),
    CheckOption("format", "What goes to stdout.", default="full", choices=tuple(FORMATS)),
    CheckOption(
        "output", "Also write a report; the format by suffix, or given as F=.", metavar="[F=]FILE", repeats=True
    ),
    CheckOption("max-per-rule", "Groups shown; 0 = all.", default=5, minimum=0),
    CheckOption("statistics", "A table instead of findings: count, code, name, tensors.", is_flag=True),
    CheckOption("color", default="auto", choices=("auto", "always", "never")),
    CheckOption("ascii", "Draw chunk maps with plain characters.", is_flag=True),
    CheckOption("all-steps", "Every step of a run folder, not only the newest.", is_flag=True),
    CheckOption("expect", "Compare with a manifest, safetensors, a model folder or another checkpoint.", metavar="REF"),
    CheckOption("baseline", "Hide the findings of this earlier JSON report.", metavar="FILE"),
    CheckOption("config", "This settings file, instead of the nearest.", metavar="FILE", in_files=False),
    CheckOption("isolated", "No settings file.", is_flag=True, in_files=False),
    CheckOption("no-ignores", "Show what the ignores of the settings would hide.", is_flag=True),
    CheckOption("quiet", "-q findings only, -qq exit code only.", short="q", minimum=0, counts=True),
    CheckOption("verbose", "Also notes, rules that did not run and why, times.", short="v", is_flag=True),
)


def tokens(values: Iterable[str]) -> list[str]:
    """The codes, names and prefixes in the values of an option that takes rules; one value may hold several.

    >>> tokens(["GEO004,PAY", "coverage-hole"])
    ['GEO004', 'PAY', 'coverage-hole']
    """
    return [token for value in values for token in value.split(",")]


def percent(text: str) -> float:
    """The number of a share such as `5%`.

    >>> percent("2.5%")
    2.5

    Raises:
        ConfigError: the share is not above 0 and up to 100.
    """
    try:
        share = float(text.removesuffix("%"))
    except ValueError:
        share = 0.0
    if not 0 < share <= 100:
        raise ConfigError(f"--sample takes a share above 0% and up to 100%, not {text!r}")
    return share
