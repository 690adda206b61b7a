"""`ckptlint diff`: what differs between two checkpoints, and with `--values` whether they hold the same."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ckptlint.commands.shared import (
    ENVIRONMENT,
    OUTPUT,
    described_or_exit,
    opened_or_exit,
    progress,
    show_text,
    terminal_style,
    write_file,
)
from ckptlint.comparing.differences import differences
from ckptlint.model.text import JSON_ESCAPE, MARKUP_ESCAPE, inert
from ckptlint.reporters.comparing.diff import as_json, as_text
from ckptlint.storage.writing import checked_target


@click.command(context_settings=ENVIRONMENT)
@click.argument("old")
@click.argument("new")
@click.option("--layout", is_flag=True, help="Also compare chunks, and which files hold them.")
@click.option("--values", is_flag=True, help="Read both, and compare the contents of tensors under any name.")
@click.option("--select", multiple=True, metavar="GLOB", help="With --values, compare only tensors that match.")
@click.option("--ignore", multiple=True, metavar="GLOB", help="With --values, leave out tensors that match.")
@click.option("--adapter", metavar="DIR", help="A LoRA adapter: NEW should be OLD with it merged in. Implies --values.")
@click.option("--jobs", type=click.IntRange(1, 64), metavar="N", help="With --values, how many threads read.")
@click.option("--html", type=OUTPUT, help="With --values, also write a page.")
@click.option("--format", "format_", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--color", type=click.Choice(["auto", "always", "never"]), default="auto", show_default=True)
def diff(
    old: str,
    new: str,
    layout: bool,
    values: bool,
    select: tuple[str, ...],
    ignore: tuple[str, ...],
    adapter: str | None,
    jobs: int | None,
    html: Path | None,
    format_: str,
    color: str,
) -> None:
    """Compare the keys, shapes and dtypes of two checkpoints, however each is sharded.

    With --values also what the tensors hold: equal, rounded, renamed, reordered, put together, or different and where.

    Exit codes: 0 the same (with --values: proven), 1 different, or one is unsafe or unreadable, 2 wrong use, 3 no
    checkpoint there, 4 not read.
    """
    values = values or adapter is not None
    if not values and (select or ignore or jobs or html):
        raise click.UsageError("--select, --ignore, --jobs and --html need --values")
    if html is not None:
        checked_target(html, (old, new, adapter or old))
    style = terminal_style(color, False, 0, 0, False)
    if values:
        from ckptlint.comparing.values.compare import compared_values
        from ckptlint.reporters.comparing.values import values_as_json, values_as_text

        with progress(off=False):
            sides = [opened_or_exit(path, files=True) for path in (old, new)]
            merged = opened_or_exit(adapter, files=True) if adapter else ()
            compared = compared_values(sides[0], sides[1], select, ignore, merged, jobs)
        text = values_as_json(compared, (old, new)) if format_ == "json" else values_as_text(compared, style)
        exit_code = compared.exit_code
        if html is not None:
            from ckptlint.reporters.html.values_page import render

            write_file(html, inert(render(compared, (old, new)), MARKUP_ESCAPE))
    else:
        difference = differences(described_or_exit(old), described_or_exit(new), layout)
        text, exit_code = as_json(difference) if format_ == "json" else as_text(difference, style), difference.exit_code
    show_text(inert(text, JSON_ESCAPE) if format_ == "json" else inert(text))
    sys.exit(exit_code)
