"""What is in a checkpoint, without a verdict: `ckptlint show`, and `ckptlint manifest`, to compare others with."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ckptlint.commands.shared import (
    ENVIRONMENT,
    OUTPUT,
    opened_or_exit,
    progress,
    say,
    show_text,
    terminal_style,
    write_file,
)
from ckptlint.depth import Depth
from ckptlint.storage.writing import checked_target


@click.command(context_settings=ENVIRONMENT)
@click.argument("path")
@click.argument("pattern", metavar="[GLOB | KEY[SLICES]]", required=False)
@click.option("--tree", is_flag=True, help="Show keys as a tree; layers with the same contents share a branch.")
@click.option("--ranks", is_flag=True, help="Show which rank or file holds which layers, and which are out of balance.")
@click.option(
    "--depth",
    type=click.Choice([depth.value for depth in Depth if depth.looks_at_files]),
    default=Depth.FILES.value,
    show_default=True,
    help="How deep to look for data that is lost: with data every byte is read, and checksums are compared.",
)
@click.option("--format", "format_", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--color", type=click.Choice(["auto", "always", "never"]), default="auto", show_default=True)
@click.option("--ascii", "ascii_only", is_flag=True, help="Draw with plain characters.")
def show(
    path: str, pattern: str | None, tree: bool, ranks: bool, depth: str, format_: str, color: str, ascii_only: bool
) -> None:
    """Show what a checkpoint is and holds, without a verdict: parameters, tensors, chunks, objects, topology.

    With a GLOB, or a name as the table folds it (`h.{0-3}.w`), show the tensors whose key matches, and a map of their
    chunks. With a key and slices as Python writes them (`'w[128:256, :]'`), show who holds these rows.

    Exit codes: 0 shown, 1 unsafe or unreadable, 2 no tensor or region matches, 3 no checkpoint there, 4 not read.
    """
    from ckptlint.comparing.sides import read_records
    from ckptlint.reporters.contents.checkpoint import contents_json, contents_text

    if tree and format_ == "json":
        raise click.UsageError("--tree prints text: leave out --format json")
    with progress(off=not Depth(depth).opens_records):
        checkpoints = read_records(opened_or_exit(path, files=True, partial=True), Depth(depth))
    style = terminal_style(color, ascii_only, 0, 0, False)
    if format_ == "json":
        show_text(contents_json(checkpoints, pattern, ranks))
    else:
        show_text(contents_text(checkpoints, pattern, tree, ranks, style))


@click.command(context_settings=ENVIRONMENT)
@click.argument("path")
@click.option("--output", type=OUTPUT, help="Write to this file, not to stdout.")
@click.option("--values", is_flag=True, help="Read the tensors, and write digests of what they hold.")
@click.option("--rows", is_flag=True, help="With --values, also a digest of each row: findings then name rows.")
def manifest(path: str, output: Path | None, values: bool, rows: bool) -> None:
    """Write the tensors of a checkpoint as JSON, to compare others with: `ckptlint OTHER --expect FILE`.

    With --values `ckptlint OTHER --expect FILE --depth data` compares what they hold, too, however they are cut.

    Exit codes: 0 written, 1 unsafe or unreadable, 3 no checkpoint there, 4 not read.
    """
    from ckptlint.comparing.manifest import manifest_of

    if rows and not values:
        raise click.UsageError("--rows needs --values")
    if output is not None:
        checked_target(output, (path,))
    with progress(off=not values):
        text, unread = manifest_of(opened_or_exit(path, files=values), values, rows)
    if unread:
        say(*unread)
        sys.exit(4)
    if output is None:
        show_text(text)
    else:
        write_file(output, text)
