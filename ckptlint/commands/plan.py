"""`ckptlint plan`: whether a checkpoint loads into a job of another shape, and what each of its ranks would read."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from ckptlint.commands.completion import jobs
from ckptlint.commands.shared import (
    ENVIRONMENT,
    OUTPUT,
    described_or_exit,
    progress,
    show_text,
    terminal_style,
    write_file,
)
from ckptlint.errors import ConfigError
from ckptlint.storage.writing import checked_target

_SIZE = click.IntRange(min=1)


@click.command(context_settings=ENVIRONMENT)
@click.argument("path")
@click.option(
    "--to",
    metavar="JOB",
    shell_complete=jobs,
    help="The job that loads: sizes of axes (dp=64,tp=4,pp=2), or a function of its code (job.py:state_dict), which "
    "ckptlint runs for each rank.  [default: as many ranks as saved, under FSDP]",
)
@click.option("--world", type=_SIZE, metavar="N", help="With a function: how many ranks the job has.")
@click.option("--mesh", metavar="AXES", help="The mesh to give the function: dp=4,tp=2.  [default: dp=N]")
@click.option(
    "--timeout", type=_SIZE, metavar="S", default=600, show_default=True, help="Stop the function after S seconds."
)
@click.option("--nodes", type=_SIZE, metavar="N", help="The job has N nodes: show which files each must see.")
@click.option("--ranks-per-node", type=_SIZE, metavar="N", help="Like --nodes, with N ranks on each node.")
@click.option("--from-nodes", type=_SIZE, metavar="N", help="N nodes saved, and each has only the files that it wrote.")
@click.option("--memory", metavar="SIZE", help="What a rank has for what it loads, 80GiB: exit 1 where that is less.")
@click.option("--no-load-optim", is_flag=True, help="Megatron-LM loads no optimizer state.")
@click.option("--no-load-rng", is_flag=True, help="Megatron-LM loads no random states.")
@click.option("--megatron", metavar="V", help="The version of megatron-core that loads: 0.16.  [default: any]")
@click.option("--format", "format_", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--html", type=OUTPUT, help="Also write a page to this file.")
@click.option("--color", type=click.Choice(["auto", "always", "never"]), default="auto", show_default=True)
@click.option("-q", "--quiet", count=True, help="-q prints what is wrong only, -qq prints nothing.")
@click.option("--no-progress", is_flag=True, help="Show no progress bar.")
def plan(
    path: str,
    format_: str,
    html: Path | None,
    color: str,
    quiet: int,
    no_progress: bool,
    no_load_optim: bool,
    no_load_rng: bool,
    **asked: Any,
) -> None:
    """Say whether a checkpoint loads into a job of another shape, and what each rank would read.

    Axes: dp (FSDP shards), dp_replicate, tp, pp, vpp, ep, etp, cp. A function takes a DeviceMesh, or nothing, and
    returns the state dict that its rank loads into. It runs on the CPU, without memory and network.

    Exit codes: 0 it loads, 1 it does not, or loses something, does not fit, is unsafe or unreadable, 2 wrong use,
    3 no checkpoint there, 4 could not tell.
    """
    if html is not None:
        checked_target(html, (path,))
    checkpoints = described_or_exit(path, files=True)
    if len(checkpoints) > 1:
        raise ConfigError(f"{path} holds {len(checkpoints)} checkpoints: name one of them ({', '.join(checkpoints)})")
    (ckpt,) = checkpoints.values()
    from ckptlint.model.text import JSON_ESCAPE, MARKUP_ESCAPE, inert
    from ckptlint.planning.ask import PlanRequest, make_plan
    from ckptlint.reporters.html import plan_page
    from ckptlint.reporters.plan import as_json, as_text

    give_up = ["optim"] * no_load_optim + ["rng"] * no_load_rng
    with progress(no_progress):
        made = make_plan(ckpt, PlanRequest(give_up=give_up, **asked))
    if html is not None:
        write_file(html, inert(plan_page.render(made), MARKUP_ESCAPE))
    if format_ == "json":
        show_text(inert(as_json(made), JSON_ESCAPE))
    elif quiet < (2 if made.exit_code else 1):
        show_text(inert(as_text(made, terminal_style(color, False, 0, quiet, False))))
    sys.exit(made.exit_code)
