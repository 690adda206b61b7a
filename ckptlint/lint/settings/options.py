"""The options of `ckptlint check`: the command line is made from this table, and settings files are held to it."""

from __future__ import annotations

import builtins
from collections.abc import Iterable
from typing import Literal, NamedTuple

from ckptlint.depth import Depth
from ckptlint.errors import ConfigError


class ReportFormat(NamedTuple):
    """One format of a report.

    Attributes:
        module: where in `ckptlint.reporters` its `render` is.
        suffix: of an output file that asks for it; "" where none does.
        syntax: what its text is made of, which decides how names in it are made inert; `commands` does that itself.
        names_settings: whether it has a place for the name of the settings file.
    """

    module: str
    suffix: str = ""
    syntax: Literal["text", "json", "markup", "commands"] = "text"
    names_settings: bool = True


FORMATS = {
    "full": ReportFormat("full", ".txt"),
    "concise": ReportFormat("concise", names_settings=False),
    "json": ReportFormat("json_report", ".json", "json"),
    "sarif": ReportFormat("ci.sarif", ".sarif", "json"),
    "junit": ReportFormat("ci.junit", ".xml", "markup"),
    "github": ReportFormat("ci.github", syntax="commands"),
    "gitlab": ReportFormat("ci.gitlab", syntax="json", names_settings=False),
    "rdjson": ReportFormat("ci.rdjson", syntax="json", names_settings=False),
    "markdown": ReportFormat("markdown", ".md"),
    "html": ReportFormat("html.page", ".html", "markup"),
}
"""The formats of a report: the command line, the reporters, the docs and the tests take them from here."""

SUFFIXES = {form.suffix: name for name, form in FORMATS.items() if form.suffix}
"""Formats by the suffix of an output file."""

GROUPS = {
    "read": "What to read",
    "rules": "Which rules run, and what fails",
    "output": "Output",
    "settings": "Settings and help",
}
"""The headings that `--help` puts the options below."""


class CheckOption(NamedTuple):
    """One option of `ckptlint check`; a text, where nothing else is said.

    Attributes:
        name: the long name, without dashes; also the key in a settings file.
        group: which of `GROUPS` it belongs to.
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
    group: str = "read"
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
    CheckOption(
        "depth",
        "read",
        "How much to read. files adds names and sizes of payload files to metadata, headers adds the header of each "
        "record, data reads all bytes. auto is data for up to 512 MiB on a local disk; else files, and some numbers of "
        "this step and the one before.",
        default="auto",
        choices=("auto", *(depth.value for depth in Depth)),  # click shows members of an enum by their names
    ),
    CheckOption("sample", "read", "Read a random part of the records, at depths headers and data.", metavar="P%"),
    CheckOption("seed", "read", "Seed of --sample.  [default: random, and printed]", metavar="N", minimum=0),
    CheckOption("all-steps", "read", "Check every step of a run folder, not only the newest.", is_flag=True),
    CheckOption(
        "expect", "read", "Compare with a manifest, safetensors, a model folder or another checkpoint.", metavar="REF"
    ),
    CheckOption(
        "before", "read", "Compare with this step, not with the one before in the run.", metavar="STEP", in_files=False
    ),
    CheckOption("expect-hashes", "read", "Compare files with this output of sha256sum, at depth data.", metavar="FILE"),
    CheckOption(
        "jobs",
        "read",
        "Use N threads to read files, and read N steps at once.  [default: min(8, CPUs)]",
        metavar="N",
        minimum=1,
    ),
    CheckOption("select", "rules", "Run only these rules: codes, prefixes, names, ALL.", metavar="RULES", repeats=True),
    CheckOption("extend-select", "rules", "Run these rules too.", metavar="RULES", repeats=True),
    CheckOption("ignore", "rules", "Do not run these rules.", metavar="RULES", repeats=True),
    CheckOption("severity", "rules", "Give a rule a different severity.", metavar="RULE=LEVEL", repeats=True),
    CheckOption(
        "fail-on",
        "rules",
        "Exit with 1 on findings of this severity or a higher one.  [default: warning; for latest: error]",
        choices=("info", "warning", "error", "never"),
    ),
    CheckOption("strict", "rules", "Short for --fail-on warning, the default of check.", is_flag=True),
    CheckOption(
        "exit-zero", "rules", "Short for --fail-on never; unsafe or unreadable input still exits with 1.", is_flag=True
    ),
    CheckOption("baseline", "rules", "Hide the findings of this earlier JSON report.", metavar="FILE"),
    CheckOption("no-ignores", "rules", "Show the findings that the settings ignore.", is_flag=True),
    CheckOption("format", "output", "What to print.", default="full", choices=tuple(FORMATS)),
    CheckOption(
        "output",
        "output",
        "Also write a report to a file, in format F or by the suffix of the file.",
        metavar="[F=]FILE",
        repeats=True,
    ),
    CheckOption(
        "max-per-rule", "output", "Print at most N groups of findings per rule; 0 = all.", 5, metavar="N", minimum=0
    ),
    CheckOption(
        "statistics", "output", "Print a table in place of the findings: count, code, name, tensors.", is_flag=True
    ),
    CheckOption(
        "quiet",
        "output",
        "-q prints findings and unread paths only, -qq nothing; formats for machines stay whole.",
        short="q",
        minimum=0,
        counts=True,
    ),
    CheckOption(
        "verbose", "output", "Also print notes, times, and which rules did not run and why.", short="v", is_flag=True
    ),
    CheckOption("color", "output", "Whether to print colors.", default="auto", choices=("auto", "always", "never")),
    CheckOption("ascii", "output", "Draw with plain characters.", is_flag=True),
    CheckOption("no-progress", "output", "Show no progress bar.", is_flag=True),
    CheckOption("config", "settings", "Read this settings file, not the nearest.", metavar="FILE", in_files=False),
    CheckOption("isolated", "settings", "Read no settings file.", is_flag=True, in_files=False),
)


LOOSENING = ("select", "extend-select", "ignore", "exit-zero", "baseline", "no-ignores")
"""The options that can only make a verdict more lenient: they have no say in what may be deleted."""


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
