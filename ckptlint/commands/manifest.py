"""`ckptlint manifest`: the tensors of a checkpoint as JSON, to compare others with."""

from __future__ import annotations

from pathlib import Path

import click

from ckptlint.commands.shared import ENVIRONMENT, described, show_text, write_file
from ckptlint.loaders.reference import manifest_text


@click.command(context_settings=ENVIRONMENT)
@click.argument("path")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="Write to this file.")
def manifest(path: str, output: Path | None) -> None:
    """The tensors of a checkpoint as JSON, to compare others with: `ckptlint OTHER --expect FILE`.

    Exit codes: 0 written, 1 unsafe or unreadable, 3 nothing there.
    """
    text = manifest_text(described(path).values())
    if output is None:
        show_text(text)
    else:
        write_file(output, text)
