"""`ckptlint plan`: whether a checkpoint loads into a job of another shape, and what each of its ranks would read."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from ckptlint.commands.completion import jobs
from ckptlint.commands.shared import ENVIRONMENT, described, progress, show_text, terminal_style, write_file
from ckptlint.errors import ConfigError

_SIZE = click.IntRange(min=1)


@click.command(context_settings=ENVIRONMENT)
@click.argument("path")
@click.option(
    "--to",
    metavar="JOB",
    shell_complete=jobs,
    help="Sizes of axes, dp=64,tp=4,pp=2, or a function of the job, job.py:state_dict, which is run for each rank.  "
    "[default: as many ranks as saved, under FSDP]",
)
@click.option("--world", type=_SIZE, metavar="N", help="Ranks of the job, for a function.")
@click.option("--mesh", metavar="AXES", help="The mesh that the function is given, dp=4,tp=2.  [default: dp=N]")
@click.option("--timeout", type=_SIZE, metavar="S", default=600, show_default=True, help="Seconds for the function.")
@click.option("--nodes", type=_SIZE, metavar="N", help="Also which files each of so many nodes must see.")
@click.option("--ranks-per-node", type=_SIZE, metavar="N", help="The same, by how many ranks a node has.")
@click.option("--from-nodes", type=_SIZE, metavar="N", help="So many nodes saved, and each has only its own files.")
@click.option("--no-load-optim", is_flag=True, help="The job of Megatron-LM starts its optimizer anew.")
@click.option("--no-load-rng", is_flag=True, help="It starts its random states anew.")
@click.option("--megatron", metavar="V", help="The version of megatron-core that loads, 0.16.  [default: any]")
@click.option("--format", "format_", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Also write a page to this file.")
@click.option("--color", type=click.Choice(["auto", "always", "never"]), default="auto", show_default=True)
@click.option("--no-progress", is_flag=True, help="No progress bar.")
def plan(
    path: str,
    format_: str,
    html: Path | None,
    color: str,
    no_progress: bool,
    timeout: int,
    no_load_optim: bool,
    no_load_rng: bool,
    **asked: Any,
) -> None:
    """Whether a checkpoint loads into a job of another shape, and what each of its ranks would read.

    Axes: dp (FSDP shards), dp_replicate, tp, pp, vpp, ep, etp, cp. A function returns the state dict that the job loads
    into, sharded for its rank; it takes a DeviceMesh, or nothing. It runs on the CPU, without memory and network.

    Exit codes: 0 it loads, 1 it does not, or loses something, or is unsafe or unreadable, 2 wrong use, 3 nothing there,
    4 could not be told.
    """
    found = described(path, files=True)
    if len(found) > 1:
        raise ConfigError(f"{path} holds {len(found)} checkpoints, name one of them: {', '.join(found)}")
    (ckpt,) = found.values()
    from ckptlint.planning.ask import make_plan
    from ckptlint.reporters.html import plan_page
    from ckptlint.reporters.plan import as_json, as_text
    from ckptlint.reporters.style import JSON_ESCAPE, inert

    give_up = {"optim": no_load_optim, "rng": no_load_rng}
    with progress(no_progress):
        made = make_plan(ckpt, seconds=timeout, give_up=[what for what, gone in give_up.items() if gone], **asked)
    if html is not None:
        write_file(html, plan_page.render(made, ckpt))
    if format_ == "json":
        show_text(inert(as_json(made), JSON_ESCAPE))
    else:
        show_text(inert(as_text(made, ckpt, terminal_style(color, False, 0, 0, False))))
    sys.exit(made.exit_code)
